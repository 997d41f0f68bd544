"""Kernels compute a matrix at its limit where the level is higher, and find the codes of the other one in d8."""

from __future__ import annotations

import pytest
import torch
from native_paths import PATHS, forced, running
from plane_experts import ACTIVATION, applied
from record_codec import encode
from records import KEY, MemoryReader, blocks_for

from edgemoe.kernels.activation import Activation
from edgemoe.kernels.base import Part
from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.experts import NativeExpertKernel
from edgemoe.kernels.registry import kernels_for
from edgemoe.kernels.torch_planes import PlaneExpertKernel
from edgemoe.storage.record.forms import PlaneForm
from edgemoe.storage.record.layout import LAYOUTS
from edgemoe.storage.record.offsets import MatrixSpec, RecordGeometry
from edgemoe.storage.record.planes import dequantize, quantize

LIMITS = [(4, 8), (8, 4)]
HIDDEN, INNER = 192, 80
ROWS = (1, 3, 70)


def an_expert(limits, form, layout):
    """Geometry, weights and blocks of an expert at level 8."""
    shapes = ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    specs = tuple(
        MatrixSpec.of(name, *shape, limit=limit)
        for name, shape, limit in zip(("gate_up", "down"), shapes, limits, strict=True)
    )
    geometry = RecordGeometry(specs, 8)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator) * shape[1] ** -0.5 for shape in shapes]
    made = form(geometry, layout, layout)
    blocks = blocks_for(made, 8)
    made.fill(MemoryReader(encode(geometry, layout, weights), geometry), KEY, 8, blocks, None)
    return geometry, weights, blocks


def reference(weights, geometry, x: torch.Tensor) -> torch.Tensor:
    """Products in float32 with each matrix at its own level."""
    up, down = (
        dequantize(
            *quantize(torch.nn.functional.pad(w, (0, spec.padded_cols - spec.cols)), spec.group), spec.limit
        )
        for w, spec in zip(weights, geometry.matrices, strict=True)
    )
    inner = ACTIVATION.apply((x.float() @ up[:, :HIDDEN].T).bfloat16())
    return inner.float() @ down[:, :INNER].T


def rows_of(count: int) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count)).bfloat16()


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("kernel", kernels_for("cpu"), ids=lambda kernel: kernel.name)
def test_a_cpu_kernel_computes_each_matrix_at_its_own_level(kernel, limits):
    """One row, a few, and as many as take the other way of multiplying."""
    geometry, weights, blocks = an_expert(limits, kernel.form, kernel.layout)
    for rows in ROWS:
        x = rows_of(rows)
        got = applied(kernel.kernel(geometry, kernel.layout), x, [Part(blocks, 8, 8, rows)])
        want = reference(weights, geometry, x)
        assert (got - want).norm() < 0.02 * want.norm(), rows


@pytest.mark.parametrize("limits", LIMITS)
def test_torch_s_plane_kernel_does_too(limits):
    geometry, weights, blocks = an_expert(limits, PlaneForm, LAYOUTS["cuda"])
    x = rows_of(3)
    got = applied(PlaneExpertKernel(geometry, LAYOUTS["cuda"]), x, [Part(blocks, 8, 8, 3)])
    want = reference(weights, geometry, x)
    assert (got - want).norm() < 0.01 * want.norm()


@pytest.mark.parametrize("limits", LIMITS)
def test_every_path_gives_the_same_bits(limits):
    """Paths by instructions, with the activation fused and not."""
    geometry, _, blocks = an_expert(limits, PlaneForm, native.LAYOUT)
    for rows in ROWS:
        for activation in (ACTIVATION, Activation.gated("silu")):
            found = []
            for path in running(PATHS):
                with forced(path):
                    kernel = NativeExpertKernel(geometry, native.LAYOUT)
                    found.append(applied(kernel, rows_of(rows), [Part(blocks, 8, 8, rows)], activation))
            assert all(torch.equal(each, found[0]) for each in found), rows
