"""Samples of each kind of work of the compiled kernel, for the times of its paths and of torch's kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from edgemoe.kernels.activation import Activation
from edgemoe.kernels.base import ExpertKernel, Part, Rows
from edgemoe.kernels.native import library as native
from edgemoe.kernels.native import paths
from edgemoe.kernels.native.attention import NativeAttention
from edgemoe.kernels.native.attention_rows import LayerKV
from edgemoe.kernels.native.experts import NativeExpertKernel
from edgemoe.storage.base import Blocks, ResidentForm
from edgemoe.storage.record.forms import PlaneForm
from edgemoe.storage.record.offsets import MatrixSpec, RecordGeometry

GEOMETRY = RecordGeometry((MatrixSpec.of("gate_up", 512, 2048), MatrixSpec.of("down", 2048, 256)), 8)
"""Geometry of a sample's experts; a sample has EXPERTS of them."""

EXPERTS = 2

DENSE = 1024, 2048
"""Rows and columns of a sample's int8 weight."""

ATTENTION = 8, 2, 128
"""Heads, heads of keys, and their size."""

SAMPLE = dict(zip(paths.ROWS, (1, 8, 24, 64), strict=True))
"""Number of rows that stands for all numbers of rows that share a choice."""

ATTENTION_ROWS = 128
"""Rows of a prompt; a single token comes after four times as many."""


def samples() -> Iterator[tuple[str, str, int, Callable[[], object]]]:
    """Yields kind of work, rows, multiplications of a sample, and a function that computes it."""
    for work, level in zip(paths.WORKS[:2], (4, 8), strict=True):
        experts = random_experts(PlaneForm(GEOMETRY, native.LAYOUT, native.LAYOUT), GEOMETRY, EXPERTS)
        kernel = NativeExpertKernel(GEOMETRY, native.LAYOUT)
        for name, rows in SAMPLE.items():
            yield work, name, EXPERTS * rows * GEOMETRY.weights, expert_call(kernel, experts, level, rows)
    weight = torch.randint(-127, 128, DENSE, dtype=torch.int8)
    scale = torch.full(DENSE[:1], 0.01).bfloat16()
    for name, rows in SAMPLE.items():
        x = torch.randn(rows, DENSE[1]).bfloat16()
        yield paths.WORKS[2], name, rows * weight.numel(), partial(native.dense_product, x, weight, scale)
    heads, kv_heads, dim = ATTENTION
    rows, earlier = ATTENTION_ROWS, 4 * ATTENTION_ROWS
    attention = NativeAttention(heads, kv_heads, dim, None, dim**-0.5)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim).bfloat16()
    rotation = torch.ones(rows, dim).bfloat16(), torch.zeros(rows, dim).bfloat16()
    kv = torch.zeros(2, kv_heads, earlier + 1, dim).bfloat16()
    one = qkv[:1], (rotation[0][:1], rotation[1][:1])
    yield (
        paths.WORKS[3],
        paths.ROWS[0],
        2 * heads * earlier * dim,
        lambda: attention(*one, LayerKV(kv[0], kv[1], earlier), None),
    )
    products = heads * rows * rows * dim
    yield (
        paths.WORKS[3],
        paths.ROWS[-1],
        products,
        lambda: attention(qkv, rotation, LayerKV(kv[0], kv[1], 0), None),
    )


def random_experts(form: ResidentForm, geometry: RecordGeometry, count: int) -> list[Blocks]:
    """Experts at level 8 in a form, with random codes, and scales and centres of about 0.01."""
    generator, experts = np.random.default_rng(0), list[Blocks]()
    for _ in range(count):
        blocks = {}
        for kind in form.kinds:
            block = generator.integers(0, 256, kind.size, dtype=np.uint8)
            if kind.level == 2:
                block[: geometry.parameter_bytes] = 0x3C
            blocks[kind.name] = block.data
        experts.append(blocks)
    return experts


def expert_call(kernel: ExpertKernel, experts: list[Blocks], level: int, rows: int) -> Callable[[], None]:
    """A call that computes random rows by each of some experts."""
    hidden = GEOMETRY.matrices[0].cols
    x = torch.randn(rows * len(experts), hidden).bfloat16()
    out, activation = torch.empty_like(x), Activation.gated("silu")
    parts = [Part(blocks, 8, level, rows) for blocks in experts]
    return lambda: kernel.forward(Rows(x), parts, activation, out)
