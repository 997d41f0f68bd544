"""Which of the experts that a device lacks are moved to it, and which the CPU computes where they lie.

Others have found that computing misses on the CPU pays and that it does not: it depends on two speeds, and both fall
when both are at work, since a processor that computes and a device that copies read the same memory. So nothing is
assumed here, and the figures are measured together (cpu_experts.measure_pace).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """Seconds that one expert takes.

    Args:
        computed: by the CPU, one token, while the device copies.
        moved: to the device, while the CPU computes.
        moved_alone: to the device, while the CPU does nothing.
    """

    computed: float
    moved: float
    moved_alone: float


def split(paces: Sequence[Pace]) -> int:
    """How many of the last of some experts the CPU had better compute, beside the others' copies.

    The layer is done when the slower side is. Moving all is the plan to beat, and wins where they are equal.

    Args:
        paces: of each expert, those that had better be moved first.
    """
    count, least = 0, sum(pace.moved_alone for pace in paces)
    for left in range(1, len(paces) + 1):
        moved, computed = paces[:-left], paces[-left:]
        seconds = max(sum(pace.moved for pace in moved), sum(pace.computed for pace in computed))
        if seconds < least:
            count, least = left, seconds
    return count
