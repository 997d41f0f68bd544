"""Tells before a conversion that its store will be larger than the source."""

from __future__ import annotations

from typing import Any

from edgemoe.console.sizes import format_size
from edgemoe.console.width import say
from edgemoe.families.head import head_of
from edgemoe.families.table import family_of
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.expert_weights import ExpertWeights
from edgemoe.storage.convert.run import store_bytes

GROWTH = 1.1
"""Bytes of a store per byte of its source's weights from which on a message has both sizes."""


def tell_growth(checkpoint: Checkpoint, max_level: int | None, dense_bits: int, head_bits: int = 8) -> None:
    """Prints both sizes on stderr, and what level 4 would take, if a quantized source's store is larger by GROWTH.

    Args:
        checkpoint: the source; no weights are read.
        max_level, dense_bits, head_bits: the options of the conversion.

    Raises:
        ModelRefused, MissingTensor: from store_bytes.
    """
    family = family_of(checkpoint.config)
    head = head_of(family, checkpoint.config, checkpoint.names())
    sources = ExpertWeights(checkpoint, family).sources
    if not any(matrix.quantized for layer in sources.values() for matrix in layer):
        return
    size = sum(checkpoint[name].nbytes for name in checkpoint.names())
    how: dict[str, Any] = {"dense_bits": dense_bits, "head_bits": head_bits, "head": head}
    store = store_bytes(checkpoint, family, max_level=max_level, **how)
    if store <= GROWTH * size:
        return
    lower = store_bytes(checkpoint, family, max_level=4, **how)
    less = f"; with --max-level 4 it takes {format_size(lower)}" if lower < store else ""
    say(
        f"{format_size(size)} of {checkpoint.format} weights become a store of {format_size(store)}, because some are "
        f"coded again with more bits{less}"
    )
