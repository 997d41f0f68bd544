"""The rows of a step through transformers' modules: words, and pictures in place of embeddings and after layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from edgemoe.experts.step import StepContext, current_step
from edgemoe.kv.pictures import FIRST_ID, StepRows
from edgemoe.layers.decoder_parts import outer_parts

_ADDS = "_deepstack_process"
"""Method of models whose first layers' results get further rows of pictures (Qwen3-VL)."""


def rows_of_step(model: Any, context: StepContext, place: torch.device) -> dict[str, Any]:
    """Returns the arguments of a model's `forward` that say its rows and their positions.

    Args:
        model: transformers' model.
        context: the step; gets its rows of pictures.
        place: the device of the model.
    """
    segments = context.step.segments
    ids = [token if token < FIRST_ID else 0 for each in segments for token in each.tokens]
    tokens = torch.tensor(ids, device=place)[None]
    positions = torch.tensor([number for each in segments for number in each.numbers], device=place)[None]
    if not context.step.pictured:
        return {"input_ids": tokens, "position_ids": positions}
    row, parts, three = 0, [], positions.expand(3, 1, -1).clone()
    several = False
    for segment in segments:
        end = row + len(segment.tokens)
        if segment.pictures:
            own = segment.pictures.positions_of(segment.numbers)
            if own is not None:
                several, three[:, 0, row:end] = True, own.to(three.device)
            parts.append((row, segment.numbers, segment.pictures))
        row = end
    context.picture_rows = rows = StepRows.of(parts, tokens.device)
    inputs = {"position_ids": three if several else positions}
    if rows is None:
        return inputs | {"input_ids": tokens}
    embedded = outer_parts(model).embedding(tokens)
    embedded[0, rows.rows] = rows.features.rows.to(embedded)
    return inputs | {"inputs_embeds": embedded}


def add_after_layers(model: Any) -> None:
    """Makes a model's layers add the rows that pictures have after them, where its family has such rows."""
    if hasattr(model.model, _ADDS):
        for number, layer in enumerate(model.model.layers):
            layer.register_forward_hook(partial(_added, number))


def _added(number: int, layer: Any, inputs: Any, state: torch.Tensor) -> torch.Tensor:
    """The state [1, rows, H] after a layer, with the rows of pictures added."""
    found = current_step().picture_rows
    if found is None or number >= len(found.features.layers):
        return state
    state = state.clone()
    state[0, found.rows] += found.features.layers[number].to(state)
    return state
