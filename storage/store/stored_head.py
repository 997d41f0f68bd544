"""The entry of store.json for a head that guesses further tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgemoe.storage.record.offsets import RecordGeometry
from edgemoe.storage.store.manifest_entries import (
    MAX_LAYERS,
    LayerRecords,
    layer_json,
    read_integer,
    read_layer,
    read_object,
)


@dataclass(frozen=True)
class StoredHead:
    """The experts of a head that guesses further tokens.

    Args:
        layer: number of its layer, which follows the model's layers.
        experts: the records of its experts.
    """

    layer: int
    experts: LayerRecords


def read_head(
    value: object, geometry: RecordGeometry, columns: tuple[int, int], layers: Mapping[int, LayerRecords]
) -> StoredHead | None:
    """The experts of a head for further tokens, whose layer follows the model's layers; None: the store has none."""
    if value is None:
        return None
    entry = read_object(value, "head")
    number = read_integer(entry, "layer", 1, MAX_LAYERS - 1)
    if layers and number <= max(layers):
        raise ValueError(
            f"a head that is layer {number}, which is one of the model's {max(layers) + 1} layers"
        )
    return StoredHead(number, read_layer(number, entry, geometry, columns))


def head_json(head: StoredHead) -> dict[str, Any]:
    """The entry of a head, as values for JSON."""
    return {"layer": head.layer, **layer_json(head.experts)}
