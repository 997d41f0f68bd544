"""The CPU kernels against plain float arithmetic on decoded weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from record_codec import decode, encode
from records import KEY, MemoryReader, a_store, blocks_for
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from edgemoe.kernels import torch_int4 as cpu
from edgemoe.kernels.base import Part
from edgemoe.kernels.native import library as native
from edgemoe.kernels.registry import Compute, kernels_for
from edgemoe.kernels.torch_int4 import CpuExpertKernel
from edgemoe.layers.dense import DenseNorm
from storage.dense import quantize_rows
from storage.forms import PlaneForm
from storage.layout import detect
from storage.record import MatrixSpec, RecordGeometry

SHAPES = [((48, 64), (64, 24)), ((200, 100), (100, 100)), ((1536, 256), (256, 768))]

WAYS = {way.name: way for way in kernels_for()}

needs_native = pytest.mark.skipif("native" not in WAYS, reason="edgemoe's own kernel was not built")


def gate(both: torch.Tensor) -> torch.Tensor:
    first, second = both.chunk(2, dim=-1)
    return torch.nn.functional.silu(first) * second


class Gated(torch.nn.Module):
    """Gates as a model's module does, so that a kernel may recognise it."""

    def gate(self, both: torch.Tensor) -> torch.Tensor:
        return gate(both)


KNOWN = Gated().gate


def as_read(x: torch.Tensor, way: Compute, level: int, group: int) -> torch.Tensor:
    """Activations as a kernel reads them: edgemoe's own below level 8 in 127ths of each chunk's largest."""
    if way.name != "native" or level == 8:
        return x.float()
    chunk = min(group, 64)
    chunks = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % chunk)).view(len(x), -1, chunk)
    step = chunks.abs().amax(-1, keepdim=True) / 127
    return ((chunks / step.clamp_min(1e-30)).round() * step).view(len(x), -1)[:, : x.shape[1]]


@pytest.fixture(params=[True, False], ids=["vnni", "avx2"])
def vnni(request) -> Iterator[None]:
    """Products with AVX-512 VNNI and without."""
    if native.use_vnni(request.param) != request.param:
        pytest.skip("the processor has no AVX-512 VNNI")
    yield
    native.use_vnni(True)


@pytest.fixture(params=["native", "torch"])
def way(request) -> Compute:
    if request.param not in WAYS:
        pytest.skip("edgemoe's own kernel was not built, or the processor has no AVX2")
    return WAYS[request.param]


@pytest.fixture(params=SHAPES, ids=["small", "odd", "wide"])
def expert(request, way):
    geometry, weights, record = a_store(request.param, way.layout)
    form = way.form(geometry, way.layout, way.layout)
    blocks = {}
    for level in (8, 4, 2):
        blocks[level] = blocks_for(form, level)
        form.fill(MemoryReader(record, geometry), KEY, level, blocks[level], None)
    return geometry, record, blocks, weights


def run(way: Compute, geometry, x: torch.Tensor, blocks, held: int, level: int, gating=KNOWN) -> torch.Tensor:
    return way.kernel(geometry, way.layout).forward(x, [Part(blocks, held, level, len(x))], gating)


def reference(way: Compute, geometry, record, x: torch.Tensor, level: int) -> torch.Tensor:
    """float32 products with decoded weights of what the kernel reads, rounded to bf16 where transformers rounds."""
    up, down = decode(record, geometry, way.layout, level)
    groups = [matrix.group for matrix in geometry.matrices]
    inner = gate((as_read(x, way, level, groups[0]) @ up.T).bfloat16())
    return as_read(inner, way, level, groups[1]) @ down.T


@pytest.mark.parametrize("level", [8, 4, 2])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7, 39, 40, 64, 65, 79, 80, 130])
def test_every_level_and_token_count_matches_the_reference(way, expert, level, tokens):
    """The output is the decoded weights' product in float32, to bf16's rounding."""
    geometry, record, blocks, _ = expert
    columns = geometry.matrices[0].cols
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens)).bfloat16()
    want = reference(way, geometry, record, x, level)
    for gating in (KNOWN, gate):
        got = run(way, geometry, x, blocks[level], level, level, gating).float()
        assert got.shape == want.shape
        assert (got - want).norm() / want.norm() < 0.01


@pytest.mark.parametrize(("held", "level"), [(8, 4), (8, 2), (4, 2)])
@pytest.mark.parametrize("tokens", [1, 100])
def test_a_lower_level_from_higher_planes_is_bit_identical(way, expert, held, level, tokens):
    """Computing at a level gives the same bits whether or not higher planes happen to be resident."""
    geometry, _, blocks, _ = expert
    x = torch.randn(tokens, geometry.matrices[0].cols).bfloat16()
    assert torch.equal(
        run(way, geometry, x, blocks[held], held, level),
        run(way, geometry, x, blocks[level], level, level),
    )


def test_errors_of_the_levels_are_those_of_the_format(way, expert):
    """The output's error against unquantized weights grows by level as the format promises."""
    geometry, _, blocks, (up, down) = expert
    x = torch.randn(64, up.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    want = gate(x.float() @ up.T) @ down.T
    errors = {
        level: ((run(way, geometry, x, blocks[level], level, level) - want).norm() / want.norm()).item()
        for level in (8, 4, 2)
    }
    assert errors[8] < 0.02
    assert 0.05 < errors[4] < 0.25
    assert 0.3 < errors[2] < 0.9


def test_experts_computed_together_are_those_computed_alone(way, expert):
    """A row's bits do not depend on what else is in the call: which experts are ready together is a matter of luck."""
    geometry, _, blocks, _ = expert
    held = [(8, 8), (4, 2), (8, 4), (2, 2)]
    sizes = [1, 70, 3, 50]
    x = torch.randn(sum(sizes), geometry.matrices[0].cols).bfloat16()
    parts = [Part(blocks[h], h, level, rows) for (h, level), rows in zip(held, sizes, strict=True)]
    kernel = way.kernel(geometry, way.layout)
    alone = [kernel.forward(rows, [part], gate) for rows, part in zip(x.split(sizes), parts, strict=True)]
    assert torch.equal(kernel.forward(x, parts, gate), torch.cat(alone))
    one = [Part(blocks[h], h, level, 1) for h, level in held]
    together = kernel.forward(x[:1].expand(4, -1), one, gate)
    assert torch.equal(together, torch.cat([kernel.forward(x[:1], [part], gate) for part in one]))


@needs_native
def test_a_tokens_experts_are_left_where_they_belong(way, expert):
    """Rows that experts do not have stay as they were; what they get are forward's bits."""
    geometry, _, blocks, _ = expert
    if way.name != "native" or geometry.matrices[0].padded_cols != geometry.matrices[0].cols:
        pytest.skip("of sizes that have to be padded it is forward that computes")
    kernel = way.kernel(geometry, way.layout)
    x = torch.randn(1, geometry.matrices[0].cols).bfloat16()
    padded = geometry.matrices[1].padded_rows != geometry.matrices[1].rows
    assert not kernel.takes(lambda both: both)
    assert kernel.takes(KNOWN) == (not padded)
    if padded:
        return
    y = torch.full((5, geometry.matrices[1].rows), 7.0).bfloat16()
    kernel.into(x, [kernel.prepared(blocks[level], level) for level in (4, 8, 2)], [3, 0, 2], y)
    parts = [Part(blocks[level], level, level, 1) for level in (4, 8, 2)]
    assert torch.equal(y[[3, 0, 2]], kernel.forward(x.expand(3, -1), parts, KNOWN))
    assert (y[[1, 4]] == 7).all()


@needs_native
@pytest.mark.parametrize(("rows", "columns"), [(1, 5), (8, 2048), (6, 100)])
def test_a_weighted_sum_is_one(rows, columns):
    """Each token's within bf16's rounding of the sum in float64; and added in place as torch adds the two in bf16."""
    tokens = 3
    y = torch.randn(tokens, rows, columns).bfloat16()
    weights = torch.rand(tokens, rows)
    want = torch.einsum("tr,trc->tc", weights.double(), y.double())
    alone = native.weighted_sum(y, weights)
    torch.testing.assert_close(alone.double(), want, rtol=0.005, atol=1e-5)
    plus = torch.randn(1, tokens, columns).bfloat16()
    added = plus + alone
    assert native.weighted_sum(y, weights, plus) is plus
    assert torch.equal(plus, added)


@needs_native
@pytest.mark.usefixtures("vnni")
@pytest.mark.parametrize("level", [8, 4, 2])
def test_a_token_is_the_same_alone_and_among_others(level):
    """One token goes another way than many: not a bit of its result may show it, whatever the shape."""
    generator = torch.Generator().manual_seed(level)
    for (up, down), group in product(SHAPES, (32, 64, 128)):
        geometry = RecordGeometry(
            (MatrixSpec.of("gate_up", *up, group), MatrixSpec.of("down", *down, group)), 8
        )
        weights = [torch.randn(m.rows, m.cols, generator=generator) for m in geometry.matrices]
        form = PlaneForm(geometry, native.LAYOUT, native.LAYOUT)
        blocks = blocks_for(form, level)
        record = encode(geometry, native.LAYOUT, weights)
        form.fill(MemoryReader(record, geometry), KEY, level, blocks, None)
        x = (torch.randn(70, geometry.matrices[0].cols, generator=generator) * 10).bfloat16()
        alone = torch.cat([run(WAYS["native"], geometry, row[None], blocks, level, level) for row in x])
        for tokens in (2, 3, 4, 5, 6, 15, 64, 65, 70):
            got = run(WAYS["native"], geometry, x[:tokens], blocks, level, level)
            assert torch.equal(got, alone[:tokens]), (up, group, tokens)


def test_bf16_products_agree_with_float32_ones(monkeypatch):
    """On a CPU with bf16 instructions torch's many-token way multiplies in bf16; the result is the same to rounding."""
    layout, way = detect(), WAYS["torch"]
    geometry, _, record = a_store(SHAPES[2], layout)
    form = way.form(geometry, layout, layout)
    blocks = blocks_for(form, 8)
    form.fill(MemoryReader(record, geometry), KEY, 8, blocks, None)
    x = torch.randn(128, geometry.matrices[0].cols).bfloat16()
    outputs = []
    for fast in (False, True):
        monkeypatch.setattr(cpu, "fast_bf16", lambda fast=fast: fast)
        kernel = CpuExpertKernel(geometry, layout)
        outputs.append(kernel.forward(x, [Part(blocks, 8, 8, 128)], gate).float())
    assert (outputs[0] - outputs[1]).norm() / outputs[0].norm() < 0.02


@needs_native
@pytest.mark.usefixtures("vnni")
@pytest.mark.parametrize("group", [32, 64, 128, 256])
@pytest.mark.parametrize("rows", [8, 16, 40, 160])
def test_groups_and_a_last_block_of_16_rows(group, rows):
    """Whatever the group, and whether a matrix ends in 32 rows or in 16, which lie another way."""
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
            want = reference(WAYS["native"], geometry, record, x, level)
            got = run(WAYS["native"], geometry, x, blocks, level, level)
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
    assert (run(WAYS["native"], geometry, x, blocks, 8, 8) - want).norm() / want.norm() < 0.01


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("tokens", [3, 100])
def test_what_is_not_finite_stays_so(way, expert, bad, tokens):
    """A NaN among activations is not computed away, whichever way is taken: the engine must see it."""
    geometry, _, blocks, _ = expert
    x = torch.randn(tokens, geometry.matrices[0].cols).bfloat16()
    x[1, 3] = bad
    finite = run(way, geometry, x, blocks[4], 4, 4).isfinite().all(dim=1)
    assert finite.tolist() == [row != 1 for row in range(tokens)]


@needs_native
@pytest.mark.usefixtures("vnni")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so_in_dense_products(bad):
    """The same of dense weights in 8 and 16 bits."""
    x = torch.randn(2, 300).bfloat16()
    x[1, 299] = bad
    codes, scales = quantize_rows(torch.randn(40, 300))
    for y in (native.dense_product(x, codes, scales), native.dense_product(x, codes.bfloat16(), None)):
        assert y[0].isfinite().all()
        assert not y[1].isfinite().any()


@needs_native
@pytest.mark.usefixtures("vnni")
@pytest.mark.parametrize("shape", [(4096, 2048), (33, 100), (5, 256), (64, 17)])
@pytest.mark.parametrize("tokens", [1, 5, 12])
def test_dense_products(shape, tokens):
    """Both kinds of dense weight against a product in double precision, of every size."""
    generator = torch.Generator().manual_seed(shape[0])
    weight = torch.randn(shape, generator=generator)
    x = torch.randn(tokens, shape[1], generator=generator).bfloat16()
    codes, scales = quantize_rows(weight)
    exact = x.double() @ (codes.double() * scales.double().unsqueeze(1)).T
    assert ((native.dense_product(x, codes, scales) - exact).norm() / exact.norm()) < 0.003
    rounded = weight.bfloat16()
    exact = x.double() @ rounded.double().T
    assert ((native.dense_product(x, rounded, None) - exact).norm() / exact.norm()) < 0.003


@needs_native
@pytest.mark.usefixtures("vnni")
@pytest.mark.parametrize("shape", [(64, 2048), (33, 304), (5, 100), (64, 17)])
@pytest.mark.parametrize("bits", [8, 16])
def test_a_dense_product_of_a_token_is_the_same_alone_and_among_others(shape, bits):
    """Tokens and rows are multiplied several at a time: not a bit of a result may show how many there were."""
    generator = torch.Generator().manual_seed(shape[1])
    codes, scales = quantize_rows(torch.randn(shape, generator=generator))
    weight = (codes, scales) if bits == 8 else (codes.bfloat16(), None)
    x = torch.randn(11, shape[1], generator=generator).bfloat16()
    alone = torch.cat([native.dense_product(row[None], *weight) for row in x])
    for tokens in (2, 3, 4, 5, 8, 11):
        assert torch.equal(native.dense_product(x[:tokens], *weight), alone[:tokens])


DENSE_SHAPES = [(4100, 64), (96, 304), (33, 100), (64, 17)]


def all_products(seed: int) -> list[torch.Tensor]:
    """What edgemoe's kernel gives of experts at every level and of dense weights, for one token and for many."""
    generator, out = torch.Generator().manual_seed(seed), []
    for (up, down), level in product(SHAPES, (8, 4, 2)):
        geometry = RecordGeometry((MatrixSpec.of("gate_up", *up), MatrixSpec.of("down", *down)), 8)
        weights = [torch.randn(m.rows, m.cols, generator=generator) for m in geometry.matrices]
        form = PlaneForm(geometry, native.LAYOUT, native.LAYOUT)
        blocks, record = blocks_for(form, level), encode(geometry, native.LAYOUT, weights)
        form.fill(MemoryReader(record, geometry), KEY, level, blocks, None)
        kernel = WAYS["native"].kernel(geometry, native.LAYOUT)
        for rows, gating in product((1, 11, 70), (KNOWN, gate)):
            x = torch.randn(4 * rows, up[1], generator=generator).bfloat16()
            out.append(kernel.forward(x, [Part(blocks, level, level, rows)] * 4, gating))
    for shape, tokens in product(DENSE_SHAPES, (1, 5, 12)):
        codes, scales = quantize_rows(torch.randn(shape, generator=generator))
        x = torch.randn(tokens, shape[1], generator=generator).bfloat16()
        out += [native.dense_product(x, codes, scales), native.dense_product(x, codes.bfloat16(), None)]
    return out


@needs_native
def test_no_bit_depends_on_the_instructions():
    """AVX-512 VNNI gives what AVX2 gives."""
    if not native.use_vnni(True):
        pytest.skip("the processor has no AVX-512 VNNI")
    quick = all_products(1)
    native.use_vnni(False)
    try:
        plain = all_products(1)
    finally:
        native.use_vnni(True)
    assert all(map(torch.equal, quick, plain))


@needs_native
@pytest.mark.parametrize("threads", [1, 3, 20])
def test_no_bit_depends_on_the_number_of_threads(monkeypatch, threads):
    """Tasks are longer for fewer threads, and lie otherwise: every row is there, the same for any number."""
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
    """The quick norm is a model's own, bit for bit; what only looks like one is left alone."""
    # Squares are added up in another order, so in one of some 240 rows of 2048 a number rounds the other way.
    generator = torch.Generator().manual_seed(size)
    norm = Qwen3MoeRMSNorm(size, eps=1e-6).to(torch.bfloat16)
    norm.weight.data.normal_(1, 0.2, generator=generator)
    quick = DenseNorm.like(norm)
    x = (torch.randn(3, 7, size, generator=generator) * 5).bfloat16()
    assert quick is not None
    assert torch.equal(quick(x), norm(x))
    assert DenseNorm.like(torch.nn.LayerNorm(size).to(torch.bfloat16)) is None

    class Shifted(Qwen3MoeRMSNorm):
        def forward(self, hidden_states):
            return super().forward(hidden_states) + hidden_states

    assert DenseNorm.like(Shifted(size).to(torch.bfloat16)) is None


@needs_native
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_computes_with_threads_of_its_own():
    """A child has none of its parent's threads, and must not wait for them."""
    weight = torch.randn(4096, 64).bfloat16()
    x = torch.randn(1, 64).bfloat16()
    want = native.dense_product(x, weight, None)
    child = os.fork()
    if not child:
        os._exit(0 if torch.equal(native.dense_product(x, weight, None), want) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
