"""Calls of the compiled kernel's decode driver, on a model of two small layers, as kernel_calls has of all else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from aarch64 import POOL, Call, Structures
from kernel_calls import (
    DELTA_READS,
    DELTA_WRITES,
    SHAPES,
    Model,
    bf16,
    delta_net,
    delta_state,
    integers,
    scales,
)

from edgemoe.kernels.native import structures as c

EXPERTS, TOP_K, DIM, CONTEXT, LAYERS = 6, 2, 16, 24, 2
HEADS, KV_HEADS = 6, 2


HIDDEN, NORMED, QKV, ATTENDED, BLOCK, GATE_UP, INNER, GATE, PROJECTED, CORE = range(10)
"""Buffers."""

SHARED = 32
"""Inner size of the shared experts."""


def _linear(rows: int, cols: int, bias: bool) -> Structures:
    """A linear layer with an int8 weight."""
    weight = integers(-127, 128, rows, cols, dtype=np.int8)
    of_weight = {"weight": weight, "row_scale": scales(rows), "rows": rows, "cols": cols, "bits": 8}
    fields: dict[str, Any] = {f"weight.{name}": value for name, value in of_weight.items()}
    return Structures(c.Linear, fields | ({"bias": bf16(rows)} if bias else {}))


def _operations(size: int) -> Structures:
    """Attention, a gated delta net, experts, shared experts that a gate scales, and operations of single numbers."""
    projected, attended = (HEADS + 2 * KV_HEADS) * DIM, HEADS * DIM
    shape = {"heads": HEADS, "kv_heads": KV_HEADS, "dim": DIM, "rotated": DIM // 2, "value_dim": DIM}
    shape["scaling"] = DIM**-0.5
    table = bf16(1 << 16, outliers=False)
    listed: list[tuple[int, int, int, int, int, Any]] = [
        (0, HIDDEN, NORMED, size, size, bf16(size)),
        (1, NORMED, QKV, size, projected, _linear(projected, size, True)),
        (2, QKV, ATTENDED, projected, attended, Structures(c.AttentionShape, shape)),
        (1, ATTENDED, BLOCK, attended, size, _linear(size, attended, False)),
        (5, BLOCK, HIDDEN, size, size, None),
        (1, NORMED, PROJECTED, size, DELTA_READS, _linear(DELTA_READS, size, False)),
        (8, PROJECTED, CORE, DELTA_READS, DELTA_WRITES, delta_net(1)),
        (1, CORE, BLOCK, DELTA_WRITES, size, _linear(size, DELTA_WRITES, False)),
        (5, BLOCK, HIDDEN, size, size, None),
        (0, HIDDEN, NORMED, size, size, bf16(size)),
        (6, NORMED, BLOCK, size, size, None),
        (5, BLOCK, HIDDEN, size, size, None),
        (1, NORMED, GATE_UP, size, 2 * SHARED, _linear(2 * SHARED, size, False)),
        (3, GATE_UP, INNER, 2 * SHARED, SHARED, table),
        (1, INNER, BLOCK, SHARED, size, _linear(size, SHARED, False)),
        (1, NORMED, GATE, size, 1, _linear(1, size, False)),
        (4, GATE, BLOCK, 1, size, table),
        (5, BLOCK, HIDDEN, size, size, None),
        (15, HIDDEN, HIDDEN, size, size, None),
        (11, NORMED, BLOCK, size, size, table),
        (16, GATE, BLOCK, 1, size, None),
        (4, NORMED, BLOCK, size, size, np.linspace(-2, 2, 1 << 16, dtype=np.float32)),
        (15, BLOCK, BLOCK, size, size, None),
        (5, BLOCK, HIDDEN, size, size, None),
    ]
    more = {0: {"number": 1e-6}, 6: {"routed": NORMED}, 15: {"number": 0.9}}
    by_row = {"wide": 1, "rotation": 1}
    wide = {len(listed) - 3: {"wide": 1}, len(listed) - 2: by_row}
    """Scale by a table of float32, and Multiply with factors of the rows."""
    names = ("kind", "input", "output", "input_cols", "output_cols", "parameters")
    fields = [
        {name: value for name, value in zip(names, each, strict=True) if value is not None}
        | more.get(each[0], {})
        | wide.get(i, {})
        for i, each in enumerate(listed)
    ]
    return Structures(c.Operation, *fields)


def _layer(model: Model, rows: int, index: int, size: int) -> dict[str, Any]:
    """Fields of a layer whose experts are all resident, every second one at level 4, the others at level 8.

    The first layer's router has a bias and groups, the second one's is a softmax.
    """
    router = {
        "weight": bf16(EXPERTS, size, scale=0.1),
        "count": EXPERTS,
        "cols": size,
        "k": TOP_K,
        "normalise": 1,
    }
    if not index:
        groups = {"groups": 3, "best_groups": 2, "group_best": 2}
        bias = np.linspace(0, 0.1, EXPERTS, dtype=np.float32)
        router |= {"precise": 1, "sigmoid": 1, "bias": bias, "scale": 2.5, "least": 1e-20} | groups
    levels = c.LevelRule(rule=1, count=2, critical=1)
    rule = Structures(c.LevelRule, {name: getattr(levels, name) for name in ("rule", "count", "critical")})
    rule.memory[0].level[0], rule.memory[0].level[1] = 4, 2
    resident = [{**model.planes[i % 2], "level": 8 if i % 2 else 4} for i in range(EXPERTS)]
    pairs = {
        name: np.zeros((rows, TOP_K), np.int64) for name in ("chosen", "wanted", "computed", "predicted")
    }
    operations = _operations(size)
    return {
        "operations": operations,
        "count": len(operations.memory),
        "following": LAYERS - 1 - index,
        "experts": EXPERTS,
        "slots": TOP_K,
        "router": Structures(c.Router, router),
        "logits": np.zeros((rows, EXPERTS), np.float32),
        "scores": np.zeros(3 * EXPERTS, np.float32),
        "gates": np.zeros((rows, TOP_K), np.float32),
        "levels": rule,
        "resident": Structures(c.Expert, *resident),
        "remapped": np.zeros(2, np.int64),
        "chosen_by": np.zeros(EXPERTS),
        "chosen_mass": np.zeros(EXPERTS),
        **pairs,
    }


def _copies() -> dict[str, np.ndarray]:
    """Both copies of a sequence's state in a layer."""
    return {
        f"{name}#{copy}": each
        for copy in range(2)
        for name, each in zip(("conv", "state"), delta_state(), strict=True)
    }


def _workspace(model: Model, size: int, rows: int, exact: int) -> Structures:
    pairs, widths = (
        rows * TOP_K,
        [size, size, (HEADS + 2 * KV_HEADS) * DIM, HEADS * DIM, size, 2 * SHARED, SHARED, 1],
    )
    memory = [
        bf16(rows, size),
        *(np.zeros((rows, width), np.uint16) for width in (*widths[1:], DELTA_READS, DELTA_WRITES)),
    ]
    up, down = model.matrices
    return Structures(
        c.ExpertWorkspace,
        {
            "buffers": Structures(c.Buffer, *({"at": each, "size": each.size} for each in memory)),
            "buffer_count": len(memory),
            "up": up,
            "down": down,
            "inner": model.specs[1].cols,
            "most_rows": rows,
            "slots": TOP_K,
            "experts": EXPERTS,
            "together": Structures(c.Expert, *({} for _ in range(pairs))),
            "gathered": np.zeros((pairs, size), np.uint16),
            "rows": np.zeros((pairs, size), np.uint16),
            "gates": np.zeros(pairs, np.float32),
            "row_of": np.zeros(pairs, np.int64),
            "after": np.zeros(pairs, np.int64),
            "first": np.zeros(EXPERTS, np.int64),
            "exact": exact,
            "renormalise": 1,
        },
    )


def layer_calls() -> Iterator[Call]:
    """One token and three through both layers, at the rule's levels and at the planes' levels."""
    model, size = Model(*SHAPES[0]), SHAPES[0][1]
    for rows, exact in ((1, 1), (3, 0)):
        layers = [_layer(model, rows, i, size) for i in range(LAYERS)]
        cache = (KV_HEADS, CONTEXT, DIM)
        sequences = [
            {
                "past": 5 + 4 * row,
                "valid": row % 2,
                "kv": Structures(
                    c.AttentionKV,
                    *(
                        {"keys": bf16(*cache), "values": bf16(*cache), "context": CONTEXT}
                        for _ in range(LAYERS)
                    ),
                ),
                "states": Structures(c.DeltaCopies, *(_copies() for _ in range(LAYERS))),
            }
            for row in range(rows)
        ]
        tables = {
            "cosine": bf16(rows, DIM // 2, outliers=False),
            "sine": bf16(rows, DIM // 2, outliers=False),
        }
        yield Call(
            "decode_layers",
            (
                *(POOL, Structures(c.DecoderLayer, *layers), np.zeros(2, np.int64), LAYERS),
                *(Structures(c.SequenceKV, *sequences), rows, _workspace(model, size, rows, exact), 4),
                Structures(
                    c.Rotation,
                    tables | {"cols": DIM // 2},
                    {"cosine": bf16(rows, 1, outliers=False), "cols": 1},
                ),
            ),
        )
