"""The settings of a run, except its limits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from edgemoe.cache.policies import POLICIES, is_pooled
from edgemoe.errors import UserError
from edgemoe.policy.bits import BITS_PER_WEIGHT, bits_of_retention
from edgemoe.policy.compensation import Compensation
from edgemoe.policy.hotness import Hotness
from edgemoe.policy.remapping import Remapping
from edgemoe.prefetch.base import MODES
from edgemoe.storage.base import LEVELS
from edgemoe.storage.sizes import format_size

RULES = ("damage", "paper")
"""Rules for the bits of experts: by the damage of fewer bits and their price, or by DyMoE's importance and schedule."""

DEPTHS = ("cosine", "equal")
"""How retention falls over the layers: by DyMoE eq. 4, or not at all."""

CRITICAL = ("carry", "ceil")
"""How the number of critical experts is rounded (schedule.critical_counts); "ceil" is DyMoE's eq. 5."""

SIGNALS = ("heavy-hitters", "heavy-hitters-mean", "heavy-hitters-last", "load", "gate", "mix", "random")
"""Signals of an expert's importance in prefill (importance.expert_importance)."""

IN_PLACE = ("on", "off")
"""Whether a device's kernels read experts that only DRAM has where they lie; if not, each is copied first."""

PROMOTIONS = ("planes", "whole")
"""Reads for an expert that is resident below its level: the missing planes, or all of it (DyMoE 4.4.2)."""

SCANS = ("on", "off")
"""Whether experts of a prompt that wants most of a layer's are evicted first; if not, their use counts as any other."""

DRAFTS = ("off", "ngram", "mtp")
"""Guesses at further tokens: none, the tokens that followed the last ones before, or by the model's head for them."""

MOST_DRAFTS, MOST_HEAD_DRAFTS = 7, 3
"""Most guesses in a step, and most that a model's head makes, each of which it computes."""

RANKING = (
    "rule",
    "retention",
    "bits",
    "tpot_target",
    "depth",
    "critical",
    "importance",
    "heavy_hitters",
    "renormalise",
)
"""Fields of RunSettings that rank experts: without effect where all experts have one level."""

LOW_RETENTION = 0.5
"""Lowest retention without a doubt: DyMoE's lambda is 0 there."""

PAPER_RANKING = {"importance": "heavy-hitters", "critical": "ceil", "depth": "cosine"}
"""Fields of RunSettings that rank experts as DyMoE does (eq. 1-5)."""

PAPER_CACHE = {"eviction": "lru-pool", "promotion": "whole", "scan": "off"}
"""Fields of RunSettings that keep experts as DyMoE does (section 4.4.2)."""

_CHOICES = {
    "importance": SIGNALS,
    "depth": DEPTHS,
    "critical": CRITICAL,
    "eviction": POLICIES,
    "promotion": PROMOTIONS,
    "scan": SCANS,
    "speculate": MODES,
    "in_place": IN_PLACE,
    "drafts": DRAFTS,
}
"""Field of RunSettings -> its values."""


@dataclass(frozen=True)
class RunSettings:
    """How a model is run. Validated at construction.

    Args:
        levels: bits per expert, high to low: (4, 2), (8, 4, 2, 0), (4,).
        rule: one of RULES. None: damage with three or more levels, mean bits or a time per token, else the paper's.
        retention: mean fraction r of critical experts over the layers, above 0, at most 1. Without effect with one
            level. Where levels go by damage it stands for mean bits (bits.bits_of_retention); by the paper's rule it
            has thresholds for all levels (schedule.threshold_counts).
        bits: mean bits per weight, by damage. None: retention.
        tpot_target: seconds that a new token should take: the bits of new tokens change while the model runs, from
            `bits` or the retention's bits on. None: they stay.
        exact: compute at exactly the scheduled level, even where more planes are resident.
        importance: one of SIGNALS.
        heavy_hitters: fraction of a prompt's tokens that count as heavy hitters, above 0, at most 1.
        depth: one of DEPTHS.
        critical: one of CRITICAL.
        renormalise: where experts are skipped, scale the others' gate weights to the previous sum.
        eviction: one of cache.policies.POLICIES.
        promotion: one of PROMOTIONS.
        scan: one of SCANS.
        speculate: one of prefetch.base.MODES.
        remapping: how the tokens of a step of several sequences agree on experts; None: each has its own choice.
        compensation: the choice of a token's experts that are computed with their low-rank compensators, where they run
            at the base level of these; None: no expert.
        compensators_limit: most bytes of compensators in memory, the others are read when a step wants them; None: all
            where they fit together with the planes, else a part.
        hotness: the precision of experts follows how hot they are (DynaExq): an expert has the lower of two levels, and
            the higher one while it is among the hot ones of its layer; steps wait for absent experts alone. None:
            levels are chosen token by token.
        in_place: one of IN_PLACE: whether a device reads experts that only DRAM has where they lie.
        drafts: one of DRAFTS.
        cache: False loads on demand: no expert is kept from one layer to the next.
        readers: threads that read experts; in RAM, while a prompt needs many, prefetch.workers.SCAN_WORKERS of them.

    Raises:
        UserError: names the first setting that is out of its range.
    """

    levels: tuple[int, ...] = (8,)
    rule: str | None = None
    retention: float = 0.75
    bits: float | None = None
    tpot_target: float | None = None
    exact: bool = False
    importance: str = "gate"
    heavy_hitters: float = 0.5
    depth: str = "cosine"
    critical: str = "carry"
    renormalise: bool = False
    eviction: str = "lfru"
    promotion: str = "planes"
    scan: str = "on"
    speculate: str = "off"
    remapping: Remapping | None = None
    compensation: Compensation | None = None
    compensators_limit: int | None = None
    hotness: Hotness | None = None
    in_place: str = "on"
    drafts: str = "off"
    cache: bool = True
    readers: int = 2

    def __post_init__(self) -> None:
        parse_levels(format_levels(self.levels))
        if not 0 < self.retention <= 1:
            found = f"{self.retention}"
            raise UserError("a mean retention above 0, at most 1", found, "use 0.75, the default")
        if not 0 < self.heavy_hitters <= 1:
            hitters = self.heavy_hitters
            raise UserError(
                "a fraction of heavy hitters above 0, at most 1", f"{hitters}", "use 0.5, the default"
            )
        if self.bits is not None:
            low, high = (BITS_PER_WEIGHT[self.levels[i]] for i in (-1, 0))
            if len(self.levels) == 1 or not low < self.bits <= high:
                raise UserError(
                    f"mean bits per weight above {low:g}, at most {high:g}, for levels {format_levels(self.levels)}",
                    f"{self.bits:g}",
                    "give such a number, or --levels 8/4/2/0",
                )
        if self.tpot_target is not None and (self.exact or len(self.levels) == 1 or not self.tpot_target > 0):
            raise UserError(
                "two or more levels and a time above 0, for a time per token",
                f"{self.name} and {self.tpot_target:g} s",
                "give --levels 8/4/2/0 and a time such as 50ms",
            )
        if self.hotness:
            self._require_hot()
        self._require_rule()
        for name, allowed in _CHOICES.items():
            value, option = getattr(self, name), name.replace("_", "-")
            if value not in allowed:
                option = "draft" if name == "drafts" else option
                raise UserError(f"--{option} {' or '.join(allowed)}", repr(value), "choose one of them")

    def _require_rule(self) -> None:
        """Refuses an unknown rule, and means that the paper's rule does not have."""
        if self.rule not in (None, *RULES):
            raise UserError(f"--rule {' or '.join(RULES)}", repr(self.rule), "choose one of them")
        if self.rule == "paper" and (self.bits is not None or self.tpot_target is not None):
            found = "--bits" if self.bits is not None else "--tpot-target"
            raise UserError("levels by retention, for --rule paper", found, "give --retention instead")

    def _require_hot(self) -> None:
        """Refuses what contradicts precision by hotness."""
        if len(self.levels) != 2 or 0 in self.levels:
            found = f"levels {format_levels(self.levels)}"
            raise UserError("two levels above 0, for --policy hotness", found, "give --levels 4/2 or 8/4")
        if self.exact or self.bits is not None or self.tpot_target is not None:
            found = "--exact" if self.exact else "--bits" if self.bits is not None else "--tpot-target"
            raise UserError(
                "levels that follow hotness alone, for --policy hotness", found, "leave that option out"
            )
        if self.promotion != "planes" or not self.cache or is_pooled(self.eviction):
            raise UserError(
                "a cache of planes with blocks for each kind, for --policy hotness",
                f"--promotion {self.promotion} and --eviction {self.eviction}",
                "leave those options out",
            )

    @classmethod
    def uniform(cls, level: int, **others: Any) -> RunSettings:
        """Settings that compute every expert at exactly `level` bits."""
        return cls(levels=(level,), exact=True, **others)

    def with_(self, **changes: Any) -> RunSettings:
        """A copy with some settings changed, validated again."""
        return replace(self, **changes)

    @cached_property
    def priced(self) -> bool:
        """Whether levels go by damage and the price of a bit (damage.py), and not by the paper's ranking."""
        if self.hotness or len(self.levels) == 1:
            return False
        if self.rule is not None:
            return self.rule == "damage"
        return len(self.levels) > 2 or self.bits is not None or self.tpot_target is not None

    @property
    def levels_by(self) -> tuple[object, ...]:
        """The settings that the levels of a prompt's experts depend on, in addition to its tokens and the model.

        Settings with equal values have equal KV. Bits that change while the model runs, for a time per token, are left
        out.
        """
        ranking = [name for name in RANKING if name != "bits" or self.tpot_target is None]
        ranked = tuple(getattr(self, name) for name in ranking) if len(self.scheduled) > 1 else ()
        return self.levels, self.exact, ranked

    @cached_property
    def scheduled(self) -> tuple[int, ...]:
        """The levels that a token's experts are requested at, high to low; hot experts come in the background."""
        return self.levels[-1:] if self.hotness else self.levels

    @property
    def most_drafts(self) -> int:
        """Most guesses in a step. Rules that look at all tokens of a step, or at its time, have none."""
        alone = self.drafts == "off" or self.remapping is not None or self.tpot_target is not None
        most = MOST_HEAD_DRAFTS if self.drafts == "mtp" else MOST_DRAFTS
        return 0 if alone else most

    @property
    def mean_bits(self) -> float:
        """The mean bits per weight of a choice by damage."""
        return bits_of_retention(self.retention, self.levels) if self.bits is None else self.bits

    @property
    def doubt(self) -> str | None:
        """A sentence on settings that are valid and rarely wanted; None: there are none."""
        if len(self.scheduled) == 1 or self.bits is not None or self.retention >= LOW_RETENTION:
            return None
        return (
            f"at a retention of {self.retention:g} most experts get the low level, and answers may be much worse; "
            f"{LOW_RETENTION} and above are measured"
        )

    @property
    def name(self) -> str:
        """A label for tables: "exact 4", "4/2 r 0.75", "8/4/2/0 3.5 bits, lynx 2/4", "8/4/2/0 50 ms"."""
        limit = format_size(self.compensators_limit) if self.compensators_limit is not None else None
        drafts = None if self.drafts == "off" else f"{self.drafts} drafts"
        more = "".join(f", {each}" for each in (self.remapping, self.compensation, limit, drafts) if each)
        if self.hotness:
            return f"{format_levels(self.levels)} {self.hotness}{more}"
        if len(self.levels) == 1:
            return f"{'exact ' if self.exact else ''}{self.levels[0]}{more}"
        if self.tpot_target is not None:
            mean = f"{1000 * self.tpot_target:g} ms"
        elif self.bits is not None:
            mean = f"{self.bits:g} bits"
        else:
            mean = f"r {self.retention:g}"
        mean += f" by {self.rule}" if self.rule else ""
        return f"{format_levels(self.levels)} {mean}{more}"


def parse_levels(text: str) -> tuple[int, ...]:
    """Parses levels: "4/2" -> (4, 2).

    Raises:
        UserError: a part is no level, a level does not fall, or the first is 0.
    """
    try:
        levels = tuple(int(part) for part in text.split("/"))
    except ValueError:
        levels = ()
    falling = all(high > low for high, low in pairwise(levels))
    if not levels or not levels[0] or not falling or not set(levels) <= set(LEVELS):
        raise UserError("falling levels out of 8, 4, 2 and 0", repr(text), "write them as in 4/2 or 8/4/2/0")
    return levels


def format_levels(levels: tuple[int, ...]) -> str:
    """Formats levels: (4, 2) -> "4/2"."""
    return "/".join(map(str, levels))
