"""Triton stays out of processes without a GPU, and can be imported by name afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.e2e
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU Triton is wanted")
def test_an_engine_does_not_import_triton(tmp_path: Path) -> None:
    """With Triton installed, importing the engine does not import it; a later import by name does."""
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("print('imported')\n")
    code = (
        "import sys, edgemoe.engine.engine\n"
        "print('engine', 'triton' in sys.modules, flush=True)\n"
        "import triton\n"
    )
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout.split() == ["engine", "False", "imported"]
