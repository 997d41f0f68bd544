"""Lengths of a sequence with different rotary factors: keys of one length are useless in a sequence of another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

LONGROPE, DYNAMIC = "longrope", "dynamic"


@dataclass(frozen=True)
class RotaryLengths:
    """Where a model's rotary factors change with the number of tokens.

    >>> RotaryLengths((4096,), None).factors(4096), RotaryLengths((4096,), None).factors(9000)
    (0, 4097)
    >>> RotaryLengths((), 4096).factors(4096), RotaryLengths((), 4096).factors(9000)
    (0, 9000)

    Args:
        steps: most tokens of a sequence with the short factors of longrope, ascending.
        ramp: most tokens before dynamic factors grow with each token; None: none do.
    """

    steps: tuple[int, ...]
    ramp: int | None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> RotaryLengths | None:
        """Reads a config.json; None: the factors do not depend on the length."""
        steps, ramps = set[object](), set[object]()
        for scaling in _scalings(config):
            kind = scaling.get("rope_type") or scaling.get("type")
            own = config.get("max_position_embeddings")
            if kind == LONGROPE:
                named = "original_max_position_embeddings"
                steps.add(scaling.get(named) or config.get(named) or own)
            elif isinstance(kind, str) and DYNAMIC in kind:
                ramps.add(own)
        numbers = tuple(sorted(n for n in steps if isinstance(n, int)))
        ramp = min((n for n in ramps if isinstance(n, int)), default=None)
        return cls(numbers, ramp) if numbers or ramp else None

    @property
    def least(self) -> int:
        """Most tokens of a sequence that has one set of factors from its first token to its last."""
        limits = [*self.steps] if self.ramp is None else [*self.steps, self.ramp]
        return min(limits)

    def factors(self, tokens: int) -> int:
        """Returns a number that is equal for lengths with equal factors; 0 for short sequences."""
        if self.ramp is not None and tokens > self.ramp:
            return tokens
        return max((step + 1 for step in self.steps if tokens > step), default=0)

    def alike(self, tokens: int, more: int) -> int:
        """Returns the number of further tokens, up to `more`, that have the factors of a sequence's first `tokens`.

        >>> RotaryLengths((4096,), None).alike(4094, 7), RotaryLengths((), 4096).alike(9000, 7)
        (2, 0)
        """
        own = self.factors(tokens)
        return next((i for i in range(max(more, 0)) if self.factors(tokens + i + 1) != own), more)

    def crosses(self, tokens: int) -> bool:
        """Whether all keys before the last of so many tokens have other factors, and are to be computed again.

        Dynamic factors, which change with each token, stay as in the step in which a key was computed, as in
        transformers' generate.
        """
        return tokens - 1 in self.steps


def _scalings(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the rotary parameters of a config: one set for all layers, or one for each kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(given := config.get(name), Mapping):
            yield given
            yield from (each for each in given.values() if isinstance(each, Mapping))
