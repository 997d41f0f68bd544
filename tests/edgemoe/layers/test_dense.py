"""layers.dense and layers.mla: products with weights that stay in memory."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from availability import needs_native
from pairwise import pairwise

from edgemoe.kernels.native import library as native
from edgemoe.kernels.torch_rules import rows_alike
from edgemoe.layers.dense import DenseLinear
from edgemoe.layers.mla import CompiledLatents, LatentHeads
from edgemoe.machine.process import resident_bytes
from edgemoe.storage.record.planes import dequantize, quantize
from edgemoe.storage.store import dense_groups
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
@pairwise(alone=["bits", "kernel"], bits=[5, 6, 8, 16], kernel=["the fastest", "torch"])
def test_memory_does_not_grow_with_the_lengths_of_prompts(monkeypatch, kernel, bits):
    """Products of each new number of rows keep no code or buffers of their own, and are right."""
    if kernel == "torch":
        monkeypatch.setattr(native, "available", lambda: False)
    weight, scale = torch.randn(384, 256).bfloat16(), None
    exact = weight.double()
    if bits == 8:
        weight, scale = quantize_rows(weight.float())
        exact = weight.double() * scale.double().unsqueeze(1)
    if bits < 8:
        weight = dense_groups.quantize_groups(weight.float(), bits)
        exact = dequantize(*quantize(exact.float(), 64), bits).double()
    linear, x = DenseLinear(weight, scale, None), torch.randn(512, 256).bfloat16()

    def product(rows: int) -> None:
        want = x[:rows].double() @ exact.T
        # The kernel rounds activations to 8 bits where the weight has 8 or fewer.
        assert (linear(x[:rows]) - want).norm() / want.norm() < (0.009 if bits < 16 else 0.006)

    assert growth(product) < 5 << 20


def test_memory_of_latent_heads_does_not_grow_with_the_lengths_of_prompts():
    """Products with the halves of kv_b_proj keep nothing either."""
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


@needs_native
def test_many_rows_take_the_kernel_where_bits_must_be_alike(monkeypatch):
    """On a processor where torch is faster from 5 rows on, only a step that may differ takes torch's product."""
    monkeypatch.setattr(native, "dense_bf16_up_to", lambda: 4)
    rows, product = [], native.dense_product

    def noted(x, *weight):
        rows.append(len(x))
        return product(x, *weight)

    monkeypatch.setattr(native, "dense_product", noted)
    linear, x = DenseLinear(torch.randn(40, 64).bfloat16(), None, None), torch.randn(9, 64).bfloat16()
    alike = linear(x)
    with rows_alike(False):
        faster = linear(x)
        assert torch.equal(linear(x[:3]), alike[:3])
    assert rows == [9, 3]
    torch.testing.assert_close(faster, alike, rtol=0.02, atol=0.05)


@needs_native
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_compiled_latents_are_those_of_the_equations(bits):
    """Queries by the key halves and sums by the value halves of kv_b_proj; the bits of a row alone and among others."""
    weight, scale = torch.randn(3 * (16 + 12), 32).bfloat16(), None
    exact = weight.double()
    if bits == 8:
        weight, scale = quantize_rows(weight.float())
        exact = weight.double() * scale.double().unsqueeze(1)
    halves = exact.view(3, 28, 32)
    module = SimpleNamespace(
        qk_nope_head_dim=16, v_head_dim=12, kv_lora_rank=32, kv_b_proj=DenseLinear(weight, scale, None)
    )
    latents = CompiledLatents(module)
    query, summed = torch.randn(3, 70, 24).bfloat16(), torch.randn(3, 70, 32).bfloat16()
    got = latents.query(query), latents.value(summed)
    want = query.double()[..., :16] @ halves[:, :16], summed.double() @ halves[:, 16:].mT
    torch.testing.assert_close(got[0][..., :32].double(), want[0], rtol=0.02, atol=0.1)
    torch.testing.assert_close(got[1].double(), want[1], rtol=0.02, atol=0.1)
    assert torch.equal(got[0][..., 32:], query[..., 16:])
    for rows in (1, 5):
        assert torch.equal(latents.query(query[:, :rows]), got[0][:, :rows])
        assert torch.equal(latents.value(summed[:, :rows]), got[1][:, :rows])
