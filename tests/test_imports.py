"""The packages: which may import which, what they may be called, and that edgemoe finds its own."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

PLACES = {name: ROOT / name for name in ("prefetch", "cache", "storage")}
"""Rooms whose folder is not in edgemoe's but next to it: name -> folder."""

ROOMS = (
    *(
        "cli",
        "commands",
        "serve",
        "bench",
        "recode",
        "calibrate",
        "evaluate",
        "chat",
        "api",
        "engine",
        "models",
        "memory",
    ),
    *(
        "grammar",
        "vision",
        "layers",
        "hub",
        "experts",
        "families",
        "console",
        "kernels",
        "kv",
        "policy",
        "speed",
    ),
    *("prefetch", "cache", "storage", "machine", "errors"),
)
"""The rooms of edgemoe; each may import itself and later ones."""

SERVE = (
    ("server",),
    ("connections",),
    ("app",),
    ("openai_chat", "openai_responses", "anthropic", "ollama", "router", "refused", "page"),
    ("guard",),
    ("protocol", "model_object"),
    ("models",),
    ("slot",),
    ("serving",),
    ("intake", "metrics"),
    ("job", "bodies", "compiling", "own_thread", "text_limit", "workers"),
    ("request",),
    ("limits", "errors"),
)
"""The parts of edgemoe.serve; each may import itself and later groups."""

TOPS = ("edgemoe", *PLACES)
"""The folders of the checkout that the wheel installs."""


def statements(nodes: list[Any]) -> Iterator[Any]:
    """Statements, also nested ones; expressions, which have no imports, are not entered."""
    for node in nodes:
        yield node
        for part in ("body", "orelse", "handlers", "finalbody", "cases"):
            yield from statements(getattr(node, part, []))


@cache
def imports_in(source: str) -> list[tuple[int, str, str | None]]:
    """(line, module, name imported from it or None) of every import in a module, wherever in the module it stands."""
    found = list[tuple[int, str, str | None]]()
    for node in statements(ast.parse(source).body):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(node.lineno, node.module, alias.name) for alias in node.names]
    return found


def modules_of(room: str) -> list[Path]:
    """The modules of a room: a file, or the files of a folder."""
    place = PLACES.get(room, ROOT / "edgemoe" / room)
    return sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]


def dotted(path: Path) -> str:
    """The name under which a file or folder of the checkout is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "edgemoe" else ("edgemoe", *parts))


def room_imports(source: str) -> Iterator[tuple[int, str]]:
    """(line, room) of every import of a room of edgemoe in a module.

    `tests`, `tools` and the folders of PLACES as top-level packages are yielded under these names: no room may import
    them so.
    """
    for line, module, name in imports_in(source):
        parts = (f"edgemoe.{name}" if module == "edgemoe" and name else module).split(".")
        if parts[0] == "edgemoe" and len(parts) > 1 and parts[1] in ROOMS:
            yield line, parts[1]
        elif parts[0] in {*PLACES, "tests", "tools"}:
            yield line, f"top-level {parts[0]}"


def room_violations(source: str, room: str) -> list[tuple[int, str]]:
    """The imports in a module of `room` that name a room before it."""
    allowed = ROOMS[ROOMS.index(room) :]
    return [*dict.fromkeys(found for found in room_imports(source) if found[1] not in allowed)]


def serve_imports(source: str) -> set[str]:
    """The parts of edgemoe.serve that a module imports, wherever in the module it stands."""
    names = [f"{module}.{name}" for _, module, name in imports_in(source)]
    return {name.split(".")[2] for name in names if name.startswith("edgemoe.serve.")}


@pytest.mark.parametrize("part", [part for group in SERVE for part in group])
def test_parts_of_serve_import_only_parts_after_them(part: str) -> None:
    """A protocol imports no other one, and what protocols stand on imports none of them."""
    place = ROOT / "edgemoe" / "serve" / part
    modules = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    at = next(number for number, group in enumerate(SERVE) if part in group)
    allowed = {part, *(name for group in SERVE[at + 1 :] for name in group)}
    wrong = {
        path.name: found
        for path in modules
        if (found := serve_imports(path.read_text(encoding="utf-8")) - allowed)
    }
    assert modules
    assert wrong == {}


def test_every_module_of_serve_is_a_part() -> None:
    """A new file or folder takes a place in the order; imports of both kinds are seen."""
    entries = {path.stem for path in (ROOT / "edgemoe" / "serve").iterdir()}
    assert entries - {"__init__", "__pycache__"} == {n for g in SERVE for n in g}
    assert serve_imports(
        "def f():\n    from edgemoe.serve import job\n    import edgemoe.serve.app as a"
    ) == {
        "job",
        "app",
    }


def test_every_folder_of_edgemoe_is_a_room() -> None:
    """A new folder takes a place in the order."""
    folders = {path.name for path in (ROOT / "edgemoe").iterdir() if (path / "__init__.py").is_file()}
    assert folders <= {*ROOMS}


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_rooms_after_them(room: str) -> None:
    """No module imports a room before its own, at its top or within a function."""
    modules = modules_of(room)
    assert modules
    wrong = {
        str(path.relative_to(ROOT)): found
        for path in modules
        if (found := room_violations(path.read_text(encoding="utf-8"), room))
    }
    assert wrong == {}


def test_a_memory_plan_does_not_know_the_compiled_kernel() -> None:
    """No module of memory imports from kernels.native: a kernel's bytes are a number of edgemoe.kernels."""
    for path in modules_of("memory"):
        assert "kernels.native" not in path.read_text(encoding="utf-8"), path


@pytest.mark.parametrize(
    ("source", "room", "expected"),
    [
        ("def f():\n    from edgemoe.chat.loop import run_chat\n", "engine", [(2, "chat")]),
        ("import edgemoe.engine.engine as e\n", "kv", [(1, "engine")]),
        ("from edgemoe import cli\n", "machine", [(1, "cli")]),
        ("from edgemoe.kv.step import Step\nfrom edgemoe import __version__\n", "engine", []),
        ("def f():\n    from edgemoe.prefetch.base import ExpertSource\n", "cache", [(2, "prefetch")]),
        ("import os\nfrom edgemoe import kernels\n", "storage", [(2, "kernels")]),
        ("if 0:\n    import numpy, cache.base\n", "engine", [(2, "top-level cache")]),
        ("from tests import faults\n", "chat", [(1, "top-level tests")]),
        ("from . import base\nfrom edgemoe.storage.base import Plane\nimport cachetools\n", "cache", []),
    ],
)
def test_wrong_rooms_are_seen(source: str, room: str, expected: list[tuple[int, str]]) -> None:
    """Nested and aliased imports of rooms are seen; imports of later rooms are not reported."""
    assert room_violations(source, room) == expected


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others."""
    reached = {start: set[str]() for start in graph}
    for start, seen in reached.items():
        left = list(graph[start])
        while left:
            module = left.pop()
            if module not in seen:
                seen.add(module)
                left += graph.get(module, ())
    groups = {tuple(sorted(m for m in reached[a] if a in reached[m])) for a in graph if a in reached[a]}
    return [list(group) for group in sorted(groups)]


def test_no_modules_import_each_other() -> None:
    """There is no import circle in edgemoe, imports for type checkers included."""
    paths = [path for top in TOPS for path in (ROOT / top).rglob("*.py")]
    names = {dotted(path): path for path in paths}
    graph: dict[str, set[str]] = {}
    for own, path in names.items():
        imports = imports_in(path.read_text(encoding="utf-8"))
        found = {each for _, module, name in imports for each in (module, f"{module}.{name}")}
        graph[own] = found & names.keys()
    assert circles(graph) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


CSRC = ROOT / "edgemoe" / "kernels" / "native" / "csrc"


def c_includes(path: Path) -> set[Path]:
    """The files of csrc that a source or header includes."""
    names = re.findall(r'^#include "(.+)"', path.read_text(encoding="utf-8"), re.MULTILINE)
    return {(path.parent / name).resolve() for name in names}


def test_no_units_of_the_kernel_include_each_other() -> None:
    """A unit of csrc is a source with its header; there is no circle of includes between units."""
    graph: dict[str, set[str]] = {}
    for path in CSRC.rglob("*.[ch]"):
        units = {str(each.relative_to(CSRC).with_suffix("")) for each in (path, *c_includes(path))}
        own = str(path.relative_to(CSRC).with_suffix(""))
        graph.setdefault(own, set()).update(units - {own})
    assert len(graph) > 20
    assert circles(graph) == []


def c_functions(text: str, end: str) -> set[str]:
    """Functions with external linkage in C whose head is followed by `end`: ";" for declared, "{" for defined ones."""
    heads = rf"^(?!static|typedef|INLINE)\w[\w ]*[ *](\w+)\([^{{}};]*\)\s*{re.escape(end)}"
    return set(re.findall(heads, text, re.MULTILINE))


def expanded(source: Path) -> str:
    """A source of csrc with its templates, headers that may be included more than once, and the names that it gives."""
    text = source.read_text(encoding="utf-8")
    parts = [text] + [each.read_text(encoding="utf-8") for each in c_includes(source)]
    whole = "\n".join(part for part in parts if "#pragma once" not in part)
    suffix = re.search(r"#define NAME\(name\) name##(\w+)", text)
    whole = re.sub(r"\bNAME\((\w+)\)", rf"\1{suffix[1] if suffix else ''}", whole)
    for macro, name in re.findall(r"^#define ([A-Z]+) (\w+)$", text, re.MULTILINE):
        whole = re.sub(rf"\b{macro}\b", name, whole)
    return whole


def test_a_header_of_the_kernel_declares_functions_of_its_own_source() -> None:
    """So includes are what calls what, and a circle of calls is a circle of includes."""
    headers = [path for path in CSRC.rglob("*.h") if "#pragma once" in path.read_text(encoding="utf-8")]
    declared = {path: c_functions(path.read_text(encoding="utf-8"), ";") for path in headers}
    assert sum(map(len, declared.values())) > 40
    for header, functions in declared.items():
        source = header.with_suffix(".c")
        defined = c_functions(expanded(source), "{") if source.is_file() else set()
        assert functions - defined == set(), header
    assert c_functions("static int f(int a);\nint g(int a,\n      int b);\nint *h(void) {}", ";") == {"g"}


def test_every_file_of_the_kernel_is_built_from() -> None:
    """pyproject.toml lists exactly the sources and headers of csrc: a change of one of them builds the library anew."""
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    (built,) = setup["ext-modules"]
    for listed, ending in ((built["sources"], "c"), (built["depends"], "h")):
        assert listed == sorted(str(path.relative_to(ROOT)) for path in CSRC.rglob(f"*.{ending}"))


def test_no_file_is_named_for_nothing() -> None:
    """A file is named for its one idea; names that could hold anything are not used."""
    names = {path.name for top in (*TOPS, "tests", "tools") for path in (ROOT / top).rglob("*.py")}
    assert (
        names & {"utils.py", "util.py", "helpers.py", "helper.py", "manager.py", "common.py", "misc.py"}
        == set()
    )


def test_tests_are_no_package() -> None:
    """tests has no __init__.py, so that no installed package can be called tests."""
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_every_package_is_installed() -> None:
    """pyproject.toml lists exactly the directories with modules, and each is a typed, regular package."""
    tops = {d.name for d in ROOT.iterdir() if d.name[0] != "." and any(d.glob("*.py"))} - {"tests", "tools"}
    assert tops == set(TOPS)
    directories = {path.parent for top in TOPS for path in (ROOT / top).rglob("*.py")}
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert sorted(setup["packages"]) == sorted(dotted(directory) for directory in directories)
    assert [d for d in directories if not (d / "__init__.py").is_file()] == []
    assert (ROOT / "edgemoe" / "py.typed").is_file()


@pytest.mark.parametrize("name", PLACES)
def test_a_folder_beside_edgemoe_is_linked_into_it(name: str) -> None:
    """In a checkout edgemoe has a relative symbolic link to each of its packages that lie next to it."""
    link = ROOT / "edgemoe" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..", name)
    assert link.resolve() == PLACES[name]


def run_python(*arguments: str, cwd: Path, path: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
    """A new interpreter's run in `cwd`, with the directories `path` first on its import path."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.e2e
def test_import_is_cheap(tmp_path: Path) -> None:
    """`import edgemoe` gives the changelog's newest version and loads neither torch nor a package of its own."""
    code = (
        "import edgemoe, sys\n"
        "print(edgemoe.__version__, *({'torch', 'edgemoe.storage', 'edgemoe.cache'} & set(sys.modules)))"
    )
    done = run_python("-c", code, cwd=tmp_path, path=(ROOT,))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(\d+\.\d+\.\d+)\]", changelog, re.MULTILINE)
    assert newest
    assert (done.stdout, done.stderr) == (newest[1] + "\n", "")


@pytest.mark.parametrize("name", PLACES)
def test_a_folder_of_the_checkout_is_no_module_of_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the checkout is on the import path, `import cache` fails with the reason, and never gives edgemoe's."""
    monkeypatch.setattr(sys, "path", [str(ROOT)])
    with pytest.raises(
        ImportError, match=rf"got a folder of edgemoe's checkout, which is edgemoe\.{name}: start in"
    ):
        importlib.import_module(name)
    assert name not in sys.modules


@pytest.mark.e2e
@pytest.mark.parametrize("file", ["{}.py", "{}/__init__.py"])
def test_other_modules_of_these_names_do_no_harm(tmp_path: Path, file: str) -> None:
    """A user's own `cache`, `storage` and `prefetch` are not imported by edgemoe, and stay importable."""
    for name in PLACES:
        stranger = tmp_path / file.format(name)
        stranger.parent.mkdir(exist_ok=True)
        stranger.write_text("owner = 'the user'\n")
    code = (
        "import edgemoe.prefetch.fetcher, sys\n"
        "assert not {'cache', 'storage', 'prefetch'} & set(sys.modules)\n"
        "import cache, storage, prefetch\n"
        "print(cache.owner, storage.owner, prefetch.owner, sep=', ')"
    )
    done = run_python("-c", code, cwd=tmp_path, path=(tmp_path, ROOT))
    assert (done.stdout, done.stderr) == ("the user, the user, the user\n", "")
