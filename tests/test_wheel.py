"""Contents of the wheel and the sdist, and the wheel in a clean environment, run from another directory."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from email import message_from_bytes
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from edgemoe import __version__
from tools.dist import build_sdist, copy_checkout, unpack

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.e2e

STRANGERS = {
    "cache/__init__.py": "owner = 'another project'\n",
    "storage/__init__.py": "owner = 'another project'\n",
    "prefetch.py": "owner = 'another project'\n",
}
"""Modules of another project in the environment, named like three folders of edgemoe's checkout."""


def keep_kernel(source: Path) -> None:
    """Puts the compiled kernel of this checkout where a build in a copy of it looks for one that is up to date.

    Compiling takes half a minute. Where the checkout's is missing or older than its sources the build compiles.
    """
    native = Path("edgemoe", "kernels", "native")
    sources = [path.stat().st_mtime for path in (ROOT / native / "csrc").rglob("*.[ch]")]
    place = f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    for compiled in (ROOT / native).glob("_kernels*.so"):
        if compiled.stat().st_mtime > max(sources):
            (source / "build" / place / native).mkdir(parents=True)
            shutil.copy(compiled, source / "build" / place / native)


PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]

# Where this environment has setuptools, as torch requires it, none is installed for each build.
BUILD = ["--no-build-isolation"] if find_spec("setuptools") else []


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout in which builds may leave files."""
    try:
        return copy_checkout(tmp_path_factory.mktemp("checkout"))
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("the files of a wheel are known only in a git checkout")


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, with its compiled kernel where it has one."""
    keep_kernel(source)
    wheels = tmp_path_factory.mktemp("wheels")
    command = [*PIP, "wheel", "--no-deps", *BUILD, "--wheel-dir", wheels, source]
    built = subprocess.run(command, capture_output=True, text=True, timeout=250)
    if built.returncode:
        reason = built.stderr.strip().splitlines()[-1:]
        if "No matching distribution" in built.stderr or "No module named pip" in built.stderr:
            pytest.skip(f"no build tools: {reason}")  # they come from a package index
        pytest.fail(built.stderr)
    (path,) = wheels.iterdir()
    return path


def environment_with(place: Path, *package: Path | str) -> Path:
    """A new environment with edgemoe, and the dependencies of this one, which are too large to download again.

    Args:
        place: the directory to make.
        package: pip's arguments for edgemoe.

    Returns:
        its directory of packages.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    (site,) = (place / "lib").glob("python*/site-packages")
    for name, text in STRANGERS.items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(text)
    into = ["--python", place / "bin" / "python", "install", "--no-deps", "--no-compile", *package]
    builder = place / "builder"
    builder.mkdir()
    if (setuptools := find_spec("setuptools")) and setuptools.origin:
        packages = Path(setuptools.origin).parents[1]
        for part in (*packages.glob("setuptools*"), packages / "_distutils_hack"):
            (builder / part.name).symlink_to(part)
    # No compiler: what runs is the kernel that comes with the package.
    variables = {"CC": "false", "PYTHONPATH": str(builder)}
    subprocess.run([*PIP, *into], check=True, timeout=100, env=os.environ | variables)
    # A directory that a .pth file names is searched, but the .pth files in it, such as this checkout's, are not read.
    torch = find_spec("torch")
    assert torch
    assert torch.origin
    (site / "dependencies.pth").write_text(f"{Path(torch.origin).parents[1]}\n")
    return site


def test_git_has_every_source_of_the_kernel() -> None:
    """A file that a build reads and git does not have would be missing from a clone."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "*.[ch]"]
    try:
        known = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("the files of a wheel are known only in a git checkout")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    (extension,) = settings["ext-modules"]
    sources = Path("edgemoe", "kernels", "native", "csrc")
    named = {*extension["sources"], *extension["depends"]}
    assert named == {str(path.relative_to(ROOT)) for path in (ROOT / sources).rglob("*.[ch]")}
    assert named <= {*known}
    included = {
        str((ROOT / name).parent.joinpath(header).resolve().relative_to(ROOT))
        for name in named
        for header in re.findall(r'#include "([^"]+)"', (ROOT / name).read_text())
    }
    assert included <= named


def test_the_wheel_has_every_file_of_the_packages(source: Path, wheel: Path) -> None:
    """Modules of all folders, the demo and the server's page are in it under one name, edgemoe, and nothing else is."""
    wanted = {
        path.relative_to(source).as_posix()
        for path in (source / "edgemoe").rglob("*")
        if path.is_file() and not {"csrc", "__pycache__"} & {*path.parts} and path.suffix != ".so"
    }
    for room in ("cache", "prefetch", "storage"):
        wanted |= {f"edgemoe/{path.relative_to(source).as_posix()}" for path in (source / room).rglob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        read = message_from_bytes(archive.read(metadata))
        commands = archive.read(metadata.replace("METADATA", "entry_points.txt")).decode()
    modules = {name for name in names if ".dist-info/" not in name and not name.endswith(".so")}
    assert modules == wanted
    page = {f"edgemoe/serve/page/{name}" for name in ("page.html", "chat.css", "chat.js")}
    assert {"edgemoe/demo/model.safetensors", "edgemoe/py.typed", *page} <= modules
    assert commands.split("\n")[:2] == ["[console_scripts]", "edgemoe = edgemoe.cli:main"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (read["Name"], read["Version"]) == ("edgemoe", __version__)
    assert (read["Requires-Python"], read["License-Expression"]) == (">=3.11", "Apache-2.0")
    assert set(read.get_all("Provides-Extra")) == {*project["optional-dependencies"]}
    needed = {re.split("[<>=]", line)[0] for line in project["dependencies"]}
    assert needed <= {re.split("[<>=; ]", line)[0] for line in read.get_all("Requires-Dist")}


def test_an_sdist_has_every_source(source: Path, tmp_path: Path) -> None:
    """A wheel can be built of it: packages, sources of the kernel, and what pyproject.toml names."""
    pytest.importorskip("build", reason="the sdist is built by what pip install '.[dist]' brings")
    unpacked = unpack(build_sdist(source, tmp_path / "files"), tmp_path / "unpacked")
    names = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    inside = {path.relative_to(source).as_posix() for path in (source / "edgemoe").rglob("*.[ch]")}
    for room in ("cache", "prefetch", "storage"):
        inside |= {f"edgemoe/{path.relative_to(source).as_posix()}" for path in (source / room).rglob("*.py")}
    assert inside | {"pyproject.toml", "README.md", "LICENSE", "edgemoe/demo/model.safetensors"} <= names
    assert [name for name in names if name.startswith(("tests", "tools", "docs"))] == []


def test_the_wheel_answers_in_another_directory(wheel: Path, tmp_path: Path, demo_cache: Path) -> None:
    """The command loads its own packages from the wheel, with the compiled kernel, and the demo answers."""
    installed = tmp_path / "venv"
    site = environment_with(installed, wheel)
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "edgemoe").mkdir(parents=True)  # such as a clone
    for name in ("cache", "storage", "prefetch", "jinja2", "json", "queue", "tokenizers", "torch"):
        (elsewhere / f"{name}.py").write_text("raise RuntimeError('edgemoe imported a file of the user')\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"XDG_CACHE_HOME": str(demo_cache), "XDG_STATE_HOME": str(tmp_path / "state")}
    environment["EDGEMOE_PLAIN_CODES"] = "true"
    ask = ["chat", "-p", "What is the capital of France?", "--json"]
    done = subprocess.run(
        [installed / "bin" / "edgemoe", *ask],
        cwd=elsewhere,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in json.loads(done.stdout)["text"]
    code = (
        "import edgemoe, edgemoe.storage, edgemoe.kernels.native.library as library\n"
        "print(edgemoe.__file__, edgemoe.storage.__file__, library.available(), sep='\\n')"
    )
    python = [installed / "bin" / "python", "-P", "-c", code]
    shown = subprocess.run(python, cwd=elsewhere, env=environment, capture_output=True, text=True, check=True)
    *places, compiled = shown.stdout.splitlines()
    assert [place for place in places if not Path(place).is_relative_to(installed)] == []
    with zipfile.ZipFile(wheel) as archive:
        assert compiled == str(any(name.endswith(".so") for name in archive.namelist()))
    assert {name: (site / name).read_text() for name in STRANGERS} == STRANGERS


def test_an_editable_installation_is_found_next_to_its_clone(source: Path, tmp_path: Path) -> None:
    """A program whose directory has the clone, a folder called edgemoe, imports the package and not that folder."""
    environment_with(tmp_path / "venv", *BUILD, "--editable", source)
    (tmp_path / "edgemoe").symlink_to(source)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = partial(subprocess.run, cwd=tmp_path, env=environment, capture_output=True, text=True)
    shown = run([tmp_path / "venv" / "bin" / "python", "-m", "edgemoe", "--version"])
    assert (shown.stdout, shown.stderr) == (f"edgemoe {__version__}\n", "")
    imported = run([tmp_path / "venv" / "bin" / "python", "-c", "import cache; print(cache.owner)"])
    assert imported.stdout == "another project\n", imported.stderr
