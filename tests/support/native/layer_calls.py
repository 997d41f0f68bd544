"""Calls of the compiled kernel's decode driver, on a model of two small layers, as kernel_calls has of all else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from aarch64 import POOL, Call, Structures
from kernel_calls import SHAPES, Model, bf16, integers, scales

from edgemoe.kernels.native import structures as c

EXPERTS, TOP_K, DIM, CONTEXT, LAYERS = 6, 2, 16, 24, 2
HEADS, KV_HEADS = 6, 2


def _linear(rows: int, cols: int, bias: bool) -> dict[str, Any]:
    """Fields of `linear`, with an int8 weight."""
    weight = integers(-127, 128, rows, cols, dtype=np.int8)
    fields = {"weight": weight, "row_scale": scales(rows), "rows": rows, "cols": cols}
    return fields | ({"bias": bf16(rows)} if bias else {})


def _dense(size: int) -> Structures:
    """A layer up to its experts."""
    shape = {"heads": HEADS, "kv_heads": KV_HEADS, "dim": DIM, "scaling": DIM**-0.5}
    fields: dict[str, Any] = {"attention": Structures(c.AttentionShape, shape)}
    for norm in ("input", "post"):
        fields |= {f"{norm}_norm": bf16(size), f"{norm}_epsilon": 1e-6}
    linears = (
        ("qkv", _linear((HEADS + 2 * KV_HEADS) * DIM, size, True)),
        ("out", _linear(size, HEADS * DIM, False)),
    )
    fields |= {f"{name}.{field}": value for name, of in linears for field, value in of.items()}
    return Structures(c.DenseLayer, fields)


def _layer(model: Model, size: int, rows: int, following: int) -> dict[str, Any]:
    """Fields of a layer whose experts are all resident, every second one at level 4, the others at level 8."""
    router = {
        "weight": bf16(EXPERTS, size, scale=0.1),
        "count": EXPERTS,
        "cols": size,
        "k": TOP_K,
        "normalise": 1,
    }
    levels = c.LevelRule(rule=1, count=2, critical=1)
    rule = Structures(c.LevelRule, {name: getattr(levels, name) for name in ("rule", "count", "critical")})
    rule.memory[0].level[0], rule.memory[0].level[1] = 4, 2
    resident = [{**model.planes[i % 2], "level": 8 if i % 2 else 4} for i in range(EXPERTS)]
    numbers = rows * (2 * HEADS + 2 * KV_HEADS) * DIM
    pairs = {
        name: np.zeros((rows, TOP_K), np.int64) for name in ("chosen", "wanted", "computed", "predicted")
    }
    return {
        "dense": _dense(size),
        "following": following,
        "experts": EXPERTS,
        "slots": TOP_K,
        "scratch_size": numbers,
        "scratch": np.zeros(numbers, np.uint16),
        "normed": np.zeros((rows, size), np.uint16),
        "router": Structures(c.Router, router),
        "logits": np.zeros((rows, EXPERTS), np.uint16),
        "probabilities": np.zeros(EXPERTS, np.float32),
        "gates": np.zeros((rows, TOP_K), np.float32),
        "levels": rule,
        "resident": Structures(c.Expert, *resident),
        "remapped": np.zeros(2, np.int64),
        "chosen_by": np.zeros(EXPERTS),
        "chosen_mass": np.zeros(EXPERTS),
        **pairs,
    }


def _workspace(model: Model, size: int, rows: int, exact: int) -> Structures:
    pairs = rows * TOP_K
    up, down = model.matrices
    return Structures(
        c.ExpertWorkspace,
        {
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
    """One token and three through both layers, at the levels of the rule and at those of the planes."""
    model, size = Model(*SHAPES[0]), SHAPES[0][1]
    for rows, exact in ((1, 1), (3, 0)):
        layers = [_layer(model, size, rows, LAYERS - 1 - i) for i in range(LAYERS)]
        cache = (LAYERS, KV_HEADS, CONTEXT, DIM)
        sequences = [
            {"keys": bf16(*cache), "values": bf16(*cache), "context": CONTEXT, "past": 5 + 4 * row}
            for row in range(rows)
        ]
        kv = Structures(c.AttentionKV, *sequences)
        rotation = [bf16(rows, DIM, outliers=False) for _ in range(2)]
        arguments = (
            POOL,
            Structures(c.DecoderLayer, *layers),
            LAYERS,
            kv,
            rows,
            _workspace(model, size, rows, exact),
        )
        yield Call("decode_layers", (*arguments, 4, bf16(rows, size), size, *rotation, DIM))
