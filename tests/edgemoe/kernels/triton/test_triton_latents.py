"""Latent attention of one row against layers.mla's heads and attention in float32: on a GPU, or interpreted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from interpreter import DEVICE, NEEDS_TRITON, round_like_a_gpu
from stored_rows import Stored, close, numbers

from edgemoe.kernels.triton import attention
from edgemoe.kernels.triton.latents import LatentRowAttention
from edgemoe.kv.formats import KVFormat
from edgemoe.layers.mla import LatentHeads

pytestmark = [pytest.mark.triton, pytest.mark.gpu, NEEDS_TRITON]


@pytest.fixture(autouse=True)
def rounding(monkeypatch):
    round_like_a_gpu(monkeypatch)
    monkeypatch.setattr(attention, "SPLITS", 4)  # the interpreter's time goes by programs


def weights(rows: int, cols: int, *, int8: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Random weights [rows, cols] and their scales."""
    weight = numbers(rows, cols, seed=6)
    if not int8:
        return weight * cols**-0.5, None
    return (weight.float() * 40).clamp(-127, 127).round().to(torch.int8), numbers(rows, seed=7) / 400


@pytest.mark.parametrize(
    ("heads", "key", "rotary", "value", "latent", "past", "int8", "kind"),
    [
        (3, 16, 8, 24, 32, 70, True, "bf16"),
        (5, 48, 16, 12, 40, 20, False, "bf16"),
        (2, 128, 64, 128, 512, 6, True, "bf16"),
        (3, 16, 8, 24, 32, 70, True, "q8_0"),
        (3, 16, 16, 24, 64, 40, False, "q4_0"),
    ],
)
def test_latents_match_expanded_heads(heads, key, rotary, value, latent, past, int8, kind):
    """Weights of both types, and latents stored in each format."""
    weight, scale = weights(heads * (key + value), latent, int8=int8)
    form, scaling = KVFormat(kind, kind), (key + rotary) ** -0.5
    shape = LatentRowAttention(weight, scale, heads, key, rotary, scaling, 1, form=form)
    stored = Stored(shape.stored, past)
    shape.store(numbers(latent, seed=3), numbers(rotary, seed=4), stored.state)
    queries = numbers(heads, key + rotary, seed=5)
    scratch = torch.full((shape.scratch_size,), torch.nan, device=DEVICE)
    out = torch.full((heads, value), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    shape.attend(queries, stored.state, scratch, out)
    linear = SimpleNamespace(weight=weight.cpu(), scale=None if scale is None else scale.cpu())
    module = SimpleNamespace(qk_nope_head_dim=key, kv_lora_rank=latent, v_head_dim=value, kv_b_proj=linear)
    plain = LatentHeads(module)
    own = plain.query(queries.cpu().float()[:, None])[:, 0]
    want = plain.value(stored.want(own).cpu()[:, None])[:, 0]
    assert close(out, want.to(DEVICE), 0.01)
