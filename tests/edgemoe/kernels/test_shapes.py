"""The compiled kernel compares the sizes in its structures with the buffers' before it computes."""

from __future__ import annotations

import ctypes

import pytest
import torch
from availability import needs_native
from plane_experts import an_expert

from edgemoe.engine.engine import Engine
from edgemoe.kernels.activation import CUSTOM, Activation
from edgemoe.kernels.base import Part, Rows
from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.attention import NativeAttention
from edgemoe.kernels.native.attention_rows import LayerKV
from edgemoe.kernels.native.experts import NativeExpertKernel
from edgemoe.kernels.native.router import NativeRouter, RouterForm
from edgemoe.kernels.native.structures import Expert, Linear, Matrix
from edgemoe.kv.step import Segment, Step

pytestmark = needs_native

HIDDEN, SENTINEL = 64, 7.0


def _gate(both: torch.Tensor) -> torch.Tensor:
    raise AssertionError("the kernel computes silu itself")


@pytest.fixture
def expert():
    """(kernel, blocks at level 4) of an expert of hidden size 64 and inner size 24."""
    geometry, _, blocks = an_expert("small", native.LAYOUT.name)
    return NativeExpertKernel(geometry, native.LAYOUT), blocks[4]


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(
    ("matrix", "sizes"),
    [
        (0, {"cols": 8192}),
        (0, {"rows": 32}),
        (0, {"group": 48}),
        (1, {"rows": 4096}),
        (1, {"rows": 72}),
        (1, {"cols": 16, "group": 16}),
        (1, {"group": 0}),
    ],
    ids=str,
)
def test_experts_of_another_geometry_are_refused(expert, tokens, matrix, sizes):
    """A matrix that fits neither x, the result nor the other matrix is a ValueError, and nothing is written."""
    kernel, blocks = expert
    for name, size in {"parameter_bytes": 1 << 40, "half": 1 << 40, **sizes}.items():
        setattr(kernel._matrices[matrix][1], name, size)
    x = torch.randn(tokens, HIDDEN).bfloat16()
    out = torch.full((tokens, HIDDEN), SENTINEL, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="sizes"):
        call(kernel, x, [Part(blocks, 4, 4, tokens)], out)
    assert (out == SENTINEL).all()


def call(kernel: NativeExpertKernel, x: torch.Tensor, parts: list[Part], out: torch.Tensor) -> None:
    """edgemoe_experts with rows as they are, whatever the kernel's geometry says about padding."""
    experts = (Expert * len(parts))(*(kernel.prepared(p.blocks, p.level, p.rows) for p in parts))
    (_, up), (spec, down) = kernel._matrices
    result = native.library().edgemoe_experts(
        *(native.threads(), ctypes.byref(up), ctypes.byref(down), spec.cols),
        *(experts, len(parts), x.data_ptr(), *x.shape, None, None, None, out.data_ptr(), *out.shape),
    )
    if result:
        raise native.failure(result, "experts")


def test_the_same_call_with_fitting_sizes_succeeds(expert):
    """The calls above fail for their sizes alone."""
    kernel, blocks = expert
    x = torch.randn(3, HIDDEN).bfloat16()
    want, padded = torch.empty(3, HIDDEN, dtype=torch.bfloat16), torch.empty(3, HIDDEN, dtype=torch.bfloat16)
    kernel.forward(Rows(x), [Part(blocks, 4, 4, 3)], Activation("silu", _gate), want)
    call(kernel, x, [Part(blocks, 4, 4, 3)], padded)
    assert torch.equal(want, padded)


@pytest.mark.parametrize("row", [-1, 3])
def test_a_row_outside_the_input_is_refused(expert, row):
    """A call takes rows of its layer's input by index."""
    kernel, blocks = expert
    x, out = torch.randn(3, HIDDEN).bfloat16(), torch.empty(2, HIDDEN, dtype=torch.bfloat16)
    rows, parts = Rows(x, torch.tensor([0, row])), [Part(blocks, 4, 4, 2)]
    for name in ("silu", CUSTOM):
        with pytest.raises(ValueError, match="sizes"):
            kernel.forward(rows, parts, Activation(name, _gate), out)


@pytest.mark.parametrize(
    "change",
    [
        {"level": 8},
        {"level": 3},
        {"level": 0},
        {"base": None},
        {"parameters": None},
        {"y": 1},
        {"x": -1},
        {"tokens": 3},
    ],
    ids=str,
)
def test_an_expert_without_its_planes_or_rows_is_refused(expert, change):
    """A missing plane, an unknown level, and rows beyond x or the result are refused."""
    kernel, blocks = expert
    prepared = kernel.prepared(blocks, 4, 2)
    for name, value in change.items():
        setattr(prepared, name, value)
    x, out = torch.zeros(2, HIDDEN).bfloat16(), torch.zeros(2, HIDDEN).bfloat16()
    (_, up), (spec, down) = kernel._matrices
    result = native.library().edgemoe_experts(
        *(native.threads(), ctypes.byref(up), ctypes.byref(down), spec.cols),
        *(ctypes.byref(prepared), 1, x.data_ptr(), *x.shape, None, None, None, out.data_ptr(), *out.shape),
    )
    assert result == -2


def test_a_single_product_of_another_width_is_refused(expert):
    """edgemoe_expert_product compares columns, rows of the result, and the place of the matrix in the planes."""
    kernel, blocks = expert
    prepared, (_, up) = kernel.prepared(blocks, 4, 1), kernel._matrices[0]
    x, y = torch.zeros(1, up.cols).bfloat16(), torch.zeros(1, up.rows).bfloat16()

    def product(matrix: Matrix, x_cols: int, y_cols: int) -> int:
        return native.library().edgemoe_expert_product(
            *(native.threads(), ctypes.byref(matrix), 0, ctypes.byref(prepared), 1),
            *(x.data_ptr(), 1, x_cols, None, None, y.data_ptr(), 1, y_cols),
        )

    assert product(up, up.cols, up.rows) == 0
    assert product(up, up.cols - 1, up.rows) == product(up, up.cols, up.rows - 1) == -2
    for field in ("parameters_at", "codes_at"):
        moved = Matrix.from_buffer_copy(up)
        setattr(moved, field, 1 << 40)
        assert product(moved, up.cols, up.rows) == -2


def test_dense_products_norms_and_routers_of_another_width_are_refused():
    """Rows of another width than the weight's, and too few scales, are ValueErrors."""
    weight = torch.randn(32, HIDDEN).bfloat16()
    x = torch.randn(2, HIDDEN + 16).bfloat16()
    for given, scale in ((weight, None), (weight.to(torch.int8), torch.ones(32).bfloat16())):
        with pytest.raises(ValueError, match="sizes"):
            native.dense_product(x, given, scale)
    with pytest.raises(ValueError, match="32 scales"):
        native.dense_product(x[:, :HIDDEN].contiguous(), weight.to(torch.int8), torch.ones(31).bfloat16())
    with pytest.raises(ValueError, match="rows of 64"):
        native.rms_norm(x, torch.ones(HIDDEN).bfloat16(), 1e-6)
    with pytest.raises(ValueError, match="sizes"):
        NativeRouter(weight, 2, RouterForm(normalise=True, rounded=True))(x)
    with pytest.raises(ValueError, match="sizes"):
        NativeRouter(weight, 33, RouterForm(normalise=True, rounded=True))(x[:, :HIDDEN].contiguous())


@pytest.mark.parametrize("rows", [1, 3])
def test_attention_beyond_the_context_or_of_other_heads_is_refused(rows):
    """Rows after the last place of the KV, and a KV or rows of other heads, are ValueErrors."""
    attention = NativeAttention(4, 2, 16, None, 0.25)
    qkv, rotation = torch.zeros(rows, 8 * 16).bfloat16(), (torch.ones(rows, 16).bfloat16(),) * 2
    keys = torch.zeros(2, 8, 16).bfloat16()
    attention(qkv, rotation, LayerKV(keys, keys.clone(), 8 - rows), None)
    with pytest.raises(ValueError, match="sizes"):
        attention(qkv, rotation, LayerKV(keys, keys.clone(), 9 - rows), None)
    with pytest.raises(ValueError, match="sizes"):
        attention(qkv, rotation, LayerKV(keys, keys.clone(), -1), None)
    with pytest.raises(ValueError, match="expected keys and values of 2 heads of 16"):
        attention(qkv, rotation, LayerKV(keys[:1], keys[:1].clone(), 0), None)
    with pytest.raises(ValueError, match="expected rows of 4 heads"):
        attention(qkv[:, :-16].contiguous(), rotation, LayerKV(keys, keys.clone(), 0), None)


@pytest.fixture
def fused(open_engine, tiny_store) -> tuple[Engine, object]:
    """An engine with a sequence of three tokens, whose next token goes through the fused layers."""
    engine = open_engine(tiny_store)
    sequence = engine.sequences.new()
    engine.prefill(sequence, [5, 6, 7])
    return engine, sequence


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("structure", "field", "value"),
    [
        ("router", "cols", 128),
        ("router", "count", 9),
        ("qkv", "cols", 128),
        ("qkv", "rows", 64),
        ("qkv", "bits", 7),
        ("qkv", "bits", 8),
        ("out", "rows", 128),
        ("out", "cols", 32),
        ("buffer", "size", 8),
        ("norm", "input_cols", 32),
        ("layer", "slots", 1),
        ("layer", "experts", 4),
    ],
)
def test_layers_of_other_sizes_are_refused(fused, structure, field, value):
    """A decoder layer whose part has another size than its neighbours fails the step; the sequence stays as it was."""
    engine, sequence = fused
    decode = engine.runner.fused._native
    operations, kept = decode._lists[2]
    qkv, out = (each for each in kept if isinstance(each, Linear))
    changed = {
        "router": decode.programs[2].router._router,
        "qkv": qkv.weight,
        "out": out.weight,
        "buffer": decode.buffers.structures[-1],
        "norm": operations[0],
        "layer": decode._structures[2],
    }
    setattr(changed[structure], field, value)
    with pytest.raises(ValueError, match="sizes"):
        engine.step(Step((Segment(sequence, (8,)),)))
    assert sequence.length == 3


def test_the_head_and_the_embedding_compare_their_sizes(fused):
    """A token beyond the table, and logits of another number than the head's rows, are refused."""
    decode = fused[0].runner.fused._native
    hidden = decode.embed((5,))
    assert native.library().edgemoe_embed(ctypes.byref(decode._outer), 300, hidden.data_ptr(), 64) == -2
    assert native.library().edgemoe_embed(ctypes.byref(decode._outer), 5, hidden.data_ptr(), 65) == -2
    decode._outer.head.weight.rows += 1
    with pytest.raises(ValueError, match="sizes"):
        decode.head(hidden)
