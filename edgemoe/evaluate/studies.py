"""Which settings are measured: the table, and the studies behind the paper's figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal

from edgemoe.errors import UserError
from edgemoe.policy.compensation import Compensation
from edgemoe.policy.hotness import Hotness
from edgemoe.policy.importance import needs_attention
from edgemoe.policy.remapping import Movable, Remapping
from edgemoe.policy.settings import CRITICAL, DEPTHS, SIGNALS, RunSettings

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")

TABLE = "table"
OBSERVED = ("layers", "routing", "similarity")
"""Studies of the bf16 model with one layer lowered, and of what routers choose and see (DyMoE figures 5, 4 and 6)."""

COMPENSATION = "compensation"

STUDIES = (
    *("signals", "depth", "critical", "skipping", "lynx", "lynx-sensitivity", "lynx-tasks", "residency"),
    *(COMPENSATION, *OBSERVED),
)

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

LYNX_BATCHES = (8, 16, 32, 64)
LYNX_BINS = ((1, 1), (1, 2), (2, 4), (4, 8), (2, 6))
"""(alpha, bins) of the study of remapped experts; beta / alpha of 2 is the paper's reading, as far as it says."""

THIRDS = 3
"""Parts of the depth, of which the study of sensitivity remaps one at a time."""

SENSITIVITY_BATCH = 16
MOST_RANKS = 8
"""Ranks of a token's experts, from the likeliest down, of the study of sensitivity."""

RESIDENT_ALPHAS = (32.0, 16.0, 8.0, 4.0, 2.0)
"""Bins for each unit of a logit, within which a resident expert comes first."""

RESIDENT_BITS = (4.25, 3.85, 3.45, 3.05)
"""Mean bits of levels by damage, alone and with resident experts first at COMBINED_ALPHA."""

COMBINED_ALPHA = 16.0

CACHE = 0.4
"""Fraction of all experts' bytes at 4 bits that the cache of the study of residency has."""

COMPENSATORS = sorted(
    product((2, 4), (8, 16, 32), ("uniform", "kurtosis", "error")), key=(2, 16, "uniform").__ne__
)
"""(base level, mean rank, rule) of the study of compensators; of the first, all counts and the first places alone."""

COMPENSATED_PLACES, COMPENSATED_COUNTS = 4, (1, 4, 8)

DEPTH_RETENTION = 0.75
CRITICAL_RETENTIONS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.9)

LOWERED = 2
"""Level of the one layer that the study of layers lowers."""


def signal_name(importance: str, heavy_hitters: float) -> str:
    """A signal that ranks experts, with its fraction of heavy hitters where it counts them: "gate", "mix 0.1"."""
    return f"{importance} {heavy_hitters:g}" if needs_attention(importance) else importance


@dataclass(frozen=True)
class Variation:
    """What a study chooses in the routers' place, by rules that no option has.

    Args:
        name: for tables; distinct within a study.
        remapping: how tokens agree.
        only: experts that may change; None: all but the likeliest.
        third: of the depth, from 0, whose layers agree; None: all.
        phases: of windows whose first half is a prompt, those that agree; None: windows are new tokens throughout.
        alpha: resident experts come first within bins of 1/alpha of a logit, instead; 0: tokens agree.
    """

    name: str
    remapping: Remapping = field(default_factory=Remapping)
    only: Movable | None = None
    third: int | None = None
    phases: tuple[Phase, ...] | None = None
    alpha: float = 0.0

    @property
    def ranks_needed(self) -> int:
        """Experts that a token must have for the rule to change any."""
        return max(self.only.ranks, default=0) + 1 if self.only and self.only.ranks else 0


@dataclass(frozen=True)
class Made:
    """Compensators that a study makes (storage.compensators.making).

    Args:
        rank: mean of the projections.
        rule: that assigns the ranks.
        base_level: whose error they approximate.
    """

    rank: int
    rule: str = "uniform"
    base_level: int = 2

    def __str__(self) -> str:
        """As in tables: "rank 16 uniform"."""
        return f"rank {self.rank} {self.rule}" if self.rank else "the store's"


STORED = Made(0)
"""The compensators that a store has."""


@dataclass(frozen=True)
class Arm:
    """A setting, the phases that it is measured in, and the table or study that it belongs to.

    Args:
        settings: of the engine.
        phases: a row each.
        study: TABLE or one of STUDIES.
        batch: windows that are decoded together, a token of each in a step; or chat tasks at once.
        variation: of the settings, that no option has; None: they are what is measured.
        cache: fraction of all experts' bytes at 4 bits that are in memory at most; 0: as the limits say.
        made: the compensators of settings with compensation.
    """

    settings: RunSettings
    phases: tuple[Phase, ...]
    study: str
    batch: int = 1
    variation: Variation | None = None
    cache: float = 0.0
    made: Made | None = None

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
            "signals": f" {signal_name(settings.importance, settings.heavy_hitters)}",
            "depth": f" {settings.depth}",
            "critical": f" {settings.critical}",
            "skipping": f" {'scaled' if settings.renormalise else 'unscaled'}",
            "lynx": f", batch {self.batch}",
            "lynx-tasks": f", {self.batch} chats",
            "residency": f", cache {self.cache:g}",
            COMPENSATION: "" if self.made else " alone",
        }
        variation = f", {self.variation.name}" if self.variation else f", {self.made}" if self.made else ""
        return settings.name + varied.get(self.study, "") + variation + ("" if settings.exact else " reuse")


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


def hot_arms(arms: Sequence[Arm], hotness: Hotness) -> list[Arm]:
    """Returns the arms of a table with precision by hotness in the place of two levels by rank, in decode only.

    Raises:
        UserError: no arm has two levels above 0.
    """
    changed: dict[str, Arm] = {}
    for given in arms:
        arm, levels = given, given.settings.levels
        if len(levels) == 2 and 0 not in levels:
            settings = RunSettings(levels=levels, hotness=replace(hotness, settled=True))
            arm = Arm(settings, ("decode",), given.study)
        changed[arm.name] = arm
    if not any(arm.settings.hotness for arm in changed.values()):
        raise UserError(
            "two levels above 0, for --policy hotness", ", ".join(changed), "give --levels 4/2 with it"
        )
    return list(changed.values())


def study_arms(study: str) -> list[Arm]:
    """Returns the arms of one study.

    - signals: what ranks experts in prefill, at the same ratio (DyMoE figure 3), with every fraction of heavy hitters;
    - depth: equal or cosine retention over the layers (DyMoE figure 3, section 3.2);
    - critical: the number of critical experts rounded up, or down with the rest carried to the next layer;
    - skipping: with and without scaling the other gate weights up where experts are skipped;
    - lynx: experts that the tokens of a batch agree on (Lynx's figures 11 and 14), at 4 bits;
    - lynx-sensitivity: one bin, rank or third of the depth alone may change, or one phase (Lynx's figures 5 to 9);
    - lynx-tasks: chat tasks answered several at once, with agreement and without, by batch (Lynx's figure 10),
      and by alpha and beta;
    - compensation: low-rank compensators of a part of a token's experts, by count, place, rank, rule and base level;
    - residency: resident experts first, at batch 1 with a cache of CACHE, beside levels by damage.

    A study of OBSERVED has none: it does not run settings.

    Raises:
        UserError: the study is unknown.
    """
    phases = PHASES
    varied: list[tuple[tuple[int, ...], dict[str, Any]]]
    if study in _OWN:
        return _OWN[study]()
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


def _compensation() -> list[Arm]:
    """Those with the same compensators one after another; counts that a model's tokens do not have are left out."""
    plain = [Arm(RunSettings.uniform(level), PHASES, COMPENSATION) for level in (2, 4)]
    chosen = [Compensation(n) for n in range(1, MOST_RANKS + 1)]
    chosen += [Compensation(1, first) for first in range(1, COMPENSATED_PLACES)]
    middle, *others = (Made(rank, rule, level) for level, rank, rule in COMPENSATORS)
    arms = [
        Arm(RunSettings.uniform(2, compensation=each), PHASES, COMPENSATION, made=middle) for each in chosen
    ]
    for made, n in product(others, COMPENSATED_COUNTS):
        settings = RunSettings.uniform(made.base_level, compensation=Compensation(n))
        arms.append(Arm(settings, ("decode",), COMPENSATION, made=made))
    return plain + arms


def _lynx() -> list[Arm]:
    base, bins = RunSettings.uniform(4), [None, *(Remapping(*each) for each in LYNX_BINS)]
    return [
        Arm(base.with_(remapping=each), ("decode",), "lynx", batch)
        for batch, each in product(LYNX_BATCHES, bins)
    ]


def _sensitivity() -> list[Arm]:
    """Ranks that a model's tokens do not have change nothing; the evaluation leaves them out."""
    lynx = Remapping()
    varied = [
        Variation("nothing", only=Movable(bins=())),
        Variation("all"),
        *(Variation(f"bin {i}", only=Movable(bins=(i,))) for i in range(lynx.bins + 1)),
        *(Variation(f"rank {i + 1}", only=Movable(ranks=(i,))) for i in range(MOST_RANKS)),
        *(Variation(f"third {i + 1} of the layers", third=i) for i in range(THIRDS)),
        Variation("neither phase", phases=()),
        *(Variation(f"{phase} alone", phases=(phase,)) for phase in PHASES),
    ]
    base = RunSettings.uniform(4)
    return [Arm(base, ("decode",), "lynx-sensitivity", SENSITIVITY_BATCH, each) for each in varied]


def _tasks() -> list[Arm]:
    base, first = RunSettings.uniform(4), LYNX_BATCHES[0]
    batches = [(Remapping(), batch) for batch in LYNX_BATCHES]
    bins = [
        (each, SENSITIVITY_BATCH) for each in (Remapping(*pair) for pair in LYNX_BINS) if each != Remapping()
    ]
    agreeing = [
        Arm(base.with_(remapping=each), ("decode",), "lynx-tasks", batch) for each, batch in batches + bins
    ]
    return [Arm(base, ("decode",), "lynx-tasks", first), *agreeing]


def _residency() -> list[Arm]:
    four = RunSettings.uniform(4)
    by_damage = [RunSettings(levels=FOUR_LEVELS, bits=bits) for bits in RESIDENT_BITS]
    varied: list[tuple[RunSettings, float]] = [
        *((four, alpha) for alpha in (0.0, *RESIDENT_ALPHAS)),
        *((settings, alpha) for settings in by_damage for alpha in (0.0, COMBINED_ALPHA)),
    ]
    return [
        Arm(
            *(settings, ("decode",), "residency"),
            variation=Variation(f"resident first, alpha {alpha:g}", alpha=alpha) if alpha else None,
            cache=CACHE,
        )
        for settings, alpha in varied
    ]


_OWN: dict[str, Callable[[], list[Arm]]] = {
    "lynx": _lynx,
    "lynx-sensitivity": _sensitivity,
    "lynx-tasks": _tasks,
    "residency": _residency,
    COMPENSATION: _compensation,
}
