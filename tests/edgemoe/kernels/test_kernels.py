"""The CPU kernels against plain float arithmetic on decoded weights."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from native_paths import PATHS, forced, running
from pairwise import pairwise
from record_codec import encode
from records import KEY, MemoryReader, a_store, blocks_for
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from edgemoe.kernels import torch_int4 as cpu
from edgemoe.kernels.activation import CUSTOM, Activation
from edgemoe.kernels.base import ExpertKernel, Part, Rows
from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.experts import weighted_sum
from edgemoe.kernels.registry import Compute, kernels_for
from edgemoe.kernels.torch_int4 import CpuExpertKernel
from edgemoe.layers.dense import DenseNorm
from edgemoe.machine.cpu import identity
from edgemoe.storage.record.decode import decode
from edgemoe.storage.record.forms import PlaneForm
from edgemoe.storage.record.layout import detect
from edgemoe.storage.record.offsets import MatrixSpec, RecordGeometry
from edgemoe.storage.store.dense import quantize_rows

SHAPES = [((48, 64), (64, 24)), ((200, 100), (100, 100)), ((1536, 256), (256, 768))]

KERNELS = {kernel.name: kernel for kernel in kernels_for()}

needs_native = pytest.mark.skipif("native" not in KERNELS, reason="the compiled kernel was not built")


@pytest.mark.skipif(
    shutil.which("gcc") is None or "avx2" not in identity()["features"].split(),
    reason="nothing compiles it here",
)
def test_the_kernel_was_built() -> None:
    """An installation goes on where the kernel does not compile, and then the tests of it would be skipped."""
    assert native.available(), (
        "install again and read what the compiler says: pip install --verbose --editable ."
    )


def gate(both: torch.Tensor) -> torch.Tensor:
    first, second = both.chunk(2, dim=-1)
    return torch.nn.functional.silu(first) * second


FUSED = Activation("silu", gate)
"""A kernel may compute it in one call with both products."""

UNFUSED = Activation(CUSTOM, gate)
"""The gating as a function that a kernel must call."""


def as_read(x: torch.Tensor, kernel: Compute, level: int, group: int) -> torch.Tensor:
    """Activations as a kernel reads them: the compiled one below level 8 in 127ths of each chunk's largest."""
    if kernel.name != "native" or level == 8:
        return x.float()
    chunk = min(group, 64)
    chunks = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % chunk)).view(len(x), -1, chunk)
    step = chunks.abs().amax(-1, keepdim=True) / 127
    return ((chunks / step.clamp_min(1e-30)).round() * step).view(len(x), -1)[:, : x.shape[1]]


@pytest.fixture(params=PATHS)
def path(request) -> Iterator[None]:
    """Products by each path; with AVX2, products with bf16 weights too."""
    with forced(request.param):
        yield


@pytest.fixture(params=["native", "torch"])
def kernel(request) -> Compute:
    if request.param not in KERNELS:
        pytest.skip("the compiled kernel was not built, or the processor has no AVX2")
    return KERNELS[request.param]


@cache
def expert_of(kernel: Compute, shape):
    """An expert's geometry, record, blocks by level, and weights. Read-only."""
    geometry, weights, record = a_store(shape, kernel.layout)
    form = kernel.form(geometry, kernel.layout, kernel.layout)
    blocks = {}
    for level in (8, 4, 2):
        blocks[level] = blocks_for(form, level)
        form.fill(MemoryReader(record, geometry), KEY, level, blocks[level], None)
    return geometry, record, blocks, weights


@pytest.fixture(params=SHAPES, ids=["small", "odd", "wide"])
def expert(request, kernel):
    return expert_of(kernel, request.param)


def computed(
    kernel: ExpertKernel, x: torch.Tensor | Rows, parts: list[Part], activation=FUSED
) -> torch.Tensor:
    """The rows that a call writes, bf16 [R, H]; every one of them must be written."""
    rows = x if isinstance(x, Rows) else Rows(x)
    out = torch.full((sum(part.rows for part in parts), rows.x.shape[1]), 7777.0).bfloat16()
    assert kernel.forward(rows, parts, activation, out) is None
    assert not (out == 7777).all(dim=1).any()
    return out


def run(
    kernel: Compute, geometry, x: torch.Tensor, blocks, resident: int, level: int, activation=FUSED
) -> torch.Tensor:
    """All rows of x through one expert."""
    parts = [Part(blocks, resident, level, len(x))]
    return computed(kernel.kernel(geometry, kernel.layout), x, parts, activation)


def reference(kernel: Compute, geometry, record, x: torch.Tensor, level: int) -> torch.Tensor:
    """float32 products of decoded weights and the activations as read, rounded to bf16 where transformers rounds."""
    up, down = decode(record, geometry, kernel.layout, level)
    groups = [matrix.group for matrix in geometry.matrices]
    inner = gate((as_read(x, kernel, level, groups[0]) @ up.T).bfloat16())
    return as_read(inner, kernel, level, groups[1]) @ down.T


@pytest.mark.e2e
@pytest.mark.parametrize("level", [8, 4, 2])
@pairwise(
    kernel=["native", "torch"],
    expert=SHAPES,
    tokens=[1, 2, 3, 4, 7, 39, 40, 64, 65, 79, 80, 130],
    indirect=["kernel", "expert"],
)
def test_every_level_and_token_count_matches_the_reference(kernel, expert, level, tokens):
    """The output is the decoded weights' product in float32, to bf16's rounding."""
    geometry, record, blocks, _ = expert
    columns = geometry.matrices[0].cols
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens)).bfloat16()
    want = reference(kernel, geometry, record, x, level)
    for activation in (FUSED, UNFUSED):
        got = run(kernel, geometry, x, blocks[level], level, level, activation).float()
        assert got.shape == want.shape
        assert (got - want).norm() / want.norm() < 0.01


@pairwise(
    kernel=["native", "torch"],
    expert=SHAPES,
    levels=[(8, 4), (8, 2), (4, 2)],
    tokens=[1, 100],
    indirect=["kernel", "expert"],
)
def test_a_lower_level_from_higher_planes_is_bit_identical(kernel, expert, levels, tokens):
    """Computing at a level gives the same bits whether or not higher planes happen to be resident."""
    (geometry, _, blocks, _), (resident, level) = expert, levels
    x = torch.randn(tokens, geometry.matrices[0].cols).bfloat16()
    assert torch.equal(
        run(kernel, geometry, x, blocks[resident], resident, level),
        run(kernel, geometry, x, blocks[level], level, level),
    )


@pytest.mark.e2e
def test_errors_of_the_levels_are_those_of_the_format(kernel, expert):
    """The output's error against unquantized weights grows by level as the format promises."""
    geometry, _, blocks, (up, down) = expert
    x = torch.randn(64, up.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    want = gate(x.float() @ up.T) @ down.T
    errors = {
        level: ((run(kernel, geometry, x, blocks[level], level, level) - want).norm() / want.norm()).item()
        for level in (8, 4, 2)
    }
    assert errors[8] < 0.02
    assert 0.05 < errors[4] < 0.25
    assert 0.3 < errors[2] < 0.9


@pytest.mark.e2e
def test_experts_computed_together_are_those_computed_alone(kernel, expert):
    """A row's bits do not depend on the other rows of its call: which experts are ready together is chance."""
    geometry, _, blocks, _ = expert
    levels = [(8, 8), (4, 2), (8, 4), (2, 2)]
    sizes = [1, 70, 3, 50]
    x = torch.randn(sum(sizes), geometry.matrices[0].cols).bfloat16()
    parts = [Part(blocks[h], h, level, rows) for (h, level), rows in zip(levels, sizes, strict=True)]
    one_row = [Part(blocks[h], h, level, 1) for h, level in levels]
    made = kernel.kernel(geometry, kernel.layout)
    for activation in (FUSED, UNFUSED):
        pairs = zip(x.split(sizes), parts, strict=True)
        alone = [computed(made, rows, [part], activation) for rows, part in pairs]
        assert torch.equal(computed(made, x, parts, activation), torch.cat(alone))
        together = computed(made, x[:1], one_row, activation)
        alone = [computed(made, x[:1], [part], activation) for part in one_row]
        assert torch.equal(together, torch.cat(alone))


@pytest.mark.e2e
def test_rows_taken_by_index_are_those_gathered(kernel, expert):
    """Calls that share a layer's input compute the same bits, with experts at level 8 alone and among others."""
    geometry, _, blocks, _ = expert
    x = Rows(torch.randn(20, geometry.matrices[0].cols).bfloat16())
    made = kernel.kernel(geometry, kernel.layout)
    for levels in ((8, 8), (4, 8), (2, 4), (8, 8)):
        parts = [Part(blocks[level], level, level, rows) for level, rows in zip(levels, (1, 33), strict=True)]
        of = torch.randint(0, 20, (34,))
        for activation in (FUSED, UNFUSED):
            got = computed(made, replace(x, of=of), parts, activation)
            assert torch.equal(got, computed(made, x.x[of], parts, activation))


@needs_native
@pytest.mark.parametrize(("slots", "columns"), [(1, 5), (8, 2048), (6, 100)])
@pytest.mark.parametrize("indexed", [False, True])
def test_a_weighted_sum_is_one(slots, columns, indexed):
    """Each token's sum equals that in float64 to bf16's rounding, and is added in place as torch adds in bf16.

    With `row_of` rows come in any order, and a slot below 0 adds nothing.
    """
    generator = torch.Generator().manual_seed(slots)
    tokens = 3
    rows = torch.randn(tokens * slots, columns, generator=generator).bfloat16()
    weights = torch.rand(tokens, slots, generator=generator)
    row_of, taken = None, rows.view(tokens, slots, columns)
    if indexed:
        row_of = torch.randperm(tokens * slots, generator=generator).view(tokens, slots)
        taken = rows[row_of]
        if slots > 1:
            row_of[1, 0], taken[1, 0] = -1, 0
    want = torch.einsum("tr,trc->tc", weights.double(), taken.double())
    alone = weighted_sum(rows, weights, row_of)
    torch.testing.assert_close(alone.double(), want, rtol=0.005, atol=1e-5)
    sums = torch.randn(1, tokens, columns, generator=generator).bfloat16()
    added = sums + alone
    assert weighted_sum(rows, weights, row_of, sums) is sums
    assert torch.equal(sums, added)


@pytest.mark.e2e
@needs_native
@pairwise(path=running(PATHS), shape=SHAPES, group=[32, 64, 128], level=[8, 4, 2], indirect=["path"])
def test_a_token_is_the_same_alone_and_among_others(path, shape, group, level):
    """One token takes another kernel than many; no bit of its result depends on that, for any shape."""
    generator = torch.Generator().manual_seed(level)
    up, down = shape
    geometry = RecordGeometry((MatrixSpec.of("gate_up", *up, group), MatrixSpec.of("down", *down, group)), 8)
    weights = [torch.randn(m.rows, m.cols, generator=generator) for m in geometry.matrices]
    form = PlaneForm(geometry, native.LAYOUT, native.LAYOUT)
    blocks = blocks_for(form, level)
    record = encode(geometry, native.LAYOUT, weights)
    form.fill(MemoryReader(record, geometry), KEY, level, blocks, None)
    x = (torch.randn(70, geometry.matrices[0].cols, generator=generator) * 10).bfloat16()
    alone = torch.cat([run(KERNELS["native"], geometry, row[None], blocks, level, level) for row in x])
    for tokens in (2, 3, 4, 5, 6, 15, 64, 65, 70):
        got = run(KERNELS["native"], geometry, x[:tokens], blocks, level, level)
        assert torch.equal(got, alone[:tokens]), tokens


def test_bf16_products_agree_with_float32_ones(monkeypatch):
    """On a CPU with bf16 instructions torch's product of many tokens is in bf16, with an equal result to rounding."""
    layout, kernel = detect(), KERNELS["torch"]
    geometry, _, record = a_store(SHAPES[2], layout)
    form = kernel.form(geometry, layout, layout)
    blocks = blocks_for(form, 8)
    form.fill(MemoryReader(record, geometry), KEY, 8, blocks, None)
    x = torch.randn(128, geometry.matrices[0].cols).bfloat16()
    outputs = []
    for fast in (False, True):
        monkeypatch.setattr(cpu, "fast_bf16", lambda fast=fast: fast)
        outputs.append(computed(CpuExpertKernel(geometry, layout), x, [Part(blocks, 8, 8, 128)]).float())
    assert (outputs[0] - outputs[1]).norm() / outputs[0].norm() < 0.02


@pytest.mark.e2e
@needs_native
@pairwise(path=running(PATHS), group=[32, 64, 128, 256], rows=[8, 16, 40, 160], indirect=["path"])
def test_groups_and_a_last_block_of_16_rows(path, group, rows):
    """Results are right for every group, and for a last block of 32 rows or of 16, which has a layout of its own."""
    geometry = RecordGeometry(
        (MatrixSpec.of("gate_up", 2 * rows, 512, group), MatrixSpec.of("down", 512, rows, 32)), 8
    )
    generator = torch.Generator().manual_seed(rows)
    weights = [torch.randn(m.rows, m.cols, generator=generator) for m in geometry.matrices]
    record = encode(geometry, native.LAYOUT, weights)
    form = PlaneForm(geometry, native.LAYOUT, native.LAYOUT)
    for level in (8, 4, 2):
        blocks = blocks_for(form, level)
        form.fill(MemoryReader(record, geometry), KEY, level, blocks, None)
        for tokens in (1, 5, 11):
            x = torch.randn(tokens, 512, generator=generator).bfloat16()
            want = reference(KERNELS["native"], geometry, record, x, level)
            got = run(KERNELS["native"], geometry, x, blocks, level, level)
            assert (got - want).norm() / want.norm() < 0.01


@needs_native
def test_activations_of_very_different_sizes():
    """An outlier costs its own chunk of 64 columns some precision, and no other."""
    geometry, _, record = a_store(SHAPES[2], native.LAYOUT)
    form = PlaneForm(geometry, native.LAYOUT, native.LAYOUT)
    blocks = blocks_for(form, 8)
    form.fill(MemoryReader(record, geometry), KEY, 8, blocks, None)
    up, down = decode(record, geometry, native.LAYOUT, 8)
    x = torch.randn(1, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    x[0, 7] = 500
    x[0, 64:128] = 0
    want = gate(x.float() @ up.T) @ down.T
    assert (run(KERNELS["native"], geometry, x, blocks, 8, 8) - want).norm() / want.norm() < 0.01


@pairwise(
    kernel=["native", "torch"],
    expert=SHAPES,
    bad=[float("nan"), float("inf"), float("-inf")],
    tokens=[3, 100],
    indirect=["kernel", "expert"],
)
def test_numbers_that_are_not_finite_stay_so(kernel, expert, bad, tokens):
    """A NaN among activations stays in the result of every kernel: the engine must see it."""
    geometry, _, blocks, _ = expert
    x = torch.randn(tokens, geometry.matrices[0].cols).bfloat16()
    x[1, 3] = bad
    finite = run(kernel, geometry, x, blocks[4], 4, 4).isfinite().all(dim=1)
    assert finite.tolist() == [row != 1 for row in range(tokens)]


@needs_native
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_stay_so_in_dense_products(bad):
    """A NaN or infinity stays in the product with dense weights in 8 and 16 bits."""
    x = torch.randn(2, 300).bfloat16()
    x[1, 299] = bad
    codes, scales = quantize_rows(torch.randn(40, 300))
    for y in (native.dense_product(x, codes, scales), native.dense_product(x, codes.bfloat16(), None)):
        assert y[0].isfinite().all()
        assert not y[1].isfinite().any()


@pytest.mark.e2e
@needs_native
@pairwise(
    path=running(PATHS),
    shape=[(4096, 2048), (33, 100), (5, 256), (64, 17)],
    tokens=[1, 5, 12, 71],
    indirect=["path"],
)
def test_dense_products(path, shape, tokens):
    """Products with both kinds of dense weight equal products in double precision, to the rounding of activations."""
    generator = torch.Generator().manual_seed(shape[0])
    weight = torch.randn(shape, generator=generator)
    x = torch.randn(tokens, shape[1], generator=generator).bfloat16()
    codes, scales = quantize_rows(weight)
    exact = x.double() @ (codes.double() * scales.double().unsqueeze(1)).T
    assert ((native.dense_product(x, codes, scales) - exact).norm() / exact.norm()) < 0.016
    rounded = weight.bfloat16()
    exact = x.double() @ rounded.double().T
    assert ((native.dense_product(x, rounded, None) - exact).norm() / exact.norm()) < 0.003


@needs_native
@pairwise(
    path=running(PATHS),
    shape=[(64, 2048), (33, 304), (5, 100), (64, 17)],
    bits=[8, 16],
    indirect=["path"],
)
def test_a_dense_product_of_a_token_is_the_same_alone_and_among_others(path, shape, bits):
    """Tokens and rows are multiplied several at a time; no bit of a result depends on their number."""
    generator = torch.Generator().manual_seed(shape[1])
    codes, scales = quantize_rows(torch.randn(shape, generator=generator))
    weight = (codes, scales) if bits == 8 else (codes.bfloat16(), None)
    x = torch.randn(11, shape[1], generator=generator).bfloat16()
    alone = torch.cat([native.dense_product(row[None], *weight) for row in x])
    for tokens in (2, 3, 4, 5, 6, 8, 11):
        assert torch.equal(native.dense_product(x[:tokens], *weight), alone[:tokens])


DENSE_SHAPES = [(4100, 64), (96, 304), (33, 100), (64, 17)]


def all_products(seed: int, *, bf16: bool = True) -> list[torch.Tensor]:
    """The compiled kernel's results for experts at every level and for dense weights, for one token and for many."""
    generator, out = torch.Generator().manual_seed(seed), []
    for (up, down), level in product(SHAPES, (8, 4, 2)):
        geometry = RecordGeometry((MatrixSpec.of("gate_up", *up), MatrixSpec.of("down", *down)), 8)
        weights = [torch.randn(m.rows, m.cols, generator=generator) for m in geometry.matrices]
        form = PlaneForm(geometry, native.LAYOUT, native.LAYOUT)
        blocks, record = blocks_for(form, level), encode(geometry, native.LAYOUT, weights)
        form.fill(MemoryReader(record, geometry), KEY, level, blocks, None)
        kernel = KERNELS["native"].kernel(geometry, native.LAYOUT)
        for rows, activation in product((1, 11, 70), (FUSED, UNFUSED)):
            x = torch.randn(4 * rows, up[1], generator=generator).bfloat16()
            out.append(computed(kernel, x, [Part(blocks, level, level, rows)] * 4, activation))
    for shape, tokens in product(DENSE_SHAPES, (1, 5, 12)):
        codes, scales = quantize_rows(torch.randn(shape, generator=generator))
        x = torch.randn(tokens, shape[1], generator=generator).bfloat16()
        out.append(native.dense_product(x, codes, scales))
        if bf16:
            out.append(native.dense_product(x, codes.bfloat16(), None))
    return out


@pytest.mark.e2e
@needs_native
@pytest.mark.parametrize("threads", [1, 3, 20])
def test_no_bit_depends_on_the_number_of_threads(monkeypatch, threads):
    """Every row has the same bits for any number of threads, though tasks have other sizes."""
    want, library = all_products(2), native.library()
    pool = library.edgemoe_open(threads)
    monkeypatch.setattr(native, "threads", lambda: pool)
    try:
        assert all(map(torch.equal, all_products(2), want))
    finally:
        library.edgemoe_close(pool)


@needs_native
@pytest.mark.parametrize("size", [128, 100, 2048])
def test_norms_are_transformers_own(size):
    """DenseNorm equals transformers' norm bit for bit; a norm of another class is not replaced."""
    # Squares are added up in another order, so in about one of 240 rows of 2048 numbers one rounds the other way.
    generator = torch.Generator().manual_seed(size)
    norm = Qwen3MoeRMSNorm(size, eps=1e-6).to(torch.bfloat16)
    norm.weight.data.normal_(1, 0.2, generator=generator)
    quick = DenseNorm.try_from(norm)
    x = (torch.randn(3, 7, size, generator=generator) * 5).bfloat16()
    assert quick is not None
    assert torch.equal(quick(x), norm(x))
    assert DenseNorm.try_from(torch.nn.BatchNorm1d(size).to(torch.bfloat16)) is None


@needs_native
def test_a_norm_with_a_float32_weight_takes_what_its_caller_converted():
    """Nemotron-H's norm rounds the product alone, and its block converts the state to the weight's dtype before."""
    generator = torch.Generator().manual_seed(0)
    norm = NemotronHRMSNorm(128).to(torch.bfloat16)
    norm.weight.data.normal_(1, 0.2, generator=generator)
    quick = DenseNorm.try_from(norm)
    x = (torch.randn(3, 7, 128, generator=generator) * 5).bfloat16()
    assert quick is not None
    assert quick.weight.dtype == torch.float32
    made = quick(x.to(quick.weight.dtype))
    assert made.dtype == torch.bfloat16
    assert torch.equal(made, norm(x))


@needs_native
def test_numbers_of_another_type_are_refused():
    """The kernel has the address of numbers alone, and would read float32 as bf16."""
    x, weight = torch.ones(2, 64), torch.ones(64, 64).bfloat16()
    for call in (
        lambda: native.dense_product(x, weight, None),
        lambda: native.rms_norm(x, weight[0], 1e-6),
        lambda: native.head_products(x[None], weight[None]),
    ):
        with pytest.raises(ValueError, match=r"expected bf16 numbers, got torch.float32"):
            call()


@pytest.mark.e2e
@needs_native
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_computes_with_threads_of_its_own():
    """A forked child, which has none of its parent's threads, does not wait for them."""
    weight = torch.randn(4096, 64).bfloat16()
    x = torch.randn(1, 64).bfloat16()
    want = native.dense_product(x, weight, None)
    child = os.fork()
    if not child:
        os._exit(0 if torch.equal(native.dense_product(x, weight, None), want) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
