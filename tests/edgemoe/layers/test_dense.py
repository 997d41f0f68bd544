"""layers.dense and layers.mla: products with weights that stay in memory."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from edgemoe.kernels.native import library as native
from edgemoe.layers.dense import DenseLinear
from edgemoe.layers.mla import LatentHeads
from edgemoe.machine.process import resident_bytes
from edgemoe.storage.store.dense import quantize_rows


def growth(product: Callable[[int], object]) -> int:
    """Bytes by which a hundred different numbers of rows make resident memory grow; the less of two rounds."""
    for rows in range(64, 513, 64):
        product(rows)
    sizes = [resident_bytes()]
    for start in (200, 300):
        for rows in range(start, start + 100):
            product(rows)
        sizes.append(resident_bytes())
    return min(sizes[1] - sizes[0], sizes[2] - sizes[1])


@pytest.mark.e2e
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("kernel", ["the fastest", "torch"])
def test_memory_does_not_grow_with_the_lengths_of_prompts(monkeypatch, kernel, bits):
    """Products of each new number of rows leave no code or buffers of their own behind, and are right."""
    if kernel == "torch":
        monkeypatch.setattr(native, "available", lambda: False)
    weight, scale = torch.randn(384, 256).bfloat16(), None
    exact = weight.double()
    if bits == 8:
        weight, scale = quantize_rows(weight.float())
        exact = weight.double() * scale.double().unsqueeze(1)
    linear, x = DenseLinear(weight, scale, None), torch.randn(512, 256).bfloat16()

    def product(rows: int) -> None:
        want = x[:rows].double() @ exact.T
        # The kernel rounds activations to 8 bits where the weight has 8.
        assert (linear(x[:rows]) - want).norm() / want.norm() < (0.009 if bits == 8 else 0.006)

    assert growth(product) < 5 << 20


def test_memory_of_latent_heads_does_not_grow_with_the_lengths_of_prompts():
    """Products with the halves of kv_b_proj leave nothing behind either."""
    linear = DenseLinear(torch.randn(4 * 64, 128).bfloat16(), None, None)
    heads = LatentHeads(
        SimpleNamespace(kv_b_proj=linear, qk_nope_head_dim=32, v_head_dim=32, kv_lora_rank=128)
    )
    x = torch.randn(4, 512, 128).bfloat16()
    want = x.double() @ linear.weight.double().view(4, 64, 128)[:, 32:].mT

    def product(rows: int) -> None:
        got = heads.value(x[:, :rows])
        assert (got - want[:, :rows]).norm() / want[:, :rows].norm() < 0.006

    assert growth(product) < 5 << 20
