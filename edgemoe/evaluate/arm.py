"""One setting of an evaluation: its measurements, its phases, and its study."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from edgemoe.policy.importance import needs_attention
from edgemoe.policy.remapping import Movable, Remapping
from edgemoe.policy.settings import RunSettings

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")

TABLE, COMPENSATION = "table", "compensation"
"""The table, and the study whose rows are compared with rows of plain levels."""


def signal_name(importance: str, heavy_hitters: float) -> str:
    """A signal that ranks experts, with its fraction of heavy hitters where it counts them: "gate", "mix 0.1"."""
    return f"{importance} {heavy_hitters:g}" if needs_attention(importance) else importance


BY_PLACE, BY_MEMORY, EVERY_PLANE = "by place", "by memory", "of every plane"
"""Prices of a level by damage: the seconds of missing planes, their bits, or the bits of all planes."""


@dataclass(frozen=True)
class Miss:
    """The treatment of experts that are not in memory; without arguments, it follows the settings.

    Args:
        drop: fraction of a token's mean gate weight below which an absent expert is skipped; 0: none is.
        instead: fraction below which a resident expert runs instead; 0: none does.
        price: BY_PLACE, BY_MEMORY or EVERY_PLANE.
    """

    drop: float = 0.0
    instead: float = 0.0
    price: str = BY_PLACE


@dataclass(frozen=True)
class Variation:
    """The choice that a study makes in the routers' place, by rules that no option has.

    Args:
        name: the row's name in tables; no other variation of a study has it.
        remapping: how tokens agree.
        only: experts that may change; None: all but the likeliest.
        part: the part of the model's layers (lynx.arms.PARTS), counted from 0, that uses the remapping; None: all
            layers.
        quarter: the quarter of a step's tokens that may change, by how sure their router is, counted from the least
            sure (Lynx's figure 5); None: all tokens.
        phases: the phases that use the remapping, where the first half of a window is a prompt; None: the whole
            window is decoded.
        alpha: resident experts come first within bins of 1/alpha of a logit, instead; 0: tokens agree.
        static: an allocation of static_levels and its mean bits per weight, instead; None: tokens choose levels.
        miss: the treatment of experts that are not in a cache; None: it follows the settings.
    """

    name: str
    remapping: Remapping = field(default_factory=Remapping)
    only: Movable | None = None
    part: int | None = None
    quarter: int | None = None
    phases: tuple[Phase, ...] | None = None
    alpha: float = 0.0
    static: tuple[str, float] | None = None
    miss: Miss | None = None

    @property
    def ranks_needed(self) -> int:
        """Experts that a token must have for the rule to change any."""
        return max(self.only.ranks, default=0) + 1 if self.only and self.only.ranks else 0


@dataclass(frozen=True)
class Made:
    """Compensators that a study makes (storage.compensators.making).

    Args:
        rank: mean of the projections.
        rule: name of the rule that assigns the ranks.
        base_level: bits of the experts whose quantization error the compensators approximate.
    """

    rank: int
    rule: str = "uniform"
    base_level: int = 2

    def __str__(self) -> str:
        """The text in tables, such as "rank 16 uniform"."""
        return f"rank {self.rank} {self.rule}" if self.rank else "the store's"


STORED = Made(0)
"""The compensators that a store has."""


@dataclass(frozen=True)
class Arm:
    """A setting, the phases that it is measured in, and the table or study that it belongs to.

    Args:
        settings: the engine's settings.
        phases: phases to measure; each has a row.
        study: TABLE or one of STUDIES.
        batch: windows that are decoded together, a token of each in a step; or chat tasks at once.
        variation: a change to the settings that no option makes; None: the settings are measured as they are.
        cache: fraction of all experts' bytes at 4 bits that are in memory at most; 0: as the limits say.
        dram: the same fraction of a second tier, with a cache; 0: there is none.
        compensators: the compensators of settings with compensation.
    """

    settings: RunSettings
    phases: tuple[Phase, ...]
    study: str
    batch: int = 1
    variation: Variation | None = None
    cache: float = 0.0
    dram: float = 0.0
    compensators: Made | None = None

    @property
    def ranks_needed(self) -> int:
        """Experts that a token must have for the arm to differ from others."""
        own = self.settings.compensation.end if self.settings.compensation else 0
        return max(own, self.variation.ranks_needed if self.variation else 0)

    @property
    def name(self) -> str:
        """Name of the settings, with the option that the study varies; distinct among all arms.

        "reuse" at the end marks settings that are not exact: resident planes above the scheduled level are used.
        """
        settings = self.settings
        varied = {
            TABLE: f", batch {self.batch}" if self.batch > 1 else "",
            "signals": f" {signal_name(settings.importance, settings.heavy_hitters)}",
            "depth": f" {settings.depth}",
            "critical": f" {settings.critical}",
            "skipping": f" {'scaled' if settings.renormalise else 'unscaled'}",
            "lynx": f", batch {self.batch}",
            "lynx-tasks": f", {self.batch} chats",
            "residency": f", cache {self.cache:g}",
            "cache-front": f", cache {self.cache:g}",
            "cache-front-dram": f", cache {self.cache:g} and {self.dram:g}",
            COMPENSATION: "" if self.compensators else " alone",
        }
        variation = (
            f", {self.variation.name}"
            if self.variation
            else f", {self.compensators}"
            if self.compensators
            else ""
        )
        return settings.name + varied.get(self.study, "") + variation + ("" if settings.exact else " reuse")
