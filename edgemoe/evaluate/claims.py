"""Claims of papers, compared with measured rows.

DyMoE, tables 1 and 2, figures 3 to 6; Lynx, figures 9 and 10; router-guided low-rank compensation, table 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from edgemoe.evaluate.arm import COMPENSATION, PHASES, TABLE, Phase, signal_name
from edgemoe.evaluate.observations import RoutingRow, SimilarityRow
from edgemoe.evaluate.rows import BF16, EvalRow, gain

CLOSE = 1.02
"""Largest ratio of a setting's perplexity to bf16's that counts as close."""

BEYOND_NOISE = 2.0
"""Standard errors by which two KLs must differ. Rows share their tokens, so this is a conservative bound."""

HIGH = 0.7
"""Smallest mean correlation of loads, and smallest mean cosine of states, that counts as high."""

POINT = 0.01
"""Accuracy that agreement on experts may cost."""

UNEQUAL_BITS = 0.05
"""Difference in bits per weight from which a comparison mentions it."""


@dataclass(frozen=True)
class Claim:
    """A statement, whether it holds on this model, and the figures that the verdict rests on.

    `holds` is None where the difference is within noise.
    """

    claim: str
    holds: bool | None
    figures: str


def claims_of(rows: Sequence[EvalRow]) -> list[Claim]:
    """Returns every claim that the rows have the figures for; rows without KL count for chat tasks only."""
    measured = [row for row in rows if row.kl is not None]
    makers = (_uniform, _retention, _substitute, _signals, _depth, _layers, _phases, _compensation)
    return [claim for make in makers for claim in make(measured)] + list(_tasks(rows))


def _kl(row: EvalRow) -> float:
    assert row.kl is not None
    return row.kl


def _noise(*rows: EvalRow) -> float:
    """Smallest difference in KL beyond noise, in nats."""
    return BEYOND_NOISE * math.hypot(*(row.kl_stderr or 0 for row in rows))


def _better(row: EvalRow, than: EvalRow) -> bool | None:
    """Returns whether KL is lower; None where the difference is within noise."""
    gap = _kl(than) - _kl(row)
    return None if abs(gap) <= _noise(row, than) else gap > 0


def _compared(text: str, row: EvalRow, than: EvalRow, name: Callable[[EvalRow], object]) -> Claim:
    more = (row.bits_per_weight_read or 0) - (than.bits_per_weight_read or 0)
    caveat = f"; it reads {more:.2f} bits more" if more > UNEQUAL_BITS else ""
    return Claim(text, _better(row, than), _figures((row, than), name) + caveat)


def _figures(rows: Sequence[EvalRow], name: Callable[[EvalRow], object]) -> str:
    return ", ".join(
        f"{name(row)}: KL {_kl(row):.5f} at {row.bits_per_weight_read or 0:.2f} bits" for row in rows
    )


def _table(rows: Sequence[EvalRow], phase: Phase) -> list[EvalRow]:
    return [row for row in rows if row.study == TABLE and row.phase == phase and row.exact]


def _uniform(rows: Sequence[EvalRow]) -> Iterator[Claim]:
    """Table 1: four bits are nearly free, two are not."""
    base = next((row.perplexity for row in rows if row.setting == BF16), None)
    for phase in PHASES:
        by = {row.levels: row.perplexity or 0 for row in _table(rows, phase)}
        if base and {"4", "2"} <= set(by):
            four, two = by["4"] / base, by["2"] / base
            yield Claim(
                f"{phase}: 4 bits keep the model's quality and 2 bits do not (table 1)",
                four <= CLOSE < two,
                f"perplexity over bf16's: 4 bits {four:.3f}, 2 bits {two:.3f}; close is up to {CLOSE}",
            )


def _retention(rows: Sequence[EvalRow]) -> Iterator[Claim]:
    """Table 2, figure 11: the higher the ratio, the better."""
    for phase in PHASES:
        table = _table(rows, phase)
        for levels in dict.fromkeys(row.levels for row in table if "/" in row.levels):
            of_levels = [row for row in table if row.levels == levels and row.retention is not None]
            family = sorted(of_levels, key=lambda row: row.retention or 0)
            if len(family) > 1:
                worse = any(_better(low, high) for low, high in pairwise(family))
                yield Claim(
                    f"{phase}: {levels} gets better with the ratio (table 2, figure 11)",
                    False if worse else _better(family[-1], family[0]),
                    _figures(family, lambda row: f"r {row.retention:g}"),
                )


def _substitute(rows: Sequence[EvalRow]) -> Iterator[Claim]:
    """Table 2: two bits for the sub-critical experts are better than none, and than two for all."""
    for phase in PHASES:
        table = _table(rows, phase)
        mixed = [row for row in table if row.levels == "4/2" and row.retention != 1]
        others = (("4/0", "4/0"), ("2", "uniform 2 bits"))
        for with_two, (other, what), row in product(mixed, others, table):
            if row.levels == other and (other == "2" or row.retention == with_two.retention):
                text = f"{phase}: at r {with_two.retention:g}, 4/2 is better than {what} (table 2)"
                yield _compared(text, with_two, row, lambda row: row.levels)


def _signals(rows: Sequence[EvalRow]) -> Iterator[Claim]:
    """Figure 3: ranking by critical tokens beats chance; and its comparison with plain load."""
    study = [row for row in rows if row.study == "signals"]
    for levels, ratio in dict.fromkeys((row.levels, row.retention) for row in study):
        by = {_signal(row): row for row in study if (row.levels, row.retention) == (levels, ratio)}
        counted = [name for name, row in by.items() if row.importance == "heavy-hitters"]
        pairs = [(name, "random") for name in counted] + [("load", "random")]
        for better, worse in [*pairs, *((name, "load") for name in counted)]:
            if better in by and worse in by:
                text = f"prefill {levels} r {ratio:g}: {better} keeps more than {worse} (figure 3)"
                yield _compared(text, by[better], by[worse], _signal)


def _signal(row: EvalRow) -> str:
    return signal_name(row.importance or "", row.heavy_hitters or 0)


def _depth(rows: Sequence[EvalRow]) -> Iterator[Claim]:
    """Figure 3: less for deep layers is better than the same for all."""
    study = [row for row in rows if row.study == "depth"]
    for levels, phase in dict.fromkeys((row.levels, row.phase) for row in study):
        by = {row.depth: row for row in study if (row.levels, row.phase) == (levels, phase)}
        if {"cosine", "equal"} <= set(by):
            text = f"{phase} {levels}: cosine over depth keeps more than equal (figure 3)"
            yield _compared(text, by["cosine"], by["equal"], lambda row: row.depth)


def _layers(rows: Sequence[EvalRow]) -> Iterator[Claim]:
    """Figure 5: shallow layers are the sensitive ones."""
    study = [row for row in rows if row.study == "layers"]
    for levels in dict.fromkeys(row.levels for row in study):
        family = sorted((row for row in study if row.levels == levels), key=lambda row: row.layer or 0)
        half = len(family) // 2
        if half:
            shallow, deep = (sum(map(_kl, part)) / half for part in (family[:half], family[-half:]))
            yield Claim(
                f"{levels} in one layer: shallow layers are more sensitive than deep ones (figure 5)",
                None if abs(shallow - deep) <= _noise(*family) / half else shallow > deep,
                f"mean KL of the first half {shallow:.5f}, of the second {deep:.5f}; by layer "
                + ", ".join(f"{_kl(row):.5f}" for row in family),
            )


def _phases(rows: Sequence[EvalRow]) -> Iterator[Claim]:
    """Lynx, figure 9: agreement on experts costs more in prompts than in new tokens."""
    by = {row.variation: row for row in rows if row.study == "lynx-sensitivity"}
    prefill, decode = (by.get(f"{phase} alone") for phase in PHASES)
    if prefill and decode:
        text = "new tokens that agree on experts cost less than prompts that do (Lynx, figure 9)"
        yield _compared(text, decode, prefill, lambda row: row.variation)


def _compensation(rows: Sequence[EvalRow]) -> Iterator[Claim]:
    """Router-guided low-rank compensation, table 2: which of a token's experts is compensated matters."""
    study = [row for row in rows if row.study == COMPENSATION and row.compensated == 1]
    by = {(row.made, row.levels, row.phase, row.compensated_first): row for row in study}
    for first in study:
        second = by.get((first.made, first.levels, first.phase, 1))
        if second and first.compensated_first == 0:
            text = f"{first.phase}: the likeliest expert's compensator keeps more than the second's (table 2)"
            yield _compared(text, first, second, lambda row: row.setting)


def _tasks(rows: Sequence[EvalRow]) -> Iterator[Claim]:
    """Lynx, section 5.2: accuracy stays within one point."""
    for row in rows:
        if row.turns and row.active is not None:
            mean, error = gain(row)
            surely, hardly = mean - BEYOND_NOISE * error, mean + BEYOND_NOISE * error
            yield Claim(
                f"{row.setting}: chat tasks stay within {100 * POINT:g} point of each token's own choice (Lynx, 5.2)",
                True if surely >= -POINT else False if hardly < -POINT else None,
                f"{100 * mean:+.2f} points, standard error {100 * error:.2f}, over {row.turns} turns",
            )


def routing_claims(rows: Sequence[RoutingRow]) -> list[Claim]:
    """Figure 4: where many tokens go, many heavy hitters go; for each fraction of heavy hitters."""
    claims = []
    for share in dict.fromkeys(row.heavy_hitters for row in rows):
        found = [
            row.correlation for row in rows if row.heavy_hitters == share and row.correlation is not None
        ]
        if found:
            claims.append(
                Claim(
                    f"experts' loads by the {share:g} heavy hitters follow their loads by all tokens (figure 4)",
                    sum(found) / len(found) >= HIGH,
                    f"mean correlation {sum(found) / len(found):.3f}, high from {HIGH} on; by layer "
                    + ", ".join(f"{each:.3f}" for each in found),
                )
            )
    return claims


def similarity_claims(rows: Sequence[SimilarityRow]) -> list[Claim]:
    """Figure 6: adjacent layers' states are alike over the whole depth."""
    if not rows:
        return []
    found = [row.similarity for row in rows]
    by_layer = ", ".join(f"{each:.3f}" for each in found)
    text = "adjacent layers' router inputs are alike over the whole depth (figure 6)"
    return [
        Claim(
            text,
            min(found) >= HIGH,
            f"lowest mean cosine {min(found):.3f}, high from {HIGH} on; by layer {by_layer}",
        )
    ]
