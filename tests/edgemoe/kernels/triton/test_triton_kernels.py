"""Triton's kernels against torch's operators: on a GPU if present, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from record_codec import encode
from records import KEY, MemoryReader, blocks_for

pytest.importorskip("triton")

from interpreter import DEVICE, NEEDS_TRITON, round_like_a_gpu
from pairwise import pairwise
from plane_experts import applied

from edgemoe.kernels.activation import CUSTOM, GATED, Activation
from edgemoe.kernels.base import Part
from edgemoe.kernels.registry import kernels_for
from edgemoe.kernels.torch_planes import PlaneExpertKernel
from edgemoe.kernels.triton.experts import FEW, MANY, MATVEC_UP_TO, VECTOR, TritonExpertKernel, launches_of
from edgemoe.storage.record.forms import PlaneForm
from edgemoe.storage.record.layout import LAYOUTS
from edgemoe.storage.record.offsets import MatrixSpec, RecordGeometry

CUDA = LAYOUTS["cuda"]

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
    NEEDS_TRITON,
]


@pytest.fixture(autouse=True)
def rounding(monkeypatch):
    round_like_a_gpu(monkeypatch)


SILU = Activation.gated("silu")


class Expert:
    """Random weights of one shape, and blocks on the device for every level."""

    def __init__(self, shape, seed: int = 0, limits: tuple[int, int] = (8, 8)) -> None:
        (n, k, g), (m, j, h) = shape
        specs = (MatrixSpec.of("gate_up", n, k, g, limits[0]), MatrixSpec.of("down", m, j, h, limits[1]))
        self.geometry = RecordGeometry(specs, 8)
        generator = torch.Generator().manual_seed(seed)
        # Scaled to keep products near 1, so that rounding errors are alike.
        weights = [torch.randn(s.rows, s.cols, generator=generator) * s.cols**-0.5 for s in specs]
        record, form = encode(self.geometry, CUDA, weights), PlaneForm(self.geometry, CUDA, CUDA)
        ram = blocks_for(form, 8)
        form.fill(MemoryReader(record, self.geometry), KEY, 8, ram, None)
        tensors = {name: torch.frombuffer(bytearray(block), dtype=torch.uint8) for name, block in ram.items()}
        self.blocks = {name: tensor.to(DEVICE) for name, tensor in tensors.items()}
        self.kernel = TritonExpertKernel(self.geometry, CUDA)
        self.plain = PlaneExpertKernel(self.geometry, CUDA)

    def part(self, level: int, rows: int) -> Part:
        """A part without planes above the level: reading one raises KeyError."""
        names = [kind.name for kind in PlaneForm(self.geometry, CUDA, CUDA).kinds_at(level)]
        return Part({name: self.blocks[name] for name in names}, level, level, rows)

    def x(self, rows: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rows)
        return torch.randn(rows, self.geometry.matrices[0].cols, generator=generator).bfloat16().to(DEVICE)

    def compare(self, parts: Sequence[Part], activation: Activation = SILU) -> None:
        x = self.x(sum(part.rows for part in parts))
        got, want = (applied(k, x, parts, activation).float() for k in (self.kernel, self.plain))
        assert got.shape == want.shape
        # With one column, a row's rounding errors do not average out.
        assert (got - want).norm() / want.norm() < (0.008 if self.geometry.matrices[1].cols > 1 else 0.02)


@pairwise(shape=SMALL, level=[8, 4, 2], tokens=[1, MATVEC_UP_TO + 1])
def test_every_shape_and_level_matches_the_reference(shape, level, tokens):
    """Padded rows and columns, every group and slab size, give the reference product to bf16's rounding."""
    expert = Expert(SMALL[shape])
    expert.compare([expert.part(level, tokens)])


@pytest.mark.parametrize("limits", [(4, 8), (8, 4)])
def test_a_matrix_is_computed_at_its_limit(limits):
    """Each matrix at its own level, by matvec and matmul, and in the items of a graph."""
    expert = Expert(SMALL["even"], limits=limits)
    for tokens in (1, MATVEC_UP_TO + 1):
        expert.compare([expert.part(8, tokens), expert.part(4, tokens)])
    assert [item[-1] for item in expert.kernel.items_at(expert.part(8, 1).blocks, 8)] == [*limits]


@pytest.mark.parametrize("tokens", [2, MATVEC_UP_TO, FEW.tokens, FEW.tokens + 1, 64, 65, 130])
def test_every_count_of_tokens_matches_the_reference(tokens):
    """Full and partial tiles of matvec and of both matmul tiles give the reference product."""
    expert = Expert(SMALL["even"])
    expert.compare([expert.part(4, tokens)])


def test_the_rows_of_a_part_choose_its_tile():
    """1 to 4 rows one by one, up to 16 in a small tile, more in tiles of 64; each row once, in the order of parts."""
    sizes = [1, 4, 5, 16, 17, 130]
    launches = dict(launches_of([Part({}, 8, 8, rows) for rows in sizes]))
    assert launches[VECTOR] == [(0, 0, 1), *((1, 1 + row, 1) for row in range(4))]
    assert launches[FEW] == [(2, 5, 5), (3, 10, 16)]
    assert launches[MANY] == [(4, 26, 17), (5, 43, 64), (5, 107, 64), (5, 171, 2)]


def test_a_call_mixes_levels_and_token_counts():
    """Each row has the bits that its expert computes alone."""
    expert, levels, sizes = Expert(SMALL["even"]), [8, 2, 4], [1, 20, 3]
    parts = [expert.part(level, rows) for level, rows in zip(levels, sizes, strict=True)]
    x = expert.x(sum(sizes))
    for activation in (SILU, Activation(CUSTOM, SILU.apply)):
        together = applied(expert.kernel, x, parts, activation)
        alone = [
            applied(expert.kernel, rows, [part], activation)
            for rows, part in zip(x.split(sizes), parts, strict=True)
        ]
        assert torch.equal(together, torch.cat(alone))
    expert.compare(parts)


def test_an_expanded_row_equals_its_copies():
    """A decode step passes one row, which every expert computes."""
    expert = Expert(SMALL["even"])
    parts, x = [expert.part(level, 1) for level in (4, 2, 8)], expert.x(1)
    assert torch.equal(*(applied(expert.kernel, rows, parts, SILU) for rows in (x, x.repeat(3, 1))))


@pytest.mark.parametrize("level", [4, 2])
@pytest.mark.parametrize("tokens", [1, 20])
def test_planes_above_the_level_change_nothing(level, tokens):
    """Resident planes above the level do not change a bit."""
    expert = Expert(SMALL["even"])
    more, least = Part(expert.blocks, 8, level, tokens), expert.part(level, tokens)
    x = expert.x(tokens)
    assert torch.equal(*(applied(expert.kernel, x, [part], SILU) for part in (more, least)))


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("name", [*GATED, CUSTOM])
def test_activations_match_torch(name, tokens):
    """Fused activations and one between the launches match torch's operators."""
    relu = Activation(CUSTOM, lambda both: torch.relu(both.chunk(2, dim=-1)[0]) * both.chunk(2, dim=-1)[1])
    expert = Expert(SMALL["even"])
    expert.compare([expert.part(4, tokens)], Activation.gated(name) if name in GATED else relu)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("bad", "tokens"), [(float("nan"), 3), (float("inf"), 20)])
def test_a_non_finite_activation_stays_in_its_row(bad, tokens):
    """A NaN or infinity in x makes its row of y non-finite, and no other row."""
    expert = Expert(SMALL["odd"])
    x = expert.x(tokens)
    x[1, 3] = bad
    finite = applied(expert.kernel, x, [expert.part(4, tokens)], SILU).isfinite().all(dim=1)
    assert finite.tolist() == [row != 1 for row in range(tokens)]


def test_another_layout_is_refused():
    """The kernel refuses planes in a CPU's layout, which it would decode to other weights."""
    with pytest.raises(ValueError, match="cpu-avx2"):
        TritonExpertKernel(Expert(SMALL["tiny"]).geometry, LAYOUTS["cpu-avx2"])


def test_triton_is_the_first_choice_on_a_gpu():
    """With Triton installed, a GPU's kernels are Triton's, then torch's operators."""
    assert [kernel.name for kernel in kernels_for("cuda")] == ["triton", "planes"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("shape", REAL)
@pytest.mark.parametrize("tokens", [1, 4, 5, 16, 17, 64, 512])
def test_real_shapes_on_a_gpu(shape, tokens):
    """Compiled kernels at published models' sizes: three levels in a call, each row with the bits of its own call."""
    expert = Expert(REAL[shape])
    parts = [expert.part(level, tokens) for level in (8, 4, 2)]
    expert.compare(parts)
    x = expert.x(3 * tokens)
    together = applied(expert.kernel, x, parts, SILU)
    alone = [applied(expert.kernel, t, [p], SILU) for t, p in zip(x.split(tokens), parts, strict=True)]
    assert torch.equal(together, torch.cat(alone))
