"""Triton's kernels against torch's operators: on a GPU where there is one, in Triton's interpreter elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from records import KEY, MemoryReader, blocks_for

pytest.importorskip("triton")

from interpreter import rounds_as_a_gpu

from edgemoe.kernels.base import Part
from edgemoe.kernels.registry import kernels_for
from edgemoe.kernels.torch_planes import PlaneExpertKernel
from edgemoe.kernels.triton.experts import FEW, INTERPRETED, MATVEC_UP_TO, TritonExpertKernel
from storage.encode import encode
from storage.forms import PlaneForm
from storage.layout import LAYOUTS
from storage.record import MatrixSpec, RecordGeometry

CUDA = LAYOUTS["cuda"]
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

SMALL = {
    "even": ((48, 64, 64), (64, 24, 32)),
    "odd": ((200, 100, 64), (100, 100, 64)),
    "tiny": ((2, 3, 32), (3, 1, 32)),
    "two groups a slab": ((64, 192, 32), (192, 32, 32)),
    "wide groups": ((40, 512, 128), (80, 20, 32)),
}
"""(rows, columns, group) of gate_up and down."""

REAL = {"qwen3-30b-a3b": ((1536, 2048, 64), (2048, 768, 64)), "gpt-oss": ((5760, 2880, 32), (2880, 2880, 32))}

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="Triton wants a GPU"),
]


@pytest.fixture(autouse=True)
def rounding(monkeypatch):
    if INTERPRETED:
        rounds_as_a_gpu(monkeypatch)


class Gated(torch.nn.Module):
    """A model's experts module, as far as kernels see it."""

    def __init__(self, activation) -> None:
        super().__init__()
        self.activation = activation

    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        half, up = both.chunk(2, dim=-1)
        return self.activation(half) * up


SILU = Gated(torch.nn.functional.silu)


class Expert:
    """Random weights of one shape, and blocks on the device for every level."""

    def __init__(self, shape, seed: int = 0) -> None:
        (n, k, g), (m, j, h) = shape
        specs = (MatrixSpec.of("gate_up", n, k, g), MatrixSpec.of("down", m, j, h))
        self.geometry = RecordGeometry(specs, 8)
        generator = torch.Generator().manual_seed(seed)
        # Of the size that keeps products near 1, so that rounding is the same everywhere.
        weights = [torch.randn(s.rows, s.cols, generator=generator) * s.cols**-0.5 for s in specs]
        record, form = encode(self.geometry, CUDA, weights), PlaneForm(self.geometry, CUDA, CUDA)
        ram = blocks_for(form, 8)
        form.fill(MemoryReader(record, self.geometry), KEY, 8, ram, None)
        tensors = {name: torch.frombuffer(bytearray(block), dtype=torch.uint8) for name, block in ram.items()}
        self.blocks = {name: tensor.to(DEVICE) for name, tensor in tensors.items()}
        self.kernel, self.plain = (
            kind(self.geometry, CUDA) for kind in (TritonExpertKernel, PlaneExpertKernel)
        )

    def part(self, level: int, rows: int) -> Part:
        """Holding no plane above the level, so that reading one is a fault."""
        names = [kind.name for kind in PlaneForm(self.geometry, CUDA, CUDA).kinds_at(level)]
        return Part({name: self.blocks[name] for name in names}, level, level, rows)

    def x(self, rows: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rows)
        return torch.randn(rows, self.geometry.matrices[0].cols, generator=generator).bfloat16().to(DEVICE)

    def compare(self, parts: Sequence[Part], module: Gated = SILU) -> None:
        x = self.x(sum(part.rows for part in parts))
        got, want = (k.forward(x, parts, module._apply_gate).float() for k in (self.kernel, self.plain))
        assert got.shape == want.shape
        # Of a product of one number, rounding is not averaged over others.
        assert (got - want).norm() / want.norm() < (0.008 if self.geometry.matrices[1].cols > 1 else 0.02)


@pytest.fixture(scope="module", params=SMALL)
def expert(request) -> Expert:
    return Expert(SMALL[request.param])


@pytest.mark.parametrize("level", [8, 4, 2])
@pytest.mark.parametrize("tokens", [1, MATVEC_UP_TO + 1])
def test_every_shape_and_level_matches_the_reference(expert, level, tokens):
    """Padded rows and columns, every group and slab: the plain product to bf16's rounding."""
    expert.compare([expert.part(level, tokens)])


@pytest.mark.parametrize("tokens", [2, MATVEC_UP_TO, FEW.tokens, FEW.tokens + 1, 64, 65, 130])
def test_every_count_of_tokens_matches_the_reference(tokens):
    """Whole and broken tiles, of the vector kernel and both matrix kernels."""
    expert = Expert(SMALL["even"])
    expert.compare([expert.part(4, tokens)])


def test_experts_at_different_levels_go_together():
    """Levels and token counts are mixed in a call; each row is the one its expert computes alone, bit for bit."""
    expert, levels, sizes = Expert(SMALL["even"]), [8, 2, 4, 2, 8, 4], [1, 20, 3, 1, 7, 17]
    parts = [expert.part(level, rows) for level, rows in zip(levels, sizes, strict=True)]
    x = expert.x(sum(sizes))
    for gate in (SILU._apply_gate, lambda both: SILU._apply_gate(both)):
        together = expert.kernel.forward(x, parts, gate)
        alone = [
            expert.kernel.forward(rows, [part], gate)
            for rows, part in zip(x.split(sizes), parts, strict=True)
        ]
        assert torch.equal(together, torch.cat(alone))
    expert.compare(parts)


def test_one_row_for_all_is_read_as_its_copies_would_be():
    """Decoding hands over one row expanded: its stride is 0."""
    expert = Expert(SMALL["odd"])
    parts, x = [expert.part(level, 1) for level in (4, 2, 8)], expert.x(1)
    shared, copied = x.expand(3, -1), x.repeat(3, 1)
    assert torch.equal(*(expert.kernel.forward(rows, parts, SILU._apply_gate) for rows in (shared, copied)))


@pytest.mark.parametrize("level", [4, 2])
@pytest.mark.parametrize("tokens", [1, 20])
def test_planes_above_the_level_change_nothing(level, tokens):
    """Computing at a level gives the same bits with all planes resident."""
    expert = Expert(SMALL["even"])
    more, least = Part(expert.blocks, 8, level, tokens), expert.part(level, tokens)
    x = expert.x(tokens)
    assert torch.equal(*(expert.kernel.forward(x, [part], SILU._apply_gate) for part in (more, least)))


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "another"])
def test_gatings_are_the_models_own(kind, tokens):
    """What is fused and what is called between the products give what the model's own code gives."""
    functional = torch.nn.functional
    activation = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda half: functional.gelu(half, approximate="tanh"),
        "another": functional.relu,
    }[kind]
    expert = Expert(SMALL["even"])
    expert.compare([expert.part(4, tokens)], Gated(activation))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("tokens", [3, 20])
def test_what_is_not_finite_stays_in_its_row(bad, tokens):
    """A NaN among activations reaches the engine, and no other row."""
    expert = Expert(SMALL["odd"])
    x = expert.x(tokens)
    x[1, 3] = bad
    finite = expert.kernel.forward(x, [expert.part(4, tokens)], SILU._apply_gate).isfinite().all(dim=1)
    assert finite.tolist() == [row != 1 for row in range(tokens)]


def test_another_layout_is_refused():
    """Planes in a CPU's order would be read as other weights."""
    with pytest.raises(ValueError, match="cpu-avx2"):
        TritonExpertKernel(Expert(SMALL["tiny"]).geometry, LAYOUTS["cpu-avx2"])


def test_it_is_the_first_way_of_a_gpu():
    """Where Triton is installed a GPU's experts are computed by it, and by torch's operators elsewhere."""
    assert [way.name for way in kernels_for("cuda")] == ["triton", "planes"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("shape", REAL)
@pytest.mark.parametrize("tokens", [1, 4, 5, 16, 17, 64, 512])
def test_real_shapes_on_a_gpu(shape, tokens):
    """The compiled kernels at sizes of published models, three levels in a call, and each row as alone."""
    expert = Expert(REAL[shape])
    parts = [expert.part(level, tokens) for level in (8, 4, 2)]
    expert.compare(parts)
    x = expert.x(3 * tokens)
    together = expert.kernel.forward(x, parts, SILU._apply_gate)
    alone = [
        expert.kernel.forward(t, [p], SILU._apply_gate) for t, p in zip(x.split(tokens), parts, strict=True)
    ]
    assert torch.equal(together, torch.cat(alone))
