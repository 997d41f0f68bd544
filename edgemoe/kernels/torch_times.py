"""Times torch's own kernels on kernels.samples, for comparison with the compiled kernel's paths."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F

from edgemoe.kernels import samples
from edgemoe.kernels.native import paths
from edgemoe.kernels.probe import Timing
from edgemoe.kernels.torch_int4 import CpuExpertKernel
from edgemoe.storage.record.forms import MergedForm
from edgemoe.storage.record.layout import detect

_ROUNDS = 3


def torch_timings() -> list[Timing]:
    """The median time of torch's fastest kernel for each kind of work and number of rows, as path `torch`."""
    found = []
    for work, rows, multiplications, calls in _samples():
        best = min(_typical(call) for call in calls)
        found.append(Timing(work, rows, "torch", best, multiplications / best))
    return found


def _typical(call: Callable[[], object]) -> float:
    call()  # oneDNN compiles a kernel for an unseen shape
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times)


def _samples() -> Iterator[tuple[str, str, int, list[Callable[[], object]]]]:
    geometry, layout = samples.GEOMETRY, detect()
    experts = samples.random_experts(MergedForm(geometry, layout, layout), geometry, samples.EXPERTS)
    kernel = CpuExpertKernel(geometry, layout)
    for work, level in zip(paths.WORKS[:2], (4, 8), strict=True):
        for name, rows in samples.SAMPLE.items():
            products = samples.EXPERTS * rows * geometry.weights
            yield work, name, products, [samples.expert_call(kernel, experts, level, rows)]
    codes = torch.randint(-127, 128, samples.DENSE, dtype=torch.int8)
    scale = torch.full(samples.DENSE[:1], 0.01).bfloat16()

    def widened(x: torch.Tensor) -> torch.Tensor:
        """A product in bf16; memory holds the weight in 8 bits alone, so that every product widens it."""
        return F.linear(x, codes.bfloat16()).mul_(scale)

    for name, rows in samples.SAMPLE.items():
        x = torch.randn(rows, samples.DENSE[1]).bfloat16()
        int8 = partial(torch.ops.aten._weight_int8pack_mm, x, codes, scale)
        yield paths.WORKS[2], name, rows * codes.numel(), [partial(widened, x), int8]
    heads, kv_heads, dim = samples.ATTENTION
    rows = samples.ATTENTION_ROWS
    q = torch.randn(1, heads, rows, dim).bfloat16()
    k, v = (torch.randn(1, kv_heads, rows, dim).bfloat16() for _ in range(2))
    yield (
        *(paths.WORKS[3], paths.ROWS[-1], heads * rows * rows * dim),
        [lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)],
    )
