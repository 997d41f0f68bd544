"""Layers for multi-token prediction, which follow a model's layers in a checkpoint and are left out."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from edgemoe.errors import ModelRefused
from edgemoe.families.base import Family
from edgemoe.storage.files.untrusted import CHECK_ORIGIN

_LAYER = re.compile(r"model\.layers\.([0-9]{1,6})\.")


def require_layers_ahead(family: Family, names: Collection[str], directory: Path) -> None:
    """Refuses a layer of the model that a wrong num_hidden_layers makes one for multi-token prediction.

    Such a layer also has tensors that join the hidden state with the next token; a layer of the model has none.

    Args:
        family: the family of the model.
        names: names of all tensors of the checkpoint.
        directory: the checkpoint's, for messages.

    Raises:
        ModelRefused: a layer after the model's has only tensors that the model's layers have.
    """
    plain = {_LAYER.sub("", name) for name in family.dense}
    found: dict[int, bool] = {}
    for name in names:
        own = family.in_modules(name)
        layer = _LAYER.match(own)
        if layer and family.ahead[0] <= int(layer[1]) < family.ahead[1]:
            joins = not family.is_expert(name) and own[layer.end() :] not in plain
            found[int(layer[1])] = found.get(int(layer[1]), False) or joins
    for number, joins in sorted(found.items()):
        if not joins:
            raise ModelRefused(
                f"{number} layers in {directory}, as num_hidden_layers in config.json says",
                f"layer {number}, which is no layer for multi-token prediction but one of the model's",
                CHECK_ORIGIN,
            )
