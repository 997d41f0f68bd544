"""Lines to type: how the command is reached, and the line that installs packages into the Python that runs."""

from __future__ import annotations

import shlex
import shutil
import sys
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path


def install_line(*packages: str) -> str:
    """Returns the shell command that installs packages of the index next to edgemoe.

    Args:
        packages: names, with or without versions.
    """
    return shlex.join([sys.executable, "-m", "pip", "install", *packages])


def install_extra(extra: str) -> str:
    """Returns the shell command that installs what an extra of edgemoe adds; no index needs to have edgemoe.

    Args:
        extra: a name in [project.optional-dependencies] of pyproject.toml.
    """
    try:
        lines = requires("edgemoe") or []
    except PackageNotFoundError:  # a checkout on the path of a Python that has not installed it
        return install_line("--editable", f".[{extra}]")
    parts = [line.partition(";") for line in lines]
    return install_line(*(package.strip() for package, _, marker in parts if f'extra == "{extra}"' in marker))


def how_to_reach() -> list[str]:
    """Returns lines that say how the command is reached; none where a shell finds it by its name."""
    command = Path(sys.executable).parent / "edgemoe"
    if not command.exists() or shutil.which("edgemoe") is not None:
        return []
    folder = shlex.quote(str(command.parent))
    return [f"the command is {shlex.quote(str(command))}; to type edgemoe alone: export PATH={folder}:$PATH"]
