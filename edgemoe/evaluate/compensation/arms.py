"""Settings with the store's compensators, and the rows that the study of compensators is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from edgemoe.evaluate.arm import COMPENSATION, STORED, Arm
from edgemoe.evaluate.lynx.arms import FOUR_LEVELS
from edgemoe.evaluate.rows import EvalRow
from edgemoe.policy.bits import BITS_PER_WEIGHT
from edgemoe.policy.compensation import Compensation
from edgemoe.policy.settings import RunSettings

STEP = 0.1
"""Bits per weight, to a multiple of which the rows' bits are rounded."""


def compensated_arms(arms: Sequence[Arm], counts: Iterable[int]) -> list[Arm]:
    """Returns the arms of a table once more with the store's compensators, for each number of a token's experts."""
    return [
        replace(arm, settings=arm.settings.with_(compensation=Compensation(count)), compensators=STORED)
        for count, arm in product(counts, arms)
    ]


def equal_arms(rows: Sequence[EvalRow], highest: int) -> list[Arm]:
    """Settings without compensators that read as many bits as the study's rows: 4/2 and 8/4/2/0, by damage.

    Args:
        rows: measured rows; rows with compensators count.
        highest: highest level of the store.
    """
    read = sorted(
        {
            round((row.bits_per_weight_read or 0) / STEP) * STEP
            for row in rows
            if row.study == COMPENSATION and row.made
        }
    )
    levels = [(4, 2), tuple(level for level in FOUR_LEVELS if level <= highest)]
    settings = [
        RunSettings(levels=each, bits=round(bits, 1), exact=True)
        for each, bits in product(levels, read)
        if bits < BITS_PER_WEIGHT[each[0]]
    ]
    return [Arm(each, ("decode",), COMPENSATION) for each in settings]


def with_gains(rows: Sequence[EvalRow]) -> Iterator[EvalRow]:
    """Adds to each row of the study its KL over its base level's, and how much less KL each additional bit brings.

    Rows without compensators are compared with level 2.
    """
    study = [row for row in rows if row.study == COMPENSATION]
    alone = {(row.levels, row.phase): row for row in study if not row.made and "/" not in row.levels}
    for row in rows:
        base = alone.get((row.levels if row.made else "2", row.phase)) if row.study == COMPENSATION else None
        if base is None or not base.kl or row.kl is None:
            yield row
            continue
        more = (row.bits_per_weight_read or 0) - (base.bits_per_weight_read or 0)
        per_bit = (base.kl - row.kl) / more if more > 0 else None
        yield replace(row, kl_over_base=row.kl / base.kl, kl_less_per_bit=per_bit)
