"""Rows of the study of compensators, and settings without any that read as many bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from edgemoe.evaluate.rows import EvalRow
from edgemoe.evaluate.studies import FOUR_LEVELS, MOST_RANKS, PHASES, Arm, Made
from edgemoe.policy.bits import BITS_PER_WEIGHT
from edgemoe.policy.compensation import Compensation
from edgemoe.policy.settings import RunSettings

STUDY = "compensation"

RANKS = (8, 16, 32)
"""Mean ranks of a projection."""

RULES = ("uniform", "kurtosis", "error")

MIDDLE = Made(16)
"""The compensators of which all counts, and the first places alone, are measured."""

COUNTS = (1, 4, 8)
"""Experts of a token, of every other rank, rule and base level."""

PLACES = 4


def compensation_arms() -> list[Arm]:
    """The rows of the study, those with the same compensators one after another.

    Both base levels without compensators; with MIDDLE every count of a token's experts, and each of the first places
    alone; with every mean rank, rule and base level the likeliest expert, and more. The evaluation leaves out counts
    that a model's tokens do not have.
    """
    plain = [Arm(RunSettings.uniform(level), PHASES, STUDY) for level in (2, 4)]
    chosen = [Compensation(n) for n in range(1, MOST_RANKS + 1)]
    chosen += [Compensation(1, first) for first in range(1, PLACES)]
    middle = [Arm(RunSettings.uniform(2, compensation=each), PHASES, STUDY, made=MIDDLE) for each in chosen]
    others = [Made(rank, rule, level) for level, rank, rule in product((2, 4), RANKS, RULES)]
    return [
        *(*plain, *middle),
        *(
            Arm(_uniform(made, count), ("decode",), STUDY, made=made)
            for made, count in product(others, COUNTS)
            if made != MIDDLE
        ),
    ]


def _uniform(made: Made, count: int) -> RunSettings:
    return RunSettings.uniform(made.base_level, compensation=Compensation(count))


def equal_arms(rows: Sequence[EvalRow], most: int) -> list[Arm]:
    """Settings without compensators that read as many bits as the study's rows: 4/2 and 8/4/2/0, by damage.

    Args:
        rows: measured; those with compensators count.
        most: highest level of the store.
    """
    read = sorted({round(row.bits_per_weight_read or 0, 2) for row in rows if row.made})
    levels = [(4, 2), tuple(level for level in FOUR_LEVELS if level <= most)]
    settings = [
        RunSettings(levels=each, bits=bits, exact=True)
        for each, bits in product(levels, read)
        if bits < BITS_PER_WEIGHT[each[0]]
    ]
    return [Arm(each, ("decode",), STUDY) for each in settings]


def with_gains(rows: Sequence[EvalRow]) -> Iterator[EvalRow]:
    """The rows of the study beside their base level alone: KL over its KL, and KL less for each bit that is read more.

    Rows without compensators are beside level 2.
    """
    alone = {(row.setting, row.phase): row for row in rows if row.study == STUDY}
    for row in rows:
        base = (
            alone.get((f"exact {row.levels if row.made else 2}", row.phase)) if row.study == STUDY else None
        )
        if base is None or not base.kl or row.kl is None:
            yield row
            continue
        more = (row.bits_per_weight_read or 0) - (base.bits_per_weight_read or 0)
        per_bit = (base.kl - row.kl) / more if more > 0 else None
        yield replace(row, kl_over_base=row.kl / base.kl, kl_less_per_bit=per_bit)
