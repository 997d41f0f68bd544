"""The level of every expert in an export: one for all, or a map from a file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from edgemoe.errors import UserError
from edgemoe.storage.base import LEVELS
from edgemoe.storage.files.header import strict_json
from edgemoe.storage.files.untrusted import shortened
from edgemoe.storage.store.manifest import Manifest

Levels = dict[int, tuple[int, ...]]
"""Layer -> the level of each of its experts."""

_KEY = re.compile(r"\*|(\d{1,6})(?:\.(\d{1,6}))?", re.ASCII)


def one_level(manifest: Manifest, level: int) -> Levels:
    """One level for all experts of a store."""
    return {layer: (level,) * len(records.records) for layer, records in sorted(manifest.layers.items())}


def read_levels(path: Path, manifest: Manifest) -> Levels:
    """Reads a map of levels: a JSON object whose keys are "*", "LAYER" or "LAYER.EXPERT"; the longest key counts.

    >>> # {"*": 4, "0": 8, "3.17": 2}: 8 bits in layer 0, 2 for expert 17 of layer 3, 4 for all others

    Args:
        path: the path of the file.
        manifest: the manifest of the store.

    Raises:
        UserError: the file cannot be read, is not such an object, names an expert that the store lacks, or leaves one
            without a level.
    """
    action = 'write an object such as {"*": 4, "0": 8, "3.17": 2}'
    try:
        value = strict_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"a map of levels in {path}", str(error)[:200], action) from error
    if not isinstance(value, dict):
        raise UserError(f"a map of levels in {path}", shortened(value), action)
    for key, level in value.items():
        match = _KEY.fullmatch(key)
        if not match or type(level) is not int or level not in LEVELS:
            wanted = f'keys "*", LAYER or LAYER.EXPERT and levels {", ".join(map(str, LEVELS))} in {path}'
            raise UserError(wanted, f"{shortened(key)}: {shortened(level)}", action)
        _require_place(match, manifest, path)
    return {
        layer: tuple(_level(value, layer, expert, path) for expert in range(len(records.records)))
        for layer, records in sorted(manifest.layers.items())
    }


def _require_place(match: re.Match[str], manifest: Manifest, path: Path) -> None:
    layer, expert = (int(text) if text else None for text in match.groups())
    found = manifest.layers.get(layer) if layer is not None else None
    if layer is not None and (found is None or (expert or 0) >= len(found.records)):
        raise UserError(
            f"layers and experts of the store in {path}", f"{match[0]}", "leave the key out, or correct it"
        )


def _level(value: Mapping[str, int], layer: int, expert: int, path: Path) -> int:
    for key in (f"{layer}.{expert}", f"{layer}", "*"):
        if key in value:
            return value[key]
    raise UserError(
        f"a level for expert {expert} of layer {layer} in {path}", "none", 'add a key "*" for all others'
    )


def layer_level(levels: Levels, layer: int, format: str, allowed: tuple[int, ...]) -> int:
    """The level of all experts of a layer, for a format that cannot mix levels in a layer.

    Raises:
        UserError: the experts of the layer have several levels, or one that the format has no codes for.
    """
    found = sorted(set(levels[layer]))
    if len(found) > 1:
        raise UserError(
            f"one level for all experts of layer {layer}: {format} has one tensor type a layer",
            f"levels {', '.join(map(str, found))}",
            "give each layer one level, or export as safetensors, which can mix experts",
        )
    if found[0] not in allowed:
        raise UserError(
            f"level {' or '.join(map(str, allowed))} for experts in {format}",
            f"{found[0]} in layer {layer}",
            "choose another level, or export as safetensors",
        )
    return found[0]
