"""Triton's compiler on the attention of one row, at published models' sizes: shared memory, spills and rounding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> dict[str, list[int]]:
    """The output of compile_attention in a process of its own, with Triton's compiler."""
    more = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    script = ROOT / "tests/support/device/compile_attention.py"
    child = subprocess.run(
        [sys.executable, script],
        env=os.environ | more | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


@pytest.mark.folders
@pytest.mark.triton
def test_every_launch_fits_a_gpu(table):
    """Sizes of 128 to 576, sinks, latents and codes: within the shared memory of 8.6 and 9.0, without spills."""
    kernels = {name.split(", ")[-1] for name in table}
    assert kernels == {"attend", "combine", "rotate", "store", "turn_heads", "to_latents", "to_values"}
    assert {name for name, (shared, room, spills, _) in table.items() if shared > room or spills} == set()


@pytest.mark.triton
def test_written_keys_are_rounded_as_transformers_rounds(table):
    """No product and sum of bf16 is fused in a kernel that rotates or writes keys."""
    fused = {name: numbers[3] for name, numbers in table.items() if name.endswith(("rotate", "store"))}
    assert len(fused) == 3
    assert not any(fused.values())
