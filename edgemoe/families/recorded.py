"""A step of a model without weights: it shows the shapes of its KV, and the number of experts of a token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from edgemoe.errors import ModelRefused
from edgemoe.families.meta_model import Rotary, buffers_of_config, passing, repeated_layers, replaced
from edgemoe.kv.shape import KVShape, LinearState
from edgemoe.storage.files.untrusted import CHECK_ORIGIN

NAME = "edgemoe-shapes"
"""Under which transformers finds the attention and the experts of this module."""

_ROWS = 3

_LARGEST_SIZE = 131_072
"""Largest legal size of one cached dimension."""

_ACTION = "choose a model of another family"


@dataclass
class StepShapes:
    """The sizes that the layers of a step have shown.

    Attributes:
        cached: layer -> heads and sizes of what it caches as keys and as values.
        attended: layer -> heads of the keys that it attends to.
        windows: layer -> latest tokens that it attends to; layers that attend to all are not there.
        indexed: layer -> size of its index keys.
        convolved: layer -> channels and kernel of its convolution.
        recurrent: layer -> heads, key and value size of its recurrence.
        choices: experts module -> experts of each token.
    """

    cached: dict[int, tuple[int, int, int, int]] = field(default_factory=dict)
    attended: dict[int, int] = field(default_factory=dict)
    windows: dict[int, int] = field(default_factory=dict)
    indexed: dict[int, int] = field(default_factory=dict)
    convolved: dict[int, tuple[int, int]] = field(default_factory=dict)
    recurrent: dict[int, tuple[int, ...]] = field(default_factory=dict)
    choices: dict[int, int] = field(default_factory=dict)


class _Cache(Cache):  # type: ignore[misc]  # transformers ships no types
    """Notes what layers cache, and has nothing from before."""

    def __init__(self, shapes: StepShapes) -> None:
        super().__init__(layers=[])
        self.shapes = shapes

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Notes the heads and sizes of keys and values."""
        keys, values = key_states.shape, value_states.shape
        self.shapes.cached[layer_idx] = keys[1], keys[3], values[1], values[3]
        return key_states, value_states

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Notes the size of index keys."""
        self.shapes.indexed[layer_idx] = indexer_key_states.shape[-1]
        return indexer_key_states

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, **kwargs: Any) -> torch.Tensor:
        """Notes channels and kernel; the earlier inputs are zeros."""
        kernel = kwargs.get("conv_kernel_size") or conv_states.shape[-1]
        self.shapes.convolved[layer_idx] = conv_states.shape[1], kernel
        return torch.cat((conv_states.new_zeros(*conv_states.shape[:2], kernel), conv_states), dim=-1)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int, **kwargs: Any) -> None:
        """Notes the shape."""
        self.shapes.recurrent[layer_idx] = tuple(recurrent_states.shape[1:])

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Returns None: the step is a sequence's first."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Returns None: the step is a sequence's first."""

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        """Returns False: the step is a sequence's first."""
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        """Returns False: nothing is undone."""
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns 0: the step is a sequence's first."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Returns 0: the step is a sequence's first."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Returns the rows of the step, and no offset."""
        return query_length, 0


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    module.edgemoe_seen.attended[module.layer_idx] = key.shape[1]
    if attention_mask is not None and not attention_mask.dim():
        module.edgemoe_seen.windows[module.layer_idx] = int(attention_mask)
    return value.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def _mask(
    *args: Any, allow_is_causal_skip: bool = True, local_size: int | None = None, **kwargs: Any
) -> torch.Tensor | None:
    """A layer's window, int64 []; for modules that compute with a mask themselves, as an index does, a whole one."""
    if allow_is_causal_skip:
        return torch.tensor(local_size) if local_size else None
    return torch.ones(1, 1, _ROWS, _ROWS, dtype=torch.bool, device="meta")


def _experts(module: Any, hidden: torch.Tensor, choice: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    module.edgemoe_seen.choices[id(module)] = choice.shape[-1]
    if choice.shape != gates.shape or len(choice) != len(hidden):
        raise ValueError(
            f"experts {list(choice.shape)} and gate weights {list(gates.shape)} of {len(hidden)} tokens"
        )
    return torch.empty_like(hidden)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)


def shapes_of(model: Any) -> StepShapes:
    """Runs a step of three tokens through one layer of each kind of a model on the meta device.

    Args:
        model: made with the attention and the experts of this module (NAME).

    Returns:
        what the layers have shown, for all layers.

    Raises:
        Exception: whatever a module raises.
    """
    shapes, first = StepShapes(), repeated_layers(model)
    positions, found = torch.arange(_ROWS), buffers_of_config(model)
    rotary: dict[str, nn.Module] = {name: Rotary(real, positions) for name, real in found.items()}
    alike = passing(model, first)
    with torch.inference_mode(), _noting(model, shapes), replaced(model, rotary), replaced(model, alike):
        model(
            input_ids=torch.zeros(1, _ROWS, dtype=torch.int64, device="meta"),
            position_ids=positions[None].to("meta"),
            past_key_values=_Cache(shapes),
            use_cache=True,
        )
    notes: list[dict[int, Any]] = [shapes.cached, shapes.attended, shapes.windows]
    notes += [shapes.indexed, shapes.convolved, shapes.recurrent]
    for number, other in first.items():
        for note in notes:
            if other in note:
                note[number] = note[other]
    return shapes


@contextmanager
def _noting(model: nn.Module, shapes: StepShapes) -> Iterator[None]:
    """Gives every module the place of its notes, within the block."""
    modules: list[Any] = [*model.modules()]
    for module in modules:
        module.edgemoe_seen = shapes
    try:
        yield
    finally:
        for module in modules:
            del module.edgemoe_seen


def kv_shape(shapes: StepShapes) -> KVShape:
    """The shape of a sequence's KV: the first attention layer's, and others that differ from it.

    Raises:
        ModelRefused: keys and values of an absurd size, a layer that attends to what another one caches, or a state
            that is not supported.
    """
    borrowing = [layer for layer in shapes.attended if layer not in shapes.cached]
    if borrowing:
        raise ModelRefused(
            "layers that attend to their own keys", f"layer {borrowing[0]} with another one's", _ACTION
        )
    layers = dict[KVShape, list[int]]()
    for layer in sorted(shapes.cached):
        layers.setdefault(_layer_shape(shapes, layer), []).append(layer)
    first, *others = [replace(each, layers=tuple(of)) for each, of in layers.items()] or [
        KVShape((), 1, 1, 1)
    ]
    return replace(first, linear=_linear(shapes), others=tuple(others), index=_index(shapes))


def _layer_shape(shapes: StepShapes, layer: int) -> KVShape:
    """The shape of what a layer caches, without a layer.

    A layer that attends to more heads than it caches has expanded them from latents, with one head: its keys are cached
    as latents, and its values as the rotary part that all heads share. Values shorter than keys are padded: compiled
    attention takes both at one size.

    Raises:
        ModelRefused: other numbers of values than of keys, or an absurd size.
    """
    heads, key_dim, value_heads, value_dim = shape = shapes.cached[layer]
    window = shapes.windows.get(layer, 0)
    if not all(1 <= size <= _LARGEST_SIZE for size in shape):
        raise ModelRefused(
            f"sizes from 1 to {_LARGEST_SIZE} of keys and values, as config.json gives them",
            f"heads and sizes {shape}",
            CHECK_ORIGIN,
        )
    if shapes.attended.get(layer, heads) != heads:
        return KVShape((), heads, key_dim + value_dim, 0, latent=key_dim, window=window)
    if value_heads != heads:
        raise ModelRefused("as many values as keys", f"{heads} keys and {value_heads} values", _ACTION)
    return KVShape((), heads, key_dim, max(key_dim, value_dim), window=window)


def _index(shapes: StepShapes) -> KVShape | None:
    """The shape of index keys; None where no layer has an index.

    Raises:
        ModelRefused: they have several sizes.
    """
    sizes = set(shapes.indexed.values())
    if len(sizes) > 1:
        raise ModelRefused("index keys of one size", f"{len(sizes)} sizes", _ACTION)
    return KVShape(tuple(sorted(shapes.indexed)), 1, sizes.pop(), 0) if sizes else None


def _linear(shapes: StepShapes) -> LinearState | None:
    """The state of the linear-attention layers; None where there are none."""
    if not shapes.convolved and not shapes.recurrent:
        return None
    states = {
        (shapes.convolved.get(i), shapes.recurrent.get(i)) for i in {*shapes.convolved, *shapes.recurrent}
    }
    convolved, recurrent = states.pop()
    if recurrent is None:
        recurrent = 0, 0, 0
    if states or convolved is None or len(recurrent) != 3:
        raise ModelRefused(
            "a state of one convolution, and of no recurrence or one of three sizes, in each layer without attention",
            f"convolutions {convolved} and recurrences {recurrent}",
            _ACTION,
        )
    heads, key_dim, value_dim = recurrent
    return LinearState(tuple(sorted(shapes.convolved)), *convolved, heads, key_dim, value_dim)
