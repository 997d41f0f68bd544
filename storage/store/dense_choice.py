"""The entry of store.json that says how many bits the dense weights got by measurement, and what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgemoe.storage.files.untrusted import shortened
from edgemoe.storage.store.manifest_entries import read_integer, read_object

PART = 0.25
"""The part of the experts' KL at level 4 that dense weights may add."""

MOST = 0.0006
"""Nats that 8 bits may add where no bits are within PART: activations of 8 bits and the head cost most of it."""


@dataclass(frozen=True)
class DenseChoice:
    """KL of the store's own model at its highest level with dense weights in bf16, in nats per token.

    Args:
        experts: KL where experts have level 4.
        added: bits of dense weights -> KL that they add to it, in the order of measuring.
        tokens: number of tokens of the text, which the model wrote.
    """

    experts: float
    added: Mapping[int, float]
    tokens: int

    @property
    def limit(self) -> float:
        """The most that dense weights may add."""
        return PART * self.experts

    @property
    def bits(self) -> int:
        """The first measured bits that add at most the limit; where none do, 8 if they add at most MOST, else 16."""
        within = next((bits for bits, added in self.added.items() if added <= self.limit), None)
        return within or (8 if self.added.get(8, math.inf) <= MOST else 16)

    def __str__(self) -> str:
        measured = ", ".join(f"{added:.5f} at {bits} bits" for bits, added in self.added.items())
        chosen = "bf16" if self.bits == 16 else f"{self.bits} bits"
        if self.bits < 16 and self.added[self.bits] > self.limit:
            chosen += f", which add at most {MOST}"
        return (
            f"{chosen}; dense weights may add {self.limit:.5f} nats of KL, a quarter of what experts cost at 4 bits, "
            f"and add {measured} ({self.tokens:,} tokens that the model wrote)"
        )

    def to_json(self) -> dict[str, Any]:
        """The entry, as values for JSON."""
        added = {str(bits): kl for bits, kl in self.added.items()}
        return {"experts": self.experts, "added": added, "tokens": self.tokens}


def read_dense_choice(value: object) -> DenseChoice | None:
    """Parses the entry; None where there is none.

    Raises:
        ValueError: with the wrong value.
    """
    if value is None:
        return None
    content = read_object(value, "dense_choice")
    added = read_object(content.get("added"), "added of dense_choice")
    if not all(name.isdecimal() and len(name) <= 2 for name in added):
        raise ValueError(f"added of dense_choice {shortened(added)}, not by bits")
    numbers = {int(name): _number(kl) for name, kl in added.items()}
    tokens = read_integer(content, "tokens", 1, 1 << 40)
    return DenseChoice(_number(content.get("experts")), numbers, tokens)


def _number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"a KL of {shortened(value)} in dense_choice")
    return float(value)
