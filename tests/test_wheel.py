"""The wheel: installed into a clean environment and run from another directory, it has the demo and the kernel."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.e2e

STRANGERS = {
    "cache/__init__.py": "owner = 'another project'\n",
    "storage/__init__.py": "owner = 'another project'\n",
    "prefetch.py": "owner = 'another project'\n",
}
"""Modules of another project in the environment, named like three folders of edgemoe's checkout."""


def clean_copy(target: Path) -> Path:
    """Copies the files that git does not ignore, so that a build leaves nothing in the working tree."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("the files of a wheel are known only in a git checkout")
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


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


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A new environment with the wheel, and the dependencies of this one, which are too large to download again."""
    source = clean_copy(tmp_path / "source")
    keep_kernel(source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheels, venv = tmp_path / "wheels", tmp_path / "venv"
    built = subprocess.run(
        [*pip, "wheel", "--no-deps", "--wheel-dir", wheels, source],
        capture_output=True,
        text=True,
        timeout=250,
    )
    if built.returncode:
        reason = built.stderr.strip().splitlines()[-1:]
        if "No matching distribution" in built.stderr or "No module named pip" in built.stderr:
            pytest.skip(f"no build tools: {reason}")  # they come from a package index
        pytest.fail(built.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (wheel,) = wheels.iterdir()
    (site,) = (venv / "lib").glob("python*/site-packages")
    for name, text in STRANGERS.items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(text)
    into = ["--python", venv / "bin" / "python", "install", "--no-deps", wheel]
    subprocess.run([*pip, *into], check=True, timeout=100)
    # A directory that a .pth file names is searched, but the .pth files in it, such as this checkout's, are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv


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


def test_the_wheel_answers_in_another_directory(installed: Path, tmp_path: Path) -> None:
    """The command loads its own packages from the wheel, with the compiled kernel, and the demo answers."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "cache.py").write_text("raise RuntimeError('edgemoe imported a file of the user')\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_STATE_HOME": str(tmp_path / "state")}
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
    python = [installed / "bin" / "python", "-c", code]
    shown = subprocess.run(python, cwd=elsewhere, env=environment, capture_output=True, text=True, check=True)
    *places, compiled = shown.stdout.splitlines()
    assert [place for place in places if not Path(place).is_relative_to(installed)] == []
    assert compiled == str(shutil.which("cc") is not None)
    (site,) = (installed / "lib").glob("python*/site-packages")
    assert {name: (site / name).read_text() for name in STRANGERS} == STRANGERS
    (record,) = site.glob("edgemoe-*.dist-info/RECORD")
    files = [line.split(",")[0] for line in record.read_text().splitlines()]
    tops = {Path(file).parts[0] for file in files if not file.startswith("..")}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"edgemoe"}
