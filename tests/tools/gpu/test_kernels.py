"""The timer of a token's kernels: its items name planes as kernels read them, and it refuses to run without a GPU."""

from __future__ import annotations

import pytest
import torch
from pairwise import few
from programs import run_forked

pytest.importorskip("triton")

from interpreter import DEVICE, NEEDS_TRITON, round_like_a_gpu

from edgemoe.kernels.triton.experts import VECTOR
from tools.gpu.kernel_data import Experts, Sizes
from tools.gpu.kernel_launches import launch_experts
from tools.gpu.kernels import plans

pytestmark = [pytest.mark.triton, NEEDS_TRITON]


@pytest.mark.parametrize("level", few([2, 4, 8], [4]))
def test_a_token_is_the_product_of_its_own_experts(level, monkeypatch):
    """Both products of the experts of each token, by the definition of planes in float32."""
    round_like_a_gpu(monkeypatch)
    experts = Experts(Sizes(128, 64, 64, 2), 2, pinned=False, device=str(DEVICE))
    for token, table in enumerate(experts.items(level)):
        launch_experts(experts, table, VECTOR, None)
        for slot in range(2):
            up, down = (weights(*block, 2 * token + slot, level) for block in experts.blocks)
            half, other = (up @ experts.x[0].float().cpu()).bfloat16().float().chunk(2)
            inner = (torch.nn.functional.silu(half).bfloat16().float() * other).bfloat16()
            want = down @ inner.float()
            assert (experts.out[slot].float().cpu() - want).norm() < 0.01 * want.norm()


def weights(parameters: torch.Tensor, planes: torch.Tensor, expert: int, level: int) -> torch.Tensor:
    """float32 [rows, columns] of an expert's matrix in slabs of 64 columns, each of which is a group."""
    pairs = parameters[expert].float().cpu()
    slabs, rows, _ = pairs.shape
    base, d4, even, odd = planes[expert].cpu().long().view(4, slabs, rows, 1, 16)
    run = torch.arange(4)[:, None]
    code = (base >> 2 * run) & 3
    stored = 4.0 * code - 6.5
    if level > 2:
        code = 4 * code + ((d4 >> 2 * run) & 3)
        stored = code - 8.0
    if level > 4:
        stored = (16 * code + (torch.where(run % 2 == 0, even, odd) >> 4 * (run // 2) & 15)) / 16 - 8.46875
    scaled = stored.flatten(2) * pairs[..., :1] + pairs[..., 1:]
    return scaled.transpose(0, 1).flatten(1)


def test_other_tiles_are_timed_for_one_model():
    """Each model by the program's tile, after the older kernel where there is one; other tiles once."""
    programs = [model for model, tile, before in plans("before") if tile is VECTOR and not before]
    older = [model for model, _, before in plans("before") if before]
    assert programs == older == list(dict.fromkeys(programs))
    assert all(before is None for _, _, before in plans(None))


@pytest.mark.e2e
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would be timed")
def test_a_machine_without_a_gpu_is_refused():
    """The tool ends with 2 and says what it needs, before it makes any weights."""
    done = run_forked("-m", "tools.gpu.kernels")
    assert (done.returncode, done.stdout) == (2, "")
    assert "needs a GPU" in done.stderr
