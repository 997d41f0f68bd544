"""The memory that one step allocates beside weights and KV: upper estimates, from which a plan reserves it."""

from __future__ import annotations

import torch

from edgemoe.kernels.base import BATCH_ROWS
from edgemoe.kernels.registry import compute
from edgemoe.kv.formats import TILE, TILE_QUERIES
from edgemoe.layers.dense import SLICE_BYTES
from edgemoe.memory.model_shape import ModelShape
from edgemoe.policy.importance import KEY_BLOCK, QUERY_BLOCK
from storage.record import RecordGeometry

PREFILL_ROWS = 512
"""Most token rows in one step of a prefill. Fixed, so that an answer does not depend on limits."""

LOGIT_BYTES, SAMPLING_BYTES = 2 + 4, 10
"""A logit in bf16 and in float32, of every sequence of a step; and what sampling one sequence takes for each."""

SUMS = 8
"""Numbers of 4 bytes for each token of the context while one layer's sums of attention are ranked."""

CHUNK = 64
"""A delta rule pads the tokens of a step to a multiple of this."""


def workspace_bytes(
    shape: ModelShape, geometry: RecordGeometry, context: int, place: torch.device, parallel: int = 1
) -> int:
    """Upper estimate of the bytes that one step allocates, without weights and KV.

    Hidden states, which live through a whole layer, and the largest of the layer's three parts: attention, a dense
    product, its experts. Activations are bf16 with float32 copies. Each sequence has a row of logits; sampling one of
    them takes some more.
    """
    rows = max(min(context, PREFILL_ROWS), parallel)
    attention, product = _attention_bytes(shape, rows, context), _product_bytes(shape, rows)
    largest = max(attention, product, _experts_bytes(shape, geometry, rows, place))
    logits = shape.vocab * (LOGIT_BYTES * parallel + SAMPLING_BYTES)
    # What fused decode keeps for the rows of several sequences: each expert's rows and their results.
    kept = parallel * shape.top_k * shape.hidden * 2 * 2 if parallel > 1 else 0
    return _hidden_bytes(shape, rows) + largest + logits + kept


def scored_rows(shape: ModelShape, workspace: int, context: int, parallel: int) -> int:
    """Rows whose logits fit the bytes of a workspace once the layers are done, beside hidden states and the head."""
    rows = max(min(context, PREFILL_ROWS), parallel)
    left = workspace - _hidden_bytes(shape, rows) - SLICE_BYTES - shape.vocab * SAMPLING_BYTES
    of_slice = SLICE_BYTES // (4 * shape.hidden)
    return max(min(left // ((shape.vocab + of_slice) * LOGIT_BYTES), PREFILL_ROWS), 1)


def _hidden_bytes(shape: ModelShape, rows: int) -> int:
    return rows * shape.hidden * (2 + 2 + 4 + 4)


def _attention_bytes(shape: ModelShape, rows: int, context: int) -> int:
    kv = shape.kv
    width = kv.heads * kv.key_dim
    attention = rows * shape.heads * kv.key_dim * (2 + 4) * 3
    # Tiles of quantized keys and values, or of the keys that scores of attention are counted of.
    tile = _tile_bytes(shape, rows)
    plain = 0 if kv.format.quantized else 2 * width * context * (2 + 4) + rows * context * (1 + 4)
    # Each layer's sums of attention, before and after a step; and what ranks those of one.
    scored = tile + context * 4 * (2 * len(kv.layers) + SUMS)
    attention += max(plain, scored) + (SLICE_BYTES if kv.latent else 0)
    if kv.linear:
        # A chunked delta rule allocates about sixteen float32 arrays of the step's keys and values.
        state = kv.linear.heads * max(kv.linear.key_dim, kv.linear.value_dim)
        attention = max(attention, 16 * 4 * (rows + CHUNK) * state)
    return attention


def _tile_bytes(shape: ModelShape, rows: int) -> int:
    """A tile of quantized keys and values, its scores, and sums before and behind it, all float32."""
    kv = shape.kv
    value_dim = kv.latent or kv.value_dim
    tile = (
        max(TILE, KEY_BLOCK) * kv.heads * (kv.key_dim + value_dim) * 4
    )  # codes, scales, their product and a copy of it
    scores, sums = (
        min(rows, max(TILE_QUERIES, QUERY_BLOCK)) * max(TILE, KEY_BLOCK) * 3,
        rows * (2 * kv.key_dim + 3 * value_dim),
    )
    return 4 * (tile + shape.heads * (scores + sums))


def _product_bytes(shape: ModelShape, rows: int) -> int:
    """A dense product, its weight converted a slice of SLICE_BYTES at a time."""
    widest = max(shape.heads * shape.kv.key_dim, shape.hidden, shape.widest)
    converted = min(SLICE_BYTES, 4 * shape.hidden * max(widest, shape.vocab))
    return converted + rows * (widest + converted // (4 * shape.hidden)) * (4 + 2)


def _experts_bytes(shape: ModelShape, geometry: RecordGeometry, rows: int, place: torch.device) -> int:
    """A layer's experts; the kernel computes in one call all of them, on a CPU one or several of BATCH_ROWS in all."""
    assigned = called = rows * shape.top_k
    if place.type == "cpu":
        called = max(rows, min(BATCH_ROWS, called))
    one_call = called * (shape.hidden * (2 + 4 + 4) + 3 * shape.intermediate * (2 + 4))
    scratch = compute(place).kernel.scratch_bytes(geometry)
    return assigned * shape.hidden * 2 + rows * shape.hidden * 4 * 3 + one_call + scratch
