"""Limits on the size of the code: methods per class, imports per module, lines per file and per function.

What exceeds a limit is listed by name. An entry that no longer exceeds it must be removed, so the lists only shrink.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("edgemoe", "cache", "prefetch", "storage", "tools")

LIMITS = {"methods": 20, "imports": 20, "lines": 300, "function lines": 40}
"""Methods per class (public and private), import statements per module, lines per file and per function."""

EXCEPTIONS: dict[str, set[str]] = {
    "methods": set(),
    "imports": set(),
    "lines": {
        "tools/training/chats/outside.py",
        "tools/training/chats/small_talk.py",
    },
    "function lines": {
        "edgemoe/engine/generate.py:Generation.answer",
        "edgemoe/engine/parts.py:open_parts",
        "edgemoe/kernels/triton/attend.py:attend",
        "edgemoe/kernels/triton/place.py:place",
    },
}
"""Exceptions from the limits: a file, or `file:name` of a class or function."""


def sources() -> Iterator[tuple[str, str]]:
    """The path below ROOT and the text of each module; edgemoe's links to other folders are not followed."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.resolve() == path:
                yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """(qualified name, definition) of every class and function, nested ones included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield prefix + node.name, node
            yield from definitions(node, f"{prefix}{node.name}.")
        elif not isinstance(node, ast.expr):
            yield from definitions(node, prefix)


def measured(path: str, source: str) -> Iterator[tuple[str, str, int]]:
    """(limit, name, size) of everything in a module that has a limit."""
    tree = ast.parse(source)
    yield "lines", path, len(source.splitlines())
    yield "imports", path, sum(isinstance(node, (ast.Import, ast.ImportFrom)) for node in tree.body)
    for name, node in definitions(tree):
        if isinstance(node, ast.ClassDef):
            methods = [
                part for part in node.body if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))
            ]
            yield "methods", f"{path}:{name}", len(methods)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield "function lines", f"{path}:{name}", (node.end_lineno or 0) - node.lineno + 1


@cache
def sizes_here() -> list[tuple[str, str, int]]:
    """The result of `measured` for all modules of this checkout."""
    return [size for path, source in sources() for size in measured(path, source)]


def exceeding(limit: str) -> dict[str, int]:
    """Name -> size of what exceeds a limit in this checkout."""
    return {name: size for kind, name, size in sizes_here() if kind == limit and size > LIMITS[limit]}


@pytest.mark.parametrize("limit", LIMITS)
def test_code_is_within_its_limits(limit: str) -> None:
    """Nothing exceeds a limit that is not listed in EXCEPTIONS, and nothing is listed that does not."""
    found = exceeding(limit)
    assert {name: size for name, size in found.items() if name not in EXCEPTIONS[limit]} == {}
    assert EXCEPTIONS[limit] - set(found) == set(), "these no longer exceed the limit: remove them"


def test_sizes_are_counted() -> None:
    """Each kind of size is counted as written here, of nested and asynchronous definitions too."""
    source = (
        "import os, sys\nfrom a import b\n\n\nclass C:\n    x = 1\n\n    def f(self):\n        import c\n\n"
        "    async def g(self):\n        def h():\n            return 1\n        return h\n"
    )
    assert sorted(measured("m.py", source)) == [
        ("function lines", "m.py:C.f", 2),
        ("function lines", "m.py:C.g", 4),
        ("function lines", "m.py:C.g.h", 2),
        ("imports", "m.py", 2),
        ("lines", "m.py", 14),
        ("methods", "m.py:C", 2),
    ]


def test_edgemoe_has_few_modules_next_to_its_folders() -> None:
    """The package itself has at most five modules: the entry points."""
    assert len(list((ROOT / "edgemoe").glob("*.py"))) <= 5
