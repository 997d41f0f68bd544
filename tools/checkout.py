"""The checkout that the tools belong to, for child processes and files next to the packages."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The repository's root: the directory that contains `tools` and `edgemoe`."""


def child_environment(**variables: str) -> dict[str, str]:
    """This process's environment for a child that runs `python -m tools...` in any current directory.

    Args:
        variables: set in addition; they replace inherited ones.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path} | variables
