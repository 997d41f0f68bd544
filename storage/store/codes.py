"""The entry of store.json that says how the codes of the experts were chosen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgemoe.storage.base import PLANES_OF_LEVEL
from edgemoe.storage.files.untrusted import shortened
from edgemoe.storage.store.manifest_entries import read_integer, read_object, read_text

SELF = "self"
"""Name of the text that the model writes itself."""

_RUN = re.compile(r"[0-9a-f]{8}", re.ASCII)
_MOST_WEIGHT = 1 << 20


@dataclass(frozen=True)
class CalibratedCodes:
    """Codes that were chosen with error feedback on tokens of a text (record.nested_codes).

    Args:
        importance: level in bits -> weight of its squared distances.
        text: name of the text's file, or SELF.
        tokens: number of tokens.
        run: identifies the weights, the tokens and the options, 8 hex digits; in the names of the files.
    """

    importance: Mapping[int, int]
    text: str
    tokens: int
    run: str

    def __str__(self) -> str:
        weights = ", ".join(f"{weight} at {level} bits" for level, weight in sorted(self.importance.items()))
        text = "a text of the model" if self.text == SELF else self.text
        return f"calibrated on {self.tokens:,} tokens of {text}, weights {weights}"

    def to_json(self) -> dict[str, Any]:
        """The entry, as values for JSON."""
        weights = {str(level): weight for level, weight in sorted(self.importance.items())}
        return {"importance": weights, "text": self.text, "tokens": self.tokens, "run": self.run}


def read_codes(value: object) -> CalibratedCodes | None:
    """Parses the entry; None where there is none: the codes were rounded to nearest, or are the source's own.

    Raises:
        ValueError: with the wrong value.
    """
    if value is None:
        return None
    content = read_object(value, "codes")
    weights = read_object(content.get("importance"), "importance of codes")
    levels = {str(level): level for level in PLANES_OF_LEVEL if level}
    if not weights or not set(weights) <= set(levels):
        raise ValueError(f"importance of codes {shortened(weights)}, not of levels {', '.join(levels)}")
    importance = {levels[name]: read_integer(weights, name, 0, _MOST_WEIGHT) for name in weights}
    run = read_text(content, "run")
    if not _RUN.fullmatch(run):
        raise ValueError(f"run of codes {shortened(run)}, not 8 hex digits")
    tokens = read_integer(content, "tokens", 1, 1 << 40)
    return CalibratedCodes(importance, read_text(content, "text"), tokens, run)
