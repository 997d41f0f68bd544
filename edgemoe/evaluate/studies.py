"""Which settings are measured: the table, and the studies behind the paper's figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from edgemoe.policy.importance import needs_attention
from edgemoe.policy.remapping import Remapping
from edgemoe.policy.settings import CRITICAL, DEPTHS, SIGNALS, RunSettings
from storage.errors import UserError

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")

TABLE = "table"
OBSERVED = ("layers", "routing", "similarity")
"""Studies of the bf16 model with one layer lowered, and of what routers choose and see (DyMoE figures 5, 4 and 6)."""

STUDIES = ("signals", "depth", "critical", "skipping", "lynx", *OBSERVED)

FOUR_LEVELS = (8, 4, 2, 0)

TASK_LEVELS: tuple[tuple[int, ...], ...] = ((8,), (4,), (2,), (4, 2), (4, 0))
"""Levels of the table without a text: tasks take longer than a text."""

TABLE_LEVELS: tuple[tuple[int, ...], ...] = (*TASK_LEVELS, (8, 4), FOUR_LEVELS)
"""Levels of the paper's Tables 1 and 2, then 8 bits and four levels at once, which the paper does not have."""

TASK_RETENTIONS = (0.75,)
TABLE_RETENTIONS = (0.75, 0.9, 1.0)

STUDIED_LEVELS = ((4, 2), (4, 0))
SIGNAL_RETENTIONS = (0.5, 0.75, 0.9)
SIGNAL_SHARES = (0.05, 0.1, 0.2, 0.5)
"""Fractions of heavy hitters, for signals that count them."""

LYNX_BATCHES = (8, 16, 32)
LYNX_BINS = ((1, 1), (1, 2), (2, 4), (4, 8), (2, 6))
"""(alpha, bins) of the study of remapped experts; beta / alpha of 2 is the paper's reading, as far as it says."""

DEPTH_RETENTION = 0.75
CRITICAL_RETENTIONS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.9)

LOWERED = 2
"""Level of the one layer that the study of layers lowers."""


def signal_name(importance: str, heavy_hitters: float) -> str:
    """A signal that ranks experts, with its fraction of heavy hitters where it counts them: "gate", "mix 0.1"."""
    return f"{importance} {heavy_hitters:g}" if needs_attention(importance) else importance


@dataclass(frozen=True)
class Arm:
    """A setting, the phases that it is measured in, and the table or study that it belongs to.

    Args:
        settings: of the engine.
        phases: a row each.
        study: TABLE or one of STUDIES.
        batch: windows that are decoded together, a token of each in a step.
    """

    settings: RunSettings
    phases: tuple[Phase, ...]
    study: str
    batch: int = 1

    @property
    def name(self) -> str:
        """Name of the settings, with the option that the study varies; distinct among all arms.

        "reuse" at the end marks settings that are not exact: resident planes above the scheduled level are used.
        """
        settings = self.settings
        varied = {
            "signals": f" {signal_name(settings.importance, settings.heavy_hitters)}",
            "depth": f" {settings.depth}",
            "critical": f" {settings.critical}",
            "skipping": f" {'scaled' if settings.renormalise else 'unscaled'}",
            "lynx": f", batch {self.batch}",
        }
        return settings.name + varied.get(self.study, "") + ("" if settings.exact else " reuse")


def table_arms(
    levels: Sequence[tuple[int, ...]],
    retentions: Sequence[float],
    ranking: Mapping[str, Any] | None = None,
    bits: Sequence[float] = (),
    *,
    reuse: bool,
) -> list[Arm]:
    """Returns the arms of the table: mixed levels at every retention, uniform levels once.

    Args:
        levels: bits per expert, high to low, of each setting.
        retentions: mean fraction of critical experts, above 0, at most 1.
        ranking: other fields of the settings that rank experts; None: their defaults.
        bits: mean bits a weight of settings of three or more levels, in place of retentions.
        reuse: adds each mixed setting once more, with resident planes above the scheduled level used.
    """
    arms = []
    for each in levels:
        varied: list[dict[str, Any]] = [{"retention": r} for r in (retentions if len(each) > 1 else (1.0,))]
        if bits and len(each) > 2:
            varied = [{"bits": wanted} for wanted in bits]
        for changes in varied:
            settings = RunSettings(levels=each, exact=True, **changes, **ranking or {})
            arms.append(Arm(settings, PHASES, TABLE))
            if reuse and len(each) > 1:
                arms.append(Arm(settings.with_(exact=False), PHASES, TABLE))
    return arms


def study_arms(study: str) -> list[Arm]:
    """Returns the arms of one study.

    - signals: what ranks experts in prefill, at the same ratio (DyMoE figure 3), with every fraction of heavy hitters;
    - depth: equal or cosine retention over the layers (DyMoE figure 3, section 3.2);
    - critical: the number of critical experts rounded up, or down with the rest carried to the next layer;
    - skipping: with and without scaling the other gate weights up where experts are skipped;
    - lynx: experts that the tokens of a batch agree on (Lynx's figures 11 and 14), at 4 bits.

    A study of OBSERVED has none: it does not run settings.

    Raises:
        UserError: the study is unknown.
    """
    phases = PHASES
    varied: list[tuple[tuple[int, ...], dict[str, Any]]]
    if study == "lynx":
        base = RunSettings.uniform(4)
        bins = [None, *(Remapping(*each) for each in LYNX_BINS)]
        return [
            Arm(base.with_(remapping=each), ("decode",), study, batch)
            for batch, each in product(LYNX_BATCHES, bins)
        ]
    if study == "signals":
        phases = ("prefill",)
        ranked: list[dict[str, Any]] = [
            {"importance": signal, "heavy_hitters": share}
            for signal in SIGNALS
            for share in (SIGNAL_SHARES if needs_attention(signal) else SIGNAL_SHARES[-1:])
        ]
        varied = [
            (levels, {"retention": r, **ranking})
            for levels, r, ranking in product(STUDIED_LEVELS, SIGNAL_RETENTIONS, ranked)
        ]
    elif study == "depth":
        varied = [(levels, {"depth": depth}) for levels in STUDIED_LEVELS for depth in DEPTHS]
    elif study == "critical":
        phases = ("decode",)
        triples = product(STUDIED_LEVELS, CRITICAL_RETENTIONS, CRITICAL)
        varied = [(levels, {"retention": r, "critical": rounding}) for levels, r, rounding in triples]
    elif study == "skipping":
        varied = [
            (levels, {"renormalise": scale}) for levels in ((4, 0), FOUR_LEVELS) for scale in (False, True)
        ]
    elif study in OBSERVED:
        varied = []
    else:
        raise UserError(f"one of {', '.join(STUDIES)} for --study", repr(study), "choose one of them")
    base = RunSettings(retention=DEPTH_RETENTION, exact=True)
    return [Arm(base.with_(levels=levels, **changes), phases, study) for levels, changes in varied]
