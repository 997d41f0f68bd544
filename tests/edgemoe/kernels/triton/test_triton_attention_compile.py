"""Triton's compiler on the attention of one row, at published models' sizes: shared memory, spills and rounding."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import run_forked

pytest.importorskip("triton")

ROOT = Path(__file__).parents[4]


pytestmark = [pytest.mark.triton, pytest.mark.e2e]


@pytest.fixture
def compiled(tmp_path) -> Callable[..., dict[str, list[int]]]:
    """Compiles kernels of compile_attention in a process of its own, with Triton's compiler."""

    def run(*kernels: str) -> dict[str, list[int]]:
        more = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
        more["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "tests/support/device")))
        child = run_forked("-m", "compile_attention", *kernels, env=os.environ | more)
        assert child.returncode == 0, child.stderr
        return json.loads(child.stdout.splitlines()[-1])

    return run


@pytest.mark.folders
def test_every_launch_fits_a_gpu(compiled):
    """Sizes of 128 to 576, sinks, latents and codes: within the shared memory of 8.6 and 9.0, without spills."""
    table = compiled()
    kernels = {name.split(", ")[-1] for name in table}
    assert kernels == {"attend", "combine", "rotate", "store", "turn_heads", "to_latents", "to_values"}
    assert {name for name, (shared, room, spills, _) in table.items() if shared > room or spills} == set()


def test_written_keys_are_rounded_as_transformers_rounds(compiled):
    """No product and sum of bf16 is fused in a kernel that rotates or writes keys; Triton accepts the other kernels."""
    table = compiled("rotate", "store")
    assert len(table) == 3
    assert not any(fused for _, _, _, fused in table.values())
