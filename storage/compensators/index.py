"""The entry "compensators" of store.json.

A *compensator* is a low-rank approximation U V of what an expert lost at one level, the *base level*: W is about
W_level + U V. It is no level and no plane: a store is complete without it, and readers that do not know it skip its
entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from edgemoe.errors import UserError
from edgemoe.storage.base import BLOCK, ExpertKey
from edgemoe.storage.compensators.geometry import CompensatorGeometry, Ranks
from edgemoe.storage.files.untrusted import shortened
from edgemoe.storage.record.offsets import RecordGeometry
from edgemoe.storage.store.manifest_entries import (
    MAX_OFFSET,
    read_checksum,
    read_file_name,
    read_integer,
    read_list,
    read_object,
    read_text,
)

FORMAT_VERSION = 1

FOLDER = "compensators"
"""Name of the store's folder with the files of compensators, one for each layer."""

PROJECTIONS = ("gate", "up", "down")

BASE_LEVELS = (2, 4)
"""Levels whose error is compensated."""

RULES = ("error", "kurtosis", "uniform")
"""How ranks are assigned; see storage.compensators.low_rank."""


def compensator_name(layer: int, expert: int) -> str:
    """Name of a compensator's tensor in its layer's file."""
    return f"compensators.{layer}.{expert}"


@dataclass(frozen=True)
class CompensatorEntry:
    """One expert's compensator.

    Args:
        offset: bytes from the start of its layer's file, a multiple of 4 KiB.
        length: bytes, a multiple of 4 KiB; 0 where every rank is 0.
        ranks: the ranks of gate, up and down.
        checksum: xxh3_64 of its bytes.
    """

    offset: int
    length: int
    ranks: Ranks
    checksum: int


@dataclass(frozen=True)
class LayerCompensators:
    """One layer's compensators: the name of their file, and their entries by expert number."""

    file: str
    entries: tuple[CompensatorEntry, ...]


@dataclass(frozen=True)
class CompensatorIndex:
    """The compensators of a store.

    Args:
        base_level: level whose error they approximate, 2 or 4.
        rule: the rule that assigned the ranks, one of RULES.
        mean_rank: budget of the rule: mean over the projections of a layer.
        reference: fingerprint of the checkpoint that the errors were measured against, or "level 8": the store's own.
        error: ||W - W_level - U V|| / ||W - W_level|| over all experts.
        layers: layer's number -> its compensators; every layer of the store.
    """

    base_level: int
    rule: str
    mean_rank: int
    reference: str
    error: float
    layers: Mapping[int, LayerCompensators]

    def entry(self, key: ExpertKey) -> CompensatorEntry:
        """The entry of an expert; KeyError or IndexError for one that the store does not have."""
        return self.layers[key.layer].entries[key.expert]

    @property
    def nbytes(self) -> int:
        """Bytes of all compensators."""
        return sum(entry.length for layer in self.layers.values() for entry in layer.entries)

    @property
    def largest(self) -> int:
        """Bytes of the largest compensator; 0 where every rank is 0."""
        return max((entry.length for layer in self.layers.values() for entry in layer.entries), default=0)

    def to_json(self) -> dict[str, Any]:
        """The value of "compensators" in store.json."""
        return {
            "format": FORMAT_VERSION,
            "base_level": self.base_level,
            "rule": self.rule,
            "mean_rank": self.mean_rank,
            "reference": self.reference,
            "error": self.error,
            "layers": {
                str(number): {
                    "file": layer.file,
                    "records": [[e.offset, e.length, *e.ranks, f"{e.checksum:016x}"] for e in layer.entries],
                }
                for number, layer in sorted(self.layers.items())
            },
        }


def check_choices(base_level: int, rule: str) -> None:
    """Raises UserError for a level that has no compensators, and for an unknown rule."""
    if base_level not in BASE_LEVELS:
        raise UserError("level 2 or 4 to compensate", str(base_level), "choose --residual 2 or 4")
    if rule not in RULES:
        raise UserError(
            "a rule for ranks", repr(rule), f"choose --ranks {', '.join(RULES[:-1])} or {RULES[-1]}"
        )


def read_compensators(
    value: object, geometry: RecordGeometry, counts: Mapping[int, int]
) -> CompensatorIndex | None:
    """Reads the value of "compensators" in store.json.

    Args:
        value: the parsed value; None where store.json has none.
        geometry: the geometry of the store's records.
        counts: layer number -> experts.

    Returns:
        None where there are none, or their format is newer: a store is complete without them.

    Raises:
        ValueError: a value is invalid or contradicts the store.
    """
    if value is None:
        return None
    content = read_object(value, "compensators")
    if read_integer(content, "format", 1, MAX_OFFSET) > FORMAT_VERSION:
        return None
    base_level = read_integer(content, "base_level", 2, 4)
    if base_level not in BASE_LEVELS or base_level > geometry.max_level:
        raise ValueError(f"compensators of level {base_level} in a store up to level {geometry.max_level}")
    rule, error = read_text(content, "rule"), content.get("error")
    if rule not in RULES:
        raise ValueError(f"rule {shortened(rule)} of compensators, not one of {', '.join(RULES)}")
    if isinstance(error, bool) or not isinstance(error, int | float) or not 0 <= error < float("inf"):
        raise ValueError(f"error {shortened(error)} of compensators")
    found = read_object(content.get("layers"), "layers of compensators")
    if set(found) != {str(number) for number in counts}:
        raise ValueError(f"compensators of other layers than the store's: {shortened(sorted(found))}")
    layers = {number: _layer(found[str(number)], number, geometry, n) for number, n in counts.items()}
    mean_rank = read_integer(content, "mean_rank", 1, MAX_OFFSET)
    return CompensatorIndex(
        base_level, rule, mean_rank, read_text(content, "reference"), float(error), layers
    )


def _layer(value: object, number: int, geometry: RecordGeometry, count: int) -> LayerCompensators:
    layer = read_object(value, f"compensators of layer {number}")
    rows = read_list(layer.get("records"), f"compensators of layer {number}")
    if len(rows) != count:
        raise ValueError(f"{len(rows)} compensators for the {count} experts of layer {number}")
    entries = tuple(
        _entry(row, geometry, f"the compensator of layer {number}, expert {e}") for e, row in enumerate(rows)
    )
    spans = sorted((entry.offset, entry.length) for entry in entries if entry.length)
    if any(a + length > b for (a, length), (b, _) in pairwise(spans)):
        raise ValueError(f"two overlapping compensators in layer {number}")
    return LayerCompensators(read_file_name(layer.get("file")), entries)


def _entry(row: object, geometry: RecordGeometry, label: str) -> CompensatorEntry:
    match read_list(row, label):
        case [int() as offset, int() as length, int() as gate, int() as up, int() as down, str() as checksum]:
            shape = CompensatorGeometry.of(geometry, (gate, up, down))
            if any(isinstance(rank, bool) or not 0 <= rank <= shape.most for rank in shape.ranks):
                raise ValueError(f"ranks {shortened(shape.ranks)} of {label}, not 0 to {shape.most}")
            if type(offset) is not int or offset % BLOCK or not 0 <= offset <= MAX_OFFSET:
                raise ValueError(f"offset {shortened(offset)} of {label}")
            if type(length) is not int or length != shape.nbytes:
                raise ValueError(
                    f"length {shortened(length)} of {label}, where its ranks give {shape.nbytes}"
                )
            return CompensatorEntry(offset, length, shape.ranks, read_checksum(checksum, label))
    raise ValueError(f"{shortened(row)} as {label}, not offset, length, three ranks and a checksum")
