"""The memory that one step allocates in addition to weights and KV: upper estimates, from which a plan reserves it."""

from __future__ import annotations

from edgemoe.kernels.base import BATCH_ROWS, DEVICE_BATCH_ROWS, MOST_ROWS, quantized_row_bytes
from edgemoe.kernels.registry import compute
from edgemoe.kernels.scratch import attention_bytes
from edgemoe.kv.blocks import BLOCK_ROWS
from edgemoe.kv.formats import TILE, TILE_QUERIES
from edgemoe.kv.shape import INDEX_SCORES, KVShape
from edgemoe.layers.dense import SLICE_BYTES
from edgemoe.memory.limits import Limits, decode_rows
from edgemoe.memory.model_shape import ModelShape, PlannedModel
from edgemoe.policy.importance import KEY_BLOCK, QUERY_BLOCK

PREFILL_FRACTION = 0.05
"""Default size of the rows of a prompt's step beyond BLOCK_ROWS, as a fraction of all experts' bytes. A limit
decides nothing here, so that an answer does not depend on it."""

DEVICE_ROWS, DEVICE_FRACTION = 4096, 0.02
"""On a device: most rows of a step of prompts, and the size of rows beyond BLOCK_ROWS as a fraction of all experts'
bytes. They are reserved as long as the engine is open."""

LOGIT_BYTES, SAMPLING_BYTES = 2 + 4, 10
"""Bytes of a logit in bf16 and in float32, for every sequence; and bytes per logit of sampling one sequence."""

SUMS = 8
"""Numbers of 4 bytes for each token of the context while one layer's sums of attention are ranked."""

TEXT_BYTES = 256
"""Bytes of a token of the context in Python: ids in lists, its text, offsets (docs/decisions/0042)."""

INDEX_HEADS = 64
"""Heads of an index in published models: one row has a score of each for each token."""

RECURRENT_BYTES = 28
"""Bytes per row and channel of the convolution, where the compiled kernel computes a recurrence; 20 to 26 measured."""

CHUNK = 64
"""Otherwise a delta rule pads the tokens of a step to a multiple of this."""


def default_prefill_rows(model: PlannedModel, rows: int, experts_bytes: int) -> int:
    """Rows of a step of prompts: as many as there may be, in whole blocks, where that costs little memory.

    Args:
        model: the model.
        rows: most rows that are worth running together (Limits.prompt_rows).
        experts_bytes: bytes of all experts at the highest level of the settings.
    """
    fraction, a_row = PREFILL_FRACTION, _bytes_a_row(model.shape)
    if model.device:
        rows, fraction, a_row = min(rows, DEVICE_ROWS), DEVICE_FRACTION, _device_bytes_a_row(model.shape)
    affordable = BLOCK_ROWS + int(fraction * experts_bytes / a_row)
    return max(min(-(-rows // BLOCK_ROWS), affordable // BLOCK_ROWS), 1) * BLOCK_ROWS


def workspace_bytes(model: PlannedModel, limits: Limits, drafts: int = 0) -> int:
    """Upper estimate of the bytes that a step of one block of rows allocates, without weights and KV.

    The estimate counts tensors that live through a whole layer, and the largest of its parts: attention, a dense
    product, experts, the head.
    Activations are bf16 with float32 copies. Each sequence has a row of logits; sampling one of them takes some more.
    The rows of a longer step take long_step_bytes as well.

    Args:
        model: the model that is planned.
        limits: the limits of the plan.
        drafts: most guesses of a sequence in a step, which have logits too.
    """
    shape, parallel = model.shape, decode_rows(limits.parallel, drafts)
    stays = _hidden_bytes(shape, limits.step_rows) + _scratch_bytes(model, limits.context)
    logits = shape.vocab * (LOGIT_BYTES * parallel + SAMPLING_BYTES)
    # What fused decode keeps for the rows of several sequences: each expert's rows and their results.
    kept = parallel * shape.top_k * shape.hidden * 2 * 2 if parallel > 1 else 0
    of_context = limits.context * (TEXT_BYTES + _sums_bytes(shape))
    return stays + _largest_part(model, limits) + logits + kept + of_context


def long_step_bytes(shape: ModelShape, rows: int) -> int:
    """Upper estimate, in bytes, of a prompt's rows beyond one block in a step, through a whole layer."""
    return max(rows - BLOCK_ROWS, 0) * _bytes_a_row(shape)


def device_step_bytes(shape: ModelShape, rows: int) -> int:
    """Upper estimate, in bytes, of a prompt's rows beyond one block in a device's memory."""
    return max(rows - BLOCK_ROWS, 0) * _device_bytes_a_row(shape)


def scored_rows(model: PlannedModel, limits: Limits, long_step: int) -> int:
    """Rows whose logits fit the workspace once the layers are done: into the bytes of a layer's largest part.

    Args:
        model: the model that is planned.
        limits: the limits of the plan.
        long_step: bytes of the rows beyond one block.
    """
    shape = model.shape
    left = _largest_part(model, limits) + shape.vocab * LOGIT_BYTES * limits.parallel + long_step
    converted = _converted_bytes(shape, shape.vocab)
    of_slice = converted // (4 * shape.hidden)
    return max(min((left - converted) // ((shape.vocab + of_slice) * LOGIT_BYTES), BLOCK_ROWS), 1)


def _largest_part(model: PlannedModel, limits: Limits) -> int:
    """Bytes of a step's largest part: attention, experts, the head, a product of a layer with its projections."""
    shape, rows = model.shape, limits.step_rows
    widest = max(*(shape.heads * part.key_dim for part in shape.kv.parts), shape.hidden, shape.widest)
    # Queries, keys and values.
    joined = max(widest, *((shape.heads + 2 * part.heads) * part.key_dim for part in shape.kv.parts))
    product = _product_bytes(shape, rows, joined, joined) + _projected_bytes(shape, rows)
    head = _product_bytes(shape, rows, widest, shape.vocab)
    attention, experts = _attention_bytes(shape, rows, limits.context), _experts_bytes(model, rows)
    return max(attention, product, head, experts)


def _sums_bytes(shape: ModelShape) -> int:
    """Bytes per token of attention sums, before and after a step, plus one layer's ranking buffers."""
    return 4 * (2 * sum(len(part.layers) for part in shape.kv.parts) + SUMS)


def _scratch_bytes(model: PlannedModel, context: int) -> int:
    """Bytes of the memory that the kernel of experts and compiled attention keep, in addition to tensors."""
    shape = model.shape
    largest = max(part.key_dim for part in shape.kv.parts)
    attention = attention_bytes(largest, context) if shape.compiled_attention else 0
    return max(attention, compute(model.place).kernel.scratch_bytes(model.geometry))


def _bytes_a_row(shape: ModelShape) -> int:
    """Bytes of each row of a long step in a whole layer.

    Hidden states before the layer, after attention, their norm and one more, bf16; the norm quantized for experts, and
    their float32 sums; an index's choice; the router's logits and choice, and where each expert's rows lie.
    """
    states = shape.hidden * (4 * 2 + 4) + quantized_row_bytes(shape.hidden) + 4 * shape.index_topk
    return states + shape.experts_per_layer * (2 + 4 + 4) + shape.top_k * 8 * 8


def _device_bytes_a_row(shape: ModelShape) -> int:
    """Bytes of each row of a long step on a device.

    The results of all its experts, bf16, are summed at the end of a layer. The sums, float32, and the results that are
    added to them, bf16 and float32, exist next to them.
    """
    return _bytes_a_row(shape) + shape.hidden * (2 * shape.top_k + 4 + 2 + 4)


def _hidden_bytes(shape: ModelShape, rows: int) -> int:
    return rows * shape.hidden * (2 + 2 + 4 + 4)


def _projected_bytes(shape: ModelShape, rows: int) -> int:
    """Queries, keys, values and the result of attention, bf16."""
    return rows * 2 * max((shape.heads + part.heads) * part.key_dim for part in shape.kv.parts) * 2


def _attention_bytes(shape: ModelShape, rows: int, context: int) -> int:
    attention, linear = (
        max(_layer_bytes(shape, part, rows, context) for part in shape.kv.parts),
        shape.kv.linear,
    )
    attention += _index_bytes(shape, rows, context)
    if linear and shape.compiled_states:
        attention = max(attention, RECURRENT_BYTES * rows * linear.channels)
    elif linear:
        # Chunks of a delta rule or of a state space take about sixteen float32 arrays of the step's keys and values.
        state = linear.heads * max(linear.key_dim, linear.value_dim)
        attention = max(attention, 16 * 4 * (rows + CHUNK) * state)
    return attention


def _index_bytes(shape: ModelShape, rows: int, context: int) -> int:
    """Bytes of an index: scores four times, keys twice in float32, its choice as two integers, and one row's inputs."""
    if not shape.kv.index:
        return 0
    keys = context * shape.kv.index.key_dim * 4 * 2
    chosen = shape.index_topk * (shape.kv.heads * shape.kv.key_dim * 4 + rows * (4 + 8))
    return max(INDEX_SCORES, INDEX_HEADS * context) * 4 * 4 + keys + chosen


def _layer_bytes(shape: ModelShape, kv: KVShape, rows: int, context: int) -> int:
    """Attention of a layer whose keys and values have the shape `kv`."""
    if shape.compiled_attention:
        attention = shape.attention_copies * _projected_bytes(shape, rows)
    else:
        attention = rows * shape.heads * kv.key_dim * (2 + 4) * 3
        # Tiles of quantized keys and values, or of the keys that scores of attention are counted of.
        tile = _tile_bytes(shape, kv, rows, context)
        widened = 2 * kv.heads * kv.key_dim * context * (2 + 4)
        plain = 0 if kv.format.quantized else widened + rows * context * (1 + 4)
        attention += max(plain, tile)
    return attention + (SLICE_BYTES if kv.latent else 0)


def _tile_bytes(shape: ModelShape, kv: KVShape, rows: int, context: int) -> int:
    """Bytes of a tile of quantized keys and values, its scores, and sums before and after it, all float32."""
    value_dim = kv.latent or kv.value_dim
    tokens, queries = min(max(TILE, KEY_BLOCK), context), min(max(TILE_QUERIES, QUERY_BLOCK), rows)
    tile = tokens * kv.heads * (kv.key_dim + value_dim) * 4  # codes, scales, their product and a copy of it
    scores, sums = queries * tokens * 3, rows * (2 * kv.key_dim + 3 * value_dim)
    return 4 * (tile + shape.heads * (scores + sums))


def _product_bytes(shape: ModelShape, rows: int, widest: int, outputs: int) -> int:
    """A product of rows with a dense matrix, which is converted to float32 a slice of SLICE_BYTES at a time.

    Args:
        shape: the shape of the model.
        rows: number of rows of the input.
        widest: numbers of the longest row, of the input or of a slice's result.
        outputs: number of the matrix's rows, one for each output.
    """
    converted = _converted_bytes(shape, outputs)
    return converted + rows * (widest + converted // (4 * shape.hidden)) * (4 + 2)


def _converted_bytes(shape: ModelShape, outputs: int) -> int:
    """Bytes of the part of a dense matrix with so many rows that is float32 at a time."""
    return min(SLICE_BYTES, 4 * shape.hidden * outputs)


def _experts_bytes(model: PlannedModel, rows: int) -> int:
    """A layer's experts; the kernel computes several in one call, of BATCH_ROWS or DEVICE_BATCH_ROWS in all."""
    shape, quantized = model.shape, 0
    assigned = called = rows * shape.top_k
    if model.device:
        called = min(DEVICE_BATCH_ROWS, called)
    else:
        called = max(min(rows, MOST_ROWS), min(BATCH_ROWS, called))
        quantized = rows * quantized_row_bytes(shape.hidden)
    one_call = called * (shape.hidden * (2 + 4 + 4) + 3 * shape.intermediate * (2 + 4))
    return assigned * shape.hidden * 2 + rows * shape.hidden * 4 * 3 + quantized + one_call
