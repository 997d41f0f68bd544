"""What `/set` changes in a running chat: one name, one value, checked like the option of that name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from edgemoe.engine.generate import Sampling
from edgemoe.policy.importance import needs_attention
from edgemoe.policy.settings import SIGNALS, RunSettings, format_levels, parse_levels
from prefetch.base import MODES
from storage.errors import UserError


@dataclass(frozen=True)
class Tuning:
    """Everything that can be set between two answers."""

    run: RunSettings
    sampling: Sampling

    def values(self) -> dict[str, str]:
        """Name -> value, as /set takes them."""
        run, sampling = self.run, self.sampling
        return {
            "exact" if run.exact else "levels": format_levels(run.levels),
            "retention": f"{run.retention:g}",
            "importance": run.importance,
            "heavy-hitters": f"{run.heavy_hitters:g}",
            "speculate": run.speculate,
            "temperature": f"{sampling.temperature:g}",
            "top-p": f"{sampling.top_p:g}",
            "max-new-tokens": str(sampling.max_new_tokens),
            "seed": str(sampling.seed),
        }


def changed(now: Tuning, name: str, value: str) -> Tuning:
    """`now` with one setting changed.

    Raises:
        UserError: no such setting, no such value of it, or one that would change nothing.
    """
    if name not in SETTINGS:
        near = get_close_matches(name, SETTINGS, 1)
        raise UserError(
            "a setting was wanted",
            f"got {name!r}",
            f"Did you mean /set {near[0]}?" if near else f"Choose {', '.join(SETTINGS)}",
        )
    try:
        return SETTINGS[name].change(now, value)
    except ValueError:
        raise UserError(
            f"{SETTINGS[name].takes} was wanted for {name}", f"got {value!r}", f"Type /set {name} VALUE"
        ) from None


@dataclass(frozen=True)
class Setting:
    """How one name is set.

    Args:
        takes: what a value is, for people.
        change: raises ValueError where the value is no such thing.
        choices: values to complete to.
    """

    takes: str
    change: Callable[[Tuning, str], Tuning]
    choices: tuple[str, ...] = ()


def _run(now: Tuning, **changes: Any) -> Tuning:
    return replace(now, run=now.run.with_(**changes))


def _scheduling(name: str, convert: Callable[[str], Any]) -> Callable[[Tuning, str], Tuning]:
    """A setting of the schedule, which one level for all does not have."""

    def change(now: Tuning, value: str) -> Tuning:
        if len(now.run.levels) == 1:
            raise UserError(
                f"/set {name} {value} was wanted",
                f"there is one level for all, {now.run.levels[0]}",
                "/set levels 4/2 or another pair first",
            )
        if name == "heavy-hitters" and not needs_attention(now.run.importance):
            raise UserError(
                f"/set {name} {value} was wanted",
                f"importance {now.run.importance} counts none",
                "/set importance heavy-hitters or mix first",
            )
        return _run(now, **{name.replace("-", "_"): convert(value)})

    return change


def _random(
    name: str, convert: Callable[[str], Any], allowed: Callable[[Any], bool]
) -> Callable[[Tuning, str], Tuning]:
    """A setting of the dice, which temperature 0 does not throw."""

    def change(now: Tuning, value: str) -> Tuning:
        if not allowed(number := convert(value)):
            raise ValueError
        if now.sampling.temperature == 0:
            raise UserError(
                f"/set {name} {value} was wanted",
                "at temperature 0 there is no choice",
                "/set temperature 0.7 or another one first",
            )
        return replace(now, sampling=replace(now.sampling, **{name.replace("-", "_"): number}))

    return change


def _temperature(now: Tuning, value: str) -> Tuning:
    number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError
    return replace(now, sampling=replace(now.sampling, temperature=number))


def _max_new_tokens(now: Tuning, value: str) -> Tuning:
    number = int(value)
    if number < 1:
        raise ValueError
    return replace(now, sampling=replace(now.sampling, max_new_tokens=number))


SETTINGS = {
    "levels": Setting(
        "bits from critical to sub-critical experts, as in 4/2,",
        lambda now, value: _run(now, levels=parse_levels(value), exact=False),
        ("8", "4", "8/4", "4/2", "4/0", "8/4/2/0"),
    ),
    "exact": Setting(
        "8, 4 or 2",
        lambda now, value: _run(now, levels=parse_levels(str(int(value))), exact=True),
        ("8", "4", "2"),
    ),
    "retention": Setting("a share from 0.5 to 1", _scheduling("retention", float)),
    "importance": Setting("a signal", _scheduling("importance", str), SIGNALS),
    "heavy-hitters": Setting("a share up to 1", _scheduling("heavy-hitters", float)),
    "speculate": Setting("a mode", lambda now, value: _run(now, speculate=value), MODES),
    "temperature": Setting("a number from 0 on", _temperature),
    "top-p": Setting("a share from 0.01 to 1", _random("top-p", float, lambda p: 0.01 <= p <= 1)),
    "max-new-tokens": Setting("a number from 1 on", _max_new_tokens),
    "seed": Setting("a whole number", _random("seed", int, lambda seed: abs(seed) < 1 << 63)),
}
"""What can be set, by the names of the options."""
