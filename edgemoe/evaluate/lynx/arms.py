"""Settings of the studies of remapped experts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from edgemoe.errors import UserError
from edgemoe.evaluate.arm import PHASES, Arm, Variation
from edgemoe.policy.remapping import Movable, Remapping
from edgemoe.policy.settings import RunSettings

FOUR_LEVELS = (8, 4, 2, 0)

LYNX_BATCHES = (8, 16, 32, 64)
LYNX_BINS = ((1, 1), (1, 2), (2, 4), (4, 8), (2, 6))
"""(alpha, bins) of the study of remapped experts; beta / alpha of 2 is the paper's reading, as far as it says."""

PARTS = 6
"""Parts of the depth, of which the study of sensitivity remaps one at a time: the layers of a model of six."""

QUARTERS = 4
"""Parts of a step's tokens, by how sure their router is, of which the study of sensitivity remaps one at a time."""

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


def parts_of(layers: int) -> list[int]:
    """The part of the depth, 0 to PARTS - 1, of each of some layers with experts; fewer layers leave parts empty."""
    return [PARTS * i // layers for i in range(layers)]


def lynx_arms(batches: Sequence[int] = LYNX_BATCHES) -> list[Arm]:
    """Experts that the tokens of a batch agree on, at each number of windows above 1.

    Raises:
        UserError: no number is above 1.
    """
    if max(batches) < 2:
        found = ", ".join(map(str, batches))
        raise UserError("a --batch above 1 for --study lynx", found, "give several tokens that can agree")
    base, bins = RunSettings.uniform(4), [None, *(Remapping(*each) for each in LYNX_BINS)]
    return [
        Arm(base.with_(remapping=each), ("decode",), "lynx", batch)
        for batch, each in product(batches, bins)
        if batch > 1
    ]


def sensitivity_arms() -> list[Arm]:
    """A part of the freedom to agree at a time; the evaluation leaves out ranks that a model's tokens do not have."""
    lynx = Remapping()
    varied = [
        Variation("nothing", only=Movable(bins=())),
        Variation("all"),
        *(Variation(f"bin {i}", only=Movable(bins=(i,))) for i in range(lynx.bins + 1)),
        *(Variation(f"rank {i + 1}", only=Movable(ranks=(i,))) for i in range(MOST_RANKS)),
        *(Variation(f"sixth {i + 1} of the layers", part=i) for i in range(PARTS)),
        *(Variation(f"quarter {i + 1} of the tokens", quarter=i) for i in range(QUARTERS)),
        Variation("neither phase", phases=()),
        *(Variation(f"{phase} alone", phases=(phase,)) for phase in PHASES),
    ]
    base = RunSettings.uniform(4)
    return [Arm(base, ("decode",), "lynx-sensitivity", SENSITIVITY_BATCH, each) for each in varied]


def task_arms() -> list[Arm]:
    """Chat tasks answered several at once."""
    base, first = RunSettings.uniform(4), LYNX_BATCHES[0]
    batches = [(Remapping(), batch) for batch in LYNX_BATCHES]
    bins = [
        (each, SENSITIVITY_BATCH) for each in (Remapping(*pair) for pair in LYNX_BINS) if each != Remapping()
    ]
    agreeing = [
        Arm(base.with_(remapping=each), ("decode",), "lynx-tasks", batch) for each, batch in batches + bins
    ]
    return [Arm(base, ("decode",), "lynx-tasks", first), *agreeing]


def residency_arms() -> list[Arm]:
    """Resident experts first, next to levels by damage."""
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
