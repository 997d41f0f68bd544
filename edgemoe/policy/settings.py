"""What can be chosen when a model is run, beside its limits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from cache.policies import POLICIES
from prefetch.base import MODES
from storage.base import LEVELS
from storage.errors import UserError

DEPTHS = ("cosine", "equal")
"""How retention runs over the layers: DyMoE eq. 4, or the same everywhere."""

SIGNALS = ("heavy-hitters", "heavy-hitters-mean", "heavy-hitters-last", "load", "gate", "mix", "random")
"""What makes an expert important in prefill (importance.expert_importance)."""


CPU_EXPERTS = ("off", "auto")
"""What beside a device the CPU computes: nothing; of the experts that are in DRAM alone, as many as pay."""


@dataclass(frozen=True)
class RunSettings:
    """One way of running a model. Checked when made.

    Args:
        levels: bits per expert, high to low: (4, 2), (8, 4, 2, 0), (4,).
        retention: mean share r of critical experts over the layers, 0.5 to 1. One level leaves nothing to retain.
        exact: compute at exactly the scheduled level, even where more planes are resident.
        importance: one of SIGNALS.
        heavy_hitters: share of a prompt's tokens that count as heavy hitters, above 0, at most 1.
        depth: one of DEPTHS.
        renormalise: where experts are skipped, scale the others' gate weights to the previous sum.
        eviction: one of cache.policies.POLICIES.
        speculate: one of prefetch.base.MODES.
        cpu_experts: one of CPU_EXPERTS. Exact, it is the same as off: which experts the CPU computes depends on limits.
        cache: False loads on demand: nothing is kept from one layer to the next.
        readers: threads that read experts; in RAM, while a prompt wants many, prefetch.workers.SCAN_WORKERS of them.
        only_layer: schedule this layer alone and give every other the highest level, to see how sensitive it
            is; None: all.

    Raises:
        UserError: naming the first setting that is out of its range.
    """

    levels: tuple[int, ...] = (8,)
    retention: float = 0.75
    exact: bool = False
    importance: str = "gate"
    heavy_hitters: float = 0.5
    depth: str = "cosine"
    renormalise: bool = False
    eviction: str = "lfru"
    speculate: str = "off"
    cpu_experts: str = "off"
    cache: bool = True
    readers: int = 2
    only_layer: int | None = None

    def __post_init__(self) -> None:
        parse_levels("/".join(map(str, self.levels)))
        if not 0.5 <= self.retention <= 1:
            raise UserError(
                "a mean retention from 0.5 to 1 was wanted", f"got {self.retention}", "0.75 is a good start"
            )
        if not 0 < self.heavy_hitters <= 1:
            raise UserError(
                "a share of heavy hitters above 0 and at most 1 was wanted",
                f"got {self.heavy_hitters}",
                "0.5 is the default",
            )
        for name, allowed in (
            ("importance", SIGNALS),
            ("depth", DEPTHS),
            ("eviction", POLICIES),
            ("speculate", MODES),
            ("cpu_experts", CPU_EXPERTS),
        ):
            if getattr(self, name) not in allowed:
                raise UserError(
                    f"--{name.replace('_', '-')} {' or '.join(allowed)} was wanted",
                    f"got {getattr(self, name)!r}",
                    "Choose one",
                )

    @classmethod
    def uniform(cls, level: int, **others: Any) -> RunSettings:
        """Every expert at exactly `level` bits."""
        return cls(levels=(level,), exact=True, **others)

    def with_(self, **changes: Any) -> RunSettings:
        """A copy with some settings changed, checked again."""
        return replace(self, **changes)

    @property
    def name(self) -> str:
        """For tables: "exact 4", "4/2 r 0.75"."""
        if len(self.levels) == 1:
            return f"{'exact ' if self.exact else ''}{self.levels[0]}"
        return f"{format_levels(self.levels)} r {self.retention:g}"


def parse_levels(text: str) -> tuple[int, ...]:
    """ "4/2" -> (4, 2).

    Raises:
        UserError: not levels, not falling, or nothing but 0.
    """
    try:
        levels = tuple(int(part) for part in text.split("/"))
    except ValueError:
        levels = ()
    falling = all(high > low for high, low in pairwise(levels))
    if not levels or not levels[0] or not falling or not set(levels) <= set(LEVELS):
        raise UserError(
            "levels were wanted from high to low, out of 8, 4, 2 and 0, as in 4/2 or 8/4/2/0",
            f"got {text!r}",
            "Try 4/2",
        )
    return levels


def format_levels(levels: tuple[int, ...]) -> str:
    """(4, 2) -> "4/2"."""
    return "/".join(map(str, levels))
