"""The packages: which may import which, what they may be called, and that edgemoe finds its own."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

ORDER = ("storage", "cache", "prefetch", "edgemoe")
"""Each package may import itself and those before it."""


def imported(tree: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    """(line, top-level package) of every import in a module, wherever in the module it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, package if node.level else (node.module or "").partition(".")[0]


def violations(source: str, package: str) -> list[tuple[int, str]]:
    """The imports in a module of `package` that point the wrong way."""
    forbidden = {*ORDER[ORDER.index(package) + 1 :], "tests", "tools"}
    return [found for found in imported(ast.parse(source), package) if found[1] in forbidden]


@pytest.mark.parametrize("package", ORDER)
def test_imports_point_one_way(package: str) -> None:
    """No module imports a package above its own."""
    modules = sorted((ROOT / package).rglob("*.py"))
    assert modules
    wrong = {
        str(path.relative_to(ROOT)): found
        for path in modules
        if (found := violations(path.read_text(encoding="utf-8"), package))
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("source", "package", "expected"),
    [
        ("import os\nimport edgemoe.engine.engine as e\n", "prefetch", [(2, "edgemoe")]),
        ("def f():\n    from prefetch.base import ExpertSource\n", "cache", [(2, "prefetch")]),
        ("if 0:\n    import numpy, cache.base\n", "storage", [(2, "cache")]),
        ("from tests import faults\n", "edgemoe", [(1, "tests")]),
        ("from . import base\nfrom storage.base import Plane\nimport cachetools\n", "cache", []),
        ("from storage import base\nfrom cache import base\nfrom prefetch import base\n", "edgemoe", []),
    ],
)
def test_wrong_imports_are_seen(source: str, package: str, expected: list[tuple[int, str]]) -> None:
    """Nested, aliased and listed imports are all seen; those that point down are not reported."""
    assert violations(source, package) == expected


ROOMS = (
    *(
        "cli",
        "commands",
        "serve",
        "bench",
        "calibrate",
        "evaluate",
        "chat",
        "api",
        "engine",
        "models",
        "memory",
    ),
    *("grammar", "layers", "hub", "experts", "families", "console", "kernels", "kv", "policy", "machine"),
)
"""The rooms of edgemoe; each may import itself and those after it."""


def room_imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, room) of every import of a room of edgemoe in a module, wherever in the module it stands."""
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module == "edgemoe":
            names = [f"edgemoe.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        for name in names:
            parts = name.split(".")
            if parts[0] == "edgemoe" and len(parts) > 1 and parts[1] in ROOMS:
                yield node.lineno, parts[1]


def room_violations(source: str, room: str) -> list[tuple[int, str]]:
    """The imports in a module of `room` that name a room before it."""
    before = ROOMS[: ROOMS.index(room)]
    return [found for found in room_imports(ast.parse(source)) if found[1] in before]


def test_every_folder_of_edgemoe_is_a_room() -> None:
    """A new folder takes a place in the order."""
    folders = {path.name for path in (ROOT / "edgemoe").iterdir() if (path / "__init__.py").is_file()}
    assert folders <= {*ROOMS}


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_rooms_after_them(room: str) -> None:
    """No module imports a room before its own, at its top or within a function."""
    place = ROOT / "edgemoe" / room
    modules = [place.with_suffix(".py")] if room == "cli" else sorted(place.rglob("*.py"))
    wrong = {
        str(path.relative_to(ROOT)): found
        for path in modules
        if (found := room_violations(path.read_text(encoding="utf-8"), room))
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("source", "room", "expected"),
    [
        ("def f():\n    from edgemoe.chat.loop import run_chat\n", "engine", [(2, "chat")]),
        ("import edgemoe.engine.engine as e\n", "kv", [(1, "engine")]),
        ("from edgemoe import cli\n", "machine", [(1, "cli")]),
        ("from edgemoe.kv.step import Step\nfrom edgemoe import __version__\n", "engine", []),
    ],
)
def test_wrong_rooms_are_seen(source: str, room: str, expected: list[tuple[int, str]]) -> None:
    """Nested and aliased imports of rooms are seen; those that point to later rooms are not reported."""
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
    """There is no import circle in the four packages, imports for type checkers included."""
    paths = [path for package in ORDER for path in (ROOT / package).rglob("*.py")]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        found = graph[name] = set[str]()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
        found.intersection_update(names)
    assert circles(graph) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_no_file_is_named_for_nothing() -> None:
    """A file is named for its one idea; names that could hold anything are not used."""
    names = {path.name for top in (*ORDER, "tests", "tools") for path in (ROOT / top).rglob("*.py")}
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
    assert tops == set(ORDER)
    directories = {path.parent for top in tops for path in (ROOT / top).rglob("*.py")}
    dotted = {".".join(directory.relative_to(ROOT).parts) for directory in directories}
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert sorted(setup["packages"]) == sorted(dotted)
    assert [d for d in directories if not (d / "__init__.py").is_file()] == []
    assert [top for top in tops if not (ROOT / top / "py.typed").is_file()] == []
    assert set(setup["package-data"]) == tops


def run_python(*arguments: str, cwd: Path, path: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
    """A new interpreter's run in `cwd`, with the directories `path` first on its import path."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60
    )


def test_import_is_cheap(tmp_path: Path) -> None:
    """`import edgemoe` gives the changelog's newest version and loads neither torch nor a sibling."""
    code = (
        "import edgemoe, sys; print(edgemoe.__version__, *({'torch', 'storage', 'cache'} & set(sys.modules)))"
    )
    done = run_python("-c", code, cwd=tmp_path, path=(ROOT,))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(\d+\.\d+\.\d+)\]", changelog, re.MULTILINE)
    assert newest
    assert (done.stdout, done.stderr) == (newest[1] + "\n", "")


@pytest.mark.parametrize("name", ["storage", "cache", "prefetch"])
@pytest.mark.parametrize("file", ["{}.py", "{}/__init__.py"])
def test_a_shadowed_sibling_is_named(tmp_path: Path, name: str, file: str) -> None:
    """Something else called as a sibling stops the import, naming what was found and what was expected."""
    stranger = tmp_path / file.format(name)
    stranger.parent.mkdir(exist_ok=True)
    stranger.write_text("raise RuntimeError('the stranger was run')\n")
    found = stranger if stranger.parent == tmp_path else stranger.parent
    done = run_python("-c", "import edgemoe", cwd=tmp_path, path=(tmp_path, ROOT))
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert message.startswith("ImportError: ")
    assert f"{name!r} at {ROOT / name}: Python finds {found} instead" in message
    assert "PYTHONPATH" in message


def test_a_missing_sibling_is_named(tmp_path: Path) -> None:
    """edgemoe without its siblings says which one is missing."""
    (tmp_path / "edgemoe").mkdir()
    (tmp_path / "edgemoe" / "__init__.py").write_bytes((ROOT / "edgemoe" / "__init__.py").read_bytes())
    done = run_python("-S", "-c", "import edgemoe", cwd=tmp_path)
    assert done.returncode == 1
    assert "finds nothing instead" in done.stderr.splitlines()[-1]
