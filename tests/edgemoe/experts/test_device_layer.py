"""experts.device_layer: rows of experts with compensators, against float64 products of W + U V."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from compensator_bytes import low_rank_weights, random_compensator
from device_double import DoubleDevice
from record_codec import encode
from records import KEY, MemoryReader, blocks_for, geometry_of

from edgemoe.experts.device_layer import DeviceExpertLayer, divided
from edgemoe.experts.runtime import ExpertRuntime
from edgemoe.kernels.base import Part, Rows
from edgemoe.kernels.device_compensators import DeviceCompensator
from edgemoe.kernels.torch_planes import PlaneExpertKernel
from edgemoe.storage.compensators.low_rank import unpack
from edgemoe.storage.record.decode import decode
from edgemoe.storage.record.forms import PlaneForm
from edgemoe.storage.record.layout import LAYOUTS

HIDDEN, INNER, LAYOUT = 128, 64, LAYOUTS["cuda"]
GEOMETRY = geometry_of((2 * INNER, HIDDEN), (HIDDEN, INNER), 4)


def gate(both: torch.Tensor) -> torch.Tensor:
    first, second = both.chunk(2, dim=-1)
    return torch.nn.functional.silu(first) * second


class Expert:
    """An expert's blocks at level 2, and a compensator."""

    def __init__(self, seed: int, ranks: tuple[int, int, int]) -> None:
        generator = torch.Generator().manual_seed(seed)
        weights = [torch.randn(m.rows, m.cols, generator=generator) for m in GEOMETRY.matrices]
        record, form = encode(GEOMETRY, LAYOUT, weights), PlaneForm(GEOMETRY, LAYOUT, LAYOUT)
        blocks = blocks_for(form, 2)
        form.fill(MemoryReader(record, GEOMETRY), KEY, 2, blocks, None)
        self.blocks = {kind: torch.frombuffer(block, dtype=torch.uint8) for kind, block in blocks.items()}
        self.decoded = [m.double() for m in decode(record, GEOMETRY, LAYOUT, 2)]
        raw, shape = random_compensator(GEOMETRY, ranks, seed)
        self.added = low_rank_weights(raw, shape)
        arrays = {name: unpack(raw, array) for name, array in shape.arrays.items()}
        self.compensator = DeviceCompensator(np.empty(0, np.uint8), shape, 0.1, 0, arrays)

    def part(self, rows: int, compensated: int) -> Part:
        return Part(self.blocks, 2, 2, rows, self.compensator if compensated else None, compensated)

    def reference(self, x: torch.Tensor, compensated: bool, biases: list[torch.Tensor]) -> torch.Tensor:
        """float64 [R, H]."""
        up, down = self.decoded
        both = x.double() @ up.T + biases[0].double()
        inner = gate(both + x.double() @ self.added["gate_up"].T if compensated else both)
        out = inner @ down.T + biases[1].double()
        return out + inner @ self.added["down"].T if compensated else out


EXPERTS = [Expert(1, (8, 5, 3)), Expert(2, (0, 16, 0)), Expert(3, (0, 0, 4))]


def layer_of(biased: bool) -> DeviceExpertLayer:
    """A layer of three experts on a double, computed by torch's operators."""
    generator = torch.Generator().manual_seed(9)
    module = SimpleNamespace(has_gate=True, has_bias=biased, _apply_gate=gate)
    module.gate_up_proj_bias = torch.randn(3, 2 * INNER, generator=generator).bfloat16()
    module.down_proj_bias = torch.randn(3, HIDDEN, generator=generator).bfloat16()
    runtime = ExpertRuntime(None, PlaneExpertKernel(GEOMETRY, LAYOUT), 3, DoubleDevice())
    return DeviceExpertLayer(0, runtime, module, "silu", None)


def applied(layer: DeviceExpertLayer, x: torch.Tensor, parts: list[Part], experts: list[int]) -> torch.Tensor:
    out = torch.full((len(x), HIDDEN), 7777.0).bfloat16()
    layer.apply(Rows(x), parts, experts, out)
    return out


@pytest.mark.parametrize("biased", [False, True])
def test_compensated_rows_and_others_are_right(biased):
    """A call with rows of three experts: all, a part and none of them compensated, and biases of a family."""
    layer, sizes, firsts = layer_of(biased), [4, 5, 2], [4, 3, 0]
    x = torch.randn(sum(sizes), HIDDEN, generator=torch.Generator().manual_seed(5)).bfloat16()
    parts = [e.part(rows, first) for e, rows, first in zip(EXPERTS, sizes, firsts, strict=True)]
    got = applied(layer, x, parts, [0, 1, 2])
    for number, (expert, rows, mine, first) in enumerate(
        zip(EXPERTS, x.split(sizes), got.split(sizes), firsts, strict=True)
    ):
        biases = [each[number] for each in layer.biases] if biased else [torch.zeros(1)] * 2
        for some, compensated in ((slice(first), True), (slice(first, None), False)):
            want = expert.reference(rows[some], compensated, biases)
            assert (mine[some].double() - want).norm() <= 0.015 * want.norm()


def test_a_row_has_the_bits_that_it_has_alone():
    """Neither compensated rows nor others depend on the rows next to them."""
    layer, x = layer_of(False), torch.randn(6, HIDDEN).bfloat16()
    got = applied(layer, x, [EXPERTS[0].part(4, 2), EXPERTS[2].part(2, 0)], [0, 2])
    alone = [
        applied(layer, x[:2], [EXPERTS[0].part(2, 2)], [0]),
        applied(layer, x[2:4], [EXPERTS[0].part(2, 0)], [0]),
        applied(layer, x[4:], [EXPERTS[2].part(2, 0)], [2]),
    ]
    assert torch.equal(got, torch.cat(alone))


def test_parts_are_cut_where_compensation_ends():
    """Rows keep their order, and none is lost."""
    pieces = divided([EXPERTS[0].part(5, 3), EXPERTS[1].part(2, 2), EXPERTS[2].part(4, 0)])
    assert [(index, place.start, place.stop) for index, place, _ in pieces] == [
        (0, 0, 3),
        (0, 3, 5),
        (1, 5, 7),
        (2, 7, 11),
    ]
    assert [part.compensated for *_, part in pieces] == [3, 0, 2, 0]
    assert [part.compensator is not None for *_, part in pieces] == [True, False, True, False]
