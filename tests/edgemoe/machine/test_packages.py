"""Lines that are printed to type: the command's path, and the line that installs an extra's packages."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from edgemoe.machine import packages
from edgemoe.machine.packages import how_to_reach, install_extra

EXTRAS = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("extra", ["serve", "plot", "cuda"])
def test_an_extra_is_installed_by_its_packages(extra):
    """The packages of pyproject.toml with their versions; never edgemoe, which no index has."""
    python, *pip, install = (words := shlex.split(install_extra(extra)))[:4]
    assert (python, pip, install) == (sys.executable, ["-m", "pip"], "install")
    wanted = {Requirement(each) for each in EXTRAS[extra]}
    assert {(each.name, each.specifier) for each in map(Requirement, words[4:])} == {
        (each.name, each.specifier) for each in wanted
    }


@pytest.mark.e2e
def test_pip_takes_the_line_for_satisfied_where_the_extra_is_installed():
    """In a shell, pip finds every requirement of the line, without a network."""
    pytest.importorskip("starlette")
    line = install_extra("serve").replace(" install ", " install --no-index ", 1)
    done = subprocess.run(line, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stdout.count("already satisfied") >= len(EXTRAS["serve"])) == (0, True), (
        done
    )


def test_a_checkout_that_is_not_installed_names_itself(monkeypatch):
    """Without metadata there is no list of packages."""

    def missing(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(packages, "requires", missing)
    assert install_extra("serve").endswith("-m pip install --editable '.[serve]'")


@pytest.mark.e2e
def test_a_command_that_no_shell_finds_is_said_with_its_path(tmp_path, monkeypatch):
    """A shell that runs the printed line finds the command next to this Python; where it does already, no line is."""
    folder = tmp_path / "a venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "edgemoe").write_text("#!/bin/sh\necho reached\n")
    (folder / "edgemoe").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    (line,) = how_to_reach()
    shell = line.partition("alone: ")[2] + "; edgemoe"
    assert subprocess.run(["/bin/sh", "-c", shell], capture_output=True, text=True).stdout == "reached\n"
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin")
    assert how_to_reach() == []
