"""The compiled attention over quantized keys and values, against equations over the numbers that rows stand for."""

from __future__ import annotations

import pytest
import torch
from availability import needs_native
from native_paths import forced, running
from pairwise import pairwise

from edgemoe.kernels.native import paths
from edgemoe.kernels.native.attention import NativeAttention
from edgemoe.kernels.native.attention_rows import LayerKV
from edgemoe.kv.formats import KVFormat
from edgemoe.kv.rows import decode, encode, rotate

pytestmark = needs_native

CONTEXT = 200
SHAPES = [(4, 4, 16), (6, 2, 48), (14, 2, 80), (32, 4, 128), (7, 1, 64)]
FORMATS = [
    KVFormat("q8_0", "q8_0"),
    KVFormat("q4_0", "q4_0"),
    KVFormat("q4_0", "q8_0", rotates=False),
    KVFormat("bf16", "q4_0"),
    KVFormat("q8_0", "bf16"),
]


class Prompt:
    """Random projections of every token, and a KV of random tokens in a format."""

    def __init__(self, heads: int, kv_heads: int, dim: int, form: KVFormat) -> None:
        generator = torch.Generator().manual_seed(heads * dim)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).bfloat16()

        self.heads, self.kv_heads, self.dim, self.form = heads, kv_heads, dim, form
        angle = torch.rand(CONTEXT, dim // 2, generator=generator).mul(6).repeat(1, 2)
        self.rotation = angle.cos().bfloat16(), angle.sin().bfloat16()
        self.qkv = random(CONTEXT, (heads + 2 * kv_heads) * dim)
        self.size = form.rotation(dim)
        self.keys = encode(form.keys, rotate(random(kv_heads, CONTEXT, dim), self.size))
        self.values = encode(form.values, random(kv_heads, CONTEXT, dim))
        self.scaling = 2 * dim**-0.5
        self.attention = NativeAttention(heads, kv_heads, dim, None, self.scaling)

    def attended(self, past, cuts, window):
        """Results for rows [past, cuts[-1]), a call for each part that ends at one of `cuts`; keys and values."""
        keys, values, out = self.keys.clone(), self.values.clone(), []
        for start, end in zip((past, *cuts), cuts, strict=False):
            rotation = self.rotation[0][start:end], self.rotation[1][start:end]
            qkv = self.qkv[start:end].clone()
            out.append(self.attention(qkv, rotation, LayerKV(keys, values, start, self.form), window))
        return torch.cat(out), keys, values

    def read(self, keys, values):
        """The numbers that rows stand for, float64."""
        wide = decode(self.form.keys, keys, self.dim).double()
        values = decode(self.form.values, values, self.dim).double()
        if not self.size:
            return wide, values
        return rotate(wide.float(), self.size).double(), values


def attended_to(queries, rotation, keys, values, first, end, scaling):
    """Softmax attention in float64 of queries [heads * dim], rotated by position, to tokens [first, end)."""
    kv_heads, _, dim = keys.shape
    cosine, sine = (table.double() for table in rotation)
    heads = queries.double().view(kv_heads, -1, dim)
    low, high = heads.split(dim // 2, dim=-1)
    turned = heads * cosine + torch.cat((-high, low), dim=-1) * sine
    weights = (turned @ keys[:, first:end].mT * scaling).softmax(-1)
    return (weights @ values[:, first:end]).flatten()


@pytest.mark.e2e
@pairwise(
    form=FORMATS,
    shape=SHAPES,
    span=[(0, 1), (33, 34), (130, 131), (0, 70), (61, 190)],
    window=[None, 40],
)
def test_results_match_the_equations(form, shape, span, window):
    """One token and several attend to the numbers that rows stand for, their own rows among them."""
    (heads, _, dim), (past, end) = shape, span
    prompt = Prompt(*shape, form)
    out, keys, values = prompt.attended(past, (end,), window)
    wide, summed = prompt.read(keys, values)
    for row in {past, (past + end) // 2, end - 1}:
        rotation = prompt.rotation[0][row], prompt.rotation[1][row]
        first = max(row + 1 - window, 0) if window else 0
        queries = prompt.qkv[row, : heads * dim]
        expected = attended_to(queries, rotation, wide, summed, first, row + 1, prompt.scaling)
        torch.testing.assert_close(out[row - past].double(), expected, atol=0.03, rtol=0.03)
    others = [token for token in range(CONTEXT) if not past <= token < end]
    for now, before in ((keys, prompt.keys), (values, prompt.values)):
        assert torch.equal(now[:, others], before[:, others])


@pytest.mark.e2e
@pairwise(form=FORMATS, shape=SHAPES, rows=[1, 20])
def test_rows_are_stored_with_the_references_bits(form, shape, rows):
    """Keys and values lie as kv.rows.encode and rotate have them, zeros and numbers that are not finite too."""
    heads, kv_heads, dim = shape
    prompt = Prompt(*shape, form)
    prompt.rotation = torch.ones(CONTEXT, dim).bfloat16(), torch.zeros(CONTEXT, dim).bfloat16()
    _, key, value = prompt.qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    key[:, :16] = 0
    value[3] = 0
    key[5] *= 1e-30
    value[0, 1], value[1, 0] = float("nan"), -float("inf")
    _, keys, values = prompt.attended(0, (rows,), None)
    for part, kind, stored, size in ((key, form.keys, keys, prompt.size), (value, form.values, values, 0)):
        wanted = encode(kind, rotate(part[:rows].view(rows, kv_heads, dim).transpose(0, 1), size))
        assert torch.equal(stored[:, :rows].view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.e2e
@pairwise(path=running([*paths.PATHS]), form=FORMATS, shape=SHAPES)
def test_bits_depend_neither_on_the_split_nor_on_the_instructions(path, form, shape):
    """A prompt in several calls, parts of one token among them, by every path."""
    prompt = Prompt(*shape, form)
    with forced(paths.available()[0]):
        whole = prompt.attended(3, (190,), 90)
    with forced(path):
        for cuts in ((190,), (64, 65, 66, 190), (67, *range(120, 150), 190)):
            assert all(map(torch.equal, prompt.attended(3, cuts, 90), whole)), cuts


@pytest.mark.parametrize("rows", [1, 2])
def test_rows_of_another_format_are_refused(rows):
    """A KV in bf16, or of other heads, is not read as codes."""
    prompt = Prompt(4, 2, 16, KVFormat("q8_0", "q8_0"))
    rotation = prompt.rotation[0][:rows], prompt.rotation[1][:rows]
    for form, keys in ((KVFormat(), prompt.keys), (prompt.form, prompt.keys[:1])):
        with pytest.raises(ValueError, match="expected keys and values of 2 heads of 16"):
            prompt.attention(prompt.qkv[:rows].clone(), rotation, LayerKV(keys, prompt.values, 0, form), None)
