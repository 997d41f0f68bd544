"""Experts with low-rank compensators: the kernels' products against float64 ones of W and U V."""

from __future__ import annotations

import ctypes

import pytest
import torch
from compensator_bytes import low_rank_weights, random_compensator
from native_paths import PATHS, forced
from pairwise import pairwise
from record_codec import encode
from records import KEY, MemoryReader, blocks_for, geometry_of

from edgemoe.kernels.activation import CUSTOM, Activation
from edgemoe.kernels.base import Part, Rows
from edgemoe.kernels.compensators import ExpertCompensator, structure
from edgemoe.kernels.native import library as native
from edgemoe.kernels.registry import Compute, kernels_for
from edgemoe.storage.record.decode import decode

KERNELS = {kernel.name: kernel for kernel in kernels_for()}

SHAPES = {
    "demo": (256, 96),
    "qwen3_moe, a quarter": (512, 192),
    "olmoe, a quarter": (512, 256),
    "deepseek_v2, a quarter": (512, 352),
    "mixtral, an eighth": (512, 1792),
    "gpt_oss, a quarter": (720, 720),
    "phimoe, an eighth": (512, 800),
    "inner size 24": (64, 24),
    "sizes of no group": (100, 36),
}
"""Hidden and inner size of an expert, of families with large experts a fraction."""

ROUNDING = 0.015
"""Largest relative error: y is rounded to bf16 before and after U V x, in both products."""

TOKENS = (1, 2, 3, 5, 12, 13, 70)


def gate(both: torch.Tensor) -> torch.Tensor:
    first, second = both.chunk(2, dim=-1)
    return torch.nn.functional.silu(first) * second


FUSED, UNFUSED = Activation("silu", gate), Activation(CUSTOM, gate)


@pytest.fixture(params=["native", "torch"])
def kernel(request) -> Compute:
    if request.param not in KERNELS:
        pytest.skip("the compiled kernel was not built, or the processor has no AVX2")
    return KERNELS[request.param]


@pytest.fixture(params=PATHS)
def path(request):
    with forced(request.param):
        yield


class Rig:
    """One expert in a kernel's blocks, and a compensator of it."""

    def __init__(self, kernel: Compute, hidden: int, inner: int, ranks, level: int = 2) -> None:
        self.geometry = geometry_of((2 * inner, hidden), (hidden, inner), 4)
        generator = torch.Generator().manual_seed(hidden)
        weights = [torch.randn(m.rows, m.cols, generator=generator) for m in self.geometry.matrices]
        record = encode(self.geometry, kernel.layout, weights)
        form = kernel.form(self.geometry, kernel.layout, kernel.layout)
        self.level, self.blocks = level, blocks_for(form, level)
        form.fill(MemoryReader(record, self.geometry), KEY, level, self.blocks, None)
        self.decoded = [m.double() for m in decode(record, self.geometry, kernel.layout, level)]
        self.compensator = self.make(ranks, 1)
        self.kernel, self.hidden = kernel.kernel(self.geometry, kernel.layout), hidden

    def make(self, ranks, seed: int) -> ExpertCompensator:
        raw, geometry = random_compensator(self.geometry, ranks, seed)
        self.structures = [*getattr(self, "structures", ()), structure(raw, geometry)]
        return ExpertCompensator(raw, geometry, 0.1, ctypes.addressof(self.structures[-1]))

    def x(self, tokens: int) -> torch.Tensor:
        return torch.randn(tokens, self.hidden, generator=torch.Generator().manual_seed(tokens)).bfloat16()

    def part(self, rows: int, compensator: ExpertCompensator | None, first: int | None = None) -> Part:
        """Rows of which the first ones, or all, are compensated."""
        compensated = (rows if first is None else first) if compensator else 0
        return Part(self.blocks, self.level, self.level, rows, compensator, compensated)

    def run(self, x: torch.Tensor | Rows, parts: list[Part] | None = None, activation=FUSED) -> torch.Tensor:
        parts = parts or [self.part(len(x), self.compensator)]
        out = torch.full((sum(part.rows for part in parts), self.hidden), 7777.0).bfloat16()
        self.kernel.forward(x if isinstance(x, Rows) else Rows(x), parts, activation, out)
        assert not (out == 7777).all(dim=1).any()
        return out

    def reference(self, x: torch.Tensor, native: bool) -> torch.Tensor:
        """float64, with W's activations as the kernel reads them and U V's as they are."""
        added = low_rank_weights(self.compensator.raw, self.compensator.geometry)
        up, down = self.decoded
        inner = gate(
            eighths(x, native, self.geometry.matrices[0].group) @ up.T + x.double() @ added["gate_up"].T
        )
        inner = inner.bfloat16()
        last = eighths(inner, native, self.geometry.matrices[1].group) @ down.T
        return last + inner.double() @ added["down"].T


def eighths(x: torch.Tensor, native: bool, group: int) -> torch.Tensor:
    """Activations as the compiled kernel multiplies them with planes: in 127ths of a chunk's largest."""
    if not native:
        return x.double()
    chunk = min(group, 64)
    chunks = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % chunk)).view(len(x), -1, chunk)
    step = chunks.abs().amax(-1, keepdim=True) / 127
    return ((chunks / step.clamp_min(1e-30)).round() * step).view(len(x), -1)[:, : x.shape[1]].double()


@pytest.mark.e2e
@pytest.mark.parametrize("shape", SHAPES, ids=lambda name: name.replace(" ", "-"))
def test_products_are_those_of_both_parts(kernel, shape):
    """Rows of every count, fused and not, are W x + U V x to bf16's rounding; without U V they are far from it."""
    hidden, inner = SHAPES[shape]
    most = min(hidden, inner)
    rig = Rig(kernel, hidden, inner, (min(17, most), min(4, most), min(33, most)))
    for tokens in (1, 2, 7):
        x = rig.x(tokens)
        want = rig.reference(x, kernel.name == "native")
        for activation in (FUSED, UNFUSED):
            got = rig.run(x, activation=activation).double()
            assert (got - want).norm() / want.norm() < ROUNDING
        plain = rig.run(x, [rig.part(tokens, None)]).double()
        assert (plain - want).norm() / want.norm() > 0.05


@pytest.mark.e2e
@pairwise(
    kernel=["native", "torch"],
    ranks=[(0, 0, 0), (0, 5, 0), (1, 0, 0), (0, 0, 3), (16, 32, 8), (64, 64, 64)],
    level=[2, 4],
    indirect=["kernel"],
)
def test_every_projection_may_have_its_own_rank(kernel, ranks, level):
    """Projections without factors are as they are quantized; without any the bits are as without a compensator."""
    rig = Rig(kernel, 128, 64, ranks, level)
    x = rig.x(3)
    want = rig.reference(x, kernel.name == "native")
    got = rig.run(x)
    assert (got.double() - want).norm() / want.norm() < ROUNDING
    if not any(ranks) and kernel.name == "native":
        assert torch.equal(got, rig.run(x, [rig.part(3, None)]))


@pytest.mark.e2e
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("hidden", "inner"), [(256, 96), (100, 36), (512, 800)])
def test_a_token_is_the_same_alone_and_among_others(hidden, inner):
    """No bit depends on the number of rows in a call, or on other rows, with a compensator and without."""
    rig = Rig(KERNELS["native"], hidden, inner, (9, 16, 6))
    x = rig.x(70)
    for activation in (FUSED, UNFUSED):
        alone = torch.cat([rig.run(row[None], activation=activation) for row in x])
        plain = torch.cat([rig.run(row[None], [rig.part(1, None)], activation) for row in x])
        assert not torch.equal(alone, plain)
        for tokens in TOKENS:
            assert torch.equal(rig.run(x[:tokens], activation=activation), alone[:tokens]), tokens
        other = rig.make((3, 0, 20), 2)
        parts = [
            rig.part(5, rig.compensator),
            rig.part(30, None),
            rig.part(1, other),
            rig.part(34, rig.compensator),
        ]
        mixed = rig.run(x, parts, activation)
        for rows, want in ((slice(0, 5), alone), (slice(5, 35), plain), (slice(36, 70), alone)):
            assert torch.equal(mixed[rows], want[rows])
        assert torch.equal(mixed[35:36], rig.run(x[35:36], [rig.part(1, other)], activation))
        of = torch.arange(70) * 3 % 70
        by_index = rig.run(Rows(x, of), parts, activation)
        assert torch.equal(by_index, rig.run(x[of], parts, activation))
        shared = rig.run(x[:1], [rig.part(1, None), rig.part(1, rig.compensator)], activation)
        assert torch.equal(shared, torch.cat([plain[:1], alone[:1]]))


@pytest.mark.e2e
@pairwise(
    kernel=["native", "torch"],
    level=[2, 4],
    count=[(2, 1), (7, 1), (7, 4), (40, 3), (40, 39)],
    indirect=["kernel"],
)
def test_only_the_first_rows_are_compensated(kernel, level, count):
    """The others are the same as without a compensator, in one call of one expert."""
    rows, first = count
    rig = Rig(kernel, 128, 96, (9, 16, 6), level)
    x = rig.x(rows)
    for activation in (FUSED, UNFUSED):
        got = rig.run(x, [rig.part(rows, rig.compensator, first)], activation)
        every = rig.run(x, [rig.part(rows, rig.compensator)], activation)
        plain = rig.run(x, [rig.part(rows, None)], activation)
        assert not torch.equal(every[first:], plain[first:])
        if kernel.name == "native":
            assert torch.equal(got, torch.cat([every[:first], plain[first:]]))
        else:  # rows of a torch product may round by their number
            want = torch.cat([every[:first], plain[first:]])
            assert (got.float() - want.float()).norm() < ROUNDING * want.float().norm()


@pytest.mark.skipif("native" not in KERNELS, reason="the compiled kernel was not built")
@pytest.mark.parametrize("first", [0, 4, -1])
def test_compensated_rows_that_the_part_does_not_have_are_refused(first):
    rig = Rig(KERNELS["native"], 128, 64, (8, 8, 8))
    with pytest.raises(ValueError, match="sizes"):
        rig.run(rig.x(3), [rig.part(3, rig.compensator, first)])


@pytest.mark.e2e
@pytest.mark.skipif("native" not in KERNELS, reason="the compiled kernel was not built")
@pytest.mark.parametrize("threads", [1, 3, 20])
def test_no_bit_depends_on_the_number_of_threads(monkeypatch, threads):
    """Tasks have other sizes with other numbers of threads."""
    rig, library = Rig(KERNELS["native"], 512, 800, (40, 24, 32)), native.library()
    wants = [rig.run(rig.x(tokens)) for tokens in TOKENS]
    pool = library.edgemoe_open(threads)
    monkeypatch.setattr(native, "threads", lambda: pool)
    try:
        for tokens, want in zip(TOKENS, wants, strict=True):
            assert torch.equal(rig.run(rig.x(tokens)), want)
    finally:
        library.edgemoe_close(pool)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_stay_so(kernel, bad):
    """The engine must see them, in their row alone."""
    rig = Rig(kernel, 128, 64, (8, 8, 8))
    x = rig.x(3)
    x[1, 3] = bad
    assert rig.run(x).isfinite().all(dim=1).tolist() == [True, False, True]


@pytest.mark.skipif("native" not in KERNELS, reason="the compiled kernel was not built")
@pytest.mark.parametrize(
    ("projection", "changes"),
    [
        (0, {"rows": 65}),
        (1, {"cols": 129}),
        (2, {"rows": 129}),
        (2, {"rank": -1}),
        (0, {"rows": 0}),
    ],
    ids=str,
)
@pytest.mark.parametrize("activation", [FUSED, UNFUSED], ids=["fused", "unfused"])
def test_a_compensator_of_another_expert_is_refused(projection, changes, activation):
    """Sizes that exceed the matrix are a ValueError before anything is computed."""
    rig = Rig(KERNELS["native"], 128, 64, (8, 8, 8))
    for name, value in changes.items():
        setattr(rig.structures[0].of[projection], name, value)
    with pytest.raises(ValueError, match="sizes"):
        rig.run(rig.x(2), activation=activation)
