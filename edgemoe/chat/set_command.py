"""The settings that `/set` changes in a running chat, checked like the options of their names."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from edgemoe.console.durations import parse_duration
from edgemoe.engine.sampling import UNLIMITED, Sampling
from edgemoe.errors import UserError
from edgemoe.models.options.effects import unused_rules
from edgemoe.policy.importance import needs_attention
from edgemoe.policy.settings import CRITICAL, DEPTHS, SIGNALS, RunSettings, format_levels, parse_levels
from edgemoe.prefetch.base import MODES

SWITCH = ("on", "off")

NONE = '""'
"""The value of a setting that is off."""

UNSET = ("off", "none", "auto", "default")
"""Words that turn a setting off, or give it back to edgemoe."""


@dataclass(frozen=True)
class Tuning:
    """The settings that can change between two answers.

    Args:
        run: settings of the model: the bits of experts, and others.
        sampling: how tokens are chosen.
        automatic: the run's settings where neither levels nor bits are chosen; None: as in `run`.
    """

    run: RunSettings
    sampling: Sampling
    automatic: RunSettings | None = None

    def values(self) -> dict[str, str]:
        """Maps each name to its value, in the form that /set takes."""
        run, sampling = self.run, self.sampling
        return {
            "exact" if run.exact else "levels": format_levels(run.levels),
            **_how_many(run),
            "depth": run.depth,
            "critical": run.critical,
            "importance": run.importance,
            "heavy-hitters": f"{run.heavy_hitters:g}",
            "renormalise": "on" if run.renormalise else "off",
            "speculate": run.speculate,
            "temperature": f"{sampling.temperature:g}",
            "top-p": f"{sampling.top_p:g}",
            "top-k": str(sampling.top_k),
            "min-p": f"{sampling.min_p:g}",
            "repeat-penalty": f"{sampling.repetition_penalty:g}",
            "stop": " ".join(sampling.stop_strings) or NONE,
            "max-new-tokens": "-1" if sampling.max_new_tokens == UNLIMITED else str(sampling.max_new_tokens),
            "thinking-budget": "-1" if sampling.thinking_budget is None else str(sampling.thinking_budget),
            "seed": str(sampling.seed),
        }


def _how_many(run: RunSettings) -> dict[str, str]:
    """The setting that decides how many bits there are."""
    if run.tpot_target is not None:
        return {"tpot-target": f"{1000 * run.tpot_target:g}ms"}
    return {"retention": f"{run.retention:g}"} if run.bits is None else {"bits": f"{run.bits:g}"}


def changed(now: Tuning, name: str, value: str) -> Tuning:
    """Returns `now` with one setting changed.

    Raises:
        UserError: no such setting, a wrong value, or a setting without effect.
    """
    if name not in SETTINGS:
        near = get_close_matches(name, SETTINGS, 1)
        action = f"did you mean /set {near[0]}?" if near else f"choose {', '.join(SETTINGS)}"
        raise UserError("the name of a setting", repr(name), action)
    setting = SETTINGS[name]
    if value in UNSET and value not in setting.choices and setting.unset is not None:
        if not isinstance(setting.unset, str):
            return setting.unset(now)
        value = setting.unset
    try:
        return setting.change(now, value)
    except ValueError:
        wanted = f"{setting.takes} for {name}"
        example = setting.example or setting.choices[0]
        raise UserError(wanted, repr(value), f"enter for example /set {name} {example}") from None


@dataclass(frozen=True)
class Setting:
    """How one setting is changed.

    Args:
        takes: a noun phrase for its values.
        change: returns the changed tuning; raises ValueError for a wrong value.
        choices: values for completion.
        example: a value for messages; "": the first choice.
        unset: the value that words of UNSET stand for, or what returns the tuning; None: these words are wrong values.
    """

    takes: str
    change: Callable[[Tuning, str], Tuning]
    choices: tuple[str, ...] = ()
    example: str = ""
    unset: str | Callable[[Tuning], Tuning] | None = None


def _run(now: Tuning, **changes: Any) -> Tuning:
    return replace(now, run=now.run.with_(**changes))


def _ranking(name: str, convert: Callable[[str], Any], **others: Any) -> Callable[[Tuning, str], Tuning]:
    """A setting that ranks experts, which has no effect with one level for all; `others` change with it."""

    def change(now: Tuning, value: str) -> Tuning:
        if now.run.hotness:
            found = "levels that follow hotness, which ranks by use alone"
            raise UserError(f"levels by rank for /set {name} {value}", found, "leave it out")
        if len(now.run.levels) == 1:
            raise UserError(
                f"two or more levels for /set {name} {value}",
                f"one level for all, {now.run.levels[0]}",
                "enter /set levels 4/2 or another pair first",
            )
        _require_effect(now.run, name, value)
        return _run(now, **{name.replace("-", "_"): convert(value)}, **others)

    return change


def _automatic(now: Tuning) -> Tuning:
    """The levels and bits that edgemoe chooses where none are given."""
    own = now.automatic or now.run
    return _run(now, levels=own.levels, retention=own.retention, exact=False, bits=None, tpot_target=None)


def _by_retention(now: Tuning) -> Tuning:
    """Levels by retention, without mean bits and without a time per token."""
    return _run(now, bits=None, tpot_target=None)


def _levels(now: Tuning, value: str) -> Tuning:
    """Several levels keep a mean number of bits per weight where they can have it."""
    levels = parse_levels(value)
    kept = {} if len(levels) > 1 else {"bits": None, "tpot_target": None}
    return _run(now, levels=levels, exact=False, **kept)


def _require_effect(run: RunSettings, name: str, value: str) -> None:
    """Refuses rules for two levels where levels go by damage, heavy hitters that are not counted, and scaling without
    skipping."""
    if run.priced and name.replace("-", "_") in unused_rules(run):
        raise UserError(
            f"two levels that go by retention, for /set {name} {value}",
            f"{run.name}, which goes by damage",
            "enter /set levels 4/2 and /set retention 0.75 first",
        )
    if name == "heavy-hitters" and not needs_attention(run.importance):
        raise UserError(
            f"an importance that counts heavy hitters, for /set {name} {value}",
            f"importance {run.importance}, which counts none",
            "enter /set importance heavy-hitters or mix first",
        )
    if name == "renormalise" and value == "on" and 0 not in run.levels:
        raise UserError(
            f"levels that skip experts, for /set {name} {value}",
            format_levels(run.levels),
            "enter /set levels 4/0 or another list that ends with 0 first",
        )


def _switch(value: str) -> bool:
    if value not in SWITCH:
        raise ValueError
    return value == "on"


def _sampling(
    name: str, convert: Callable[[str], Any], valid: Callable[[Any], bool], *, random: bool = False
) -> Callable[[Tuning, str], Tuning]:
    """A setting of the sampling; `random`: one that has no effect at temperature 0."""

    def change(now: Tuning, value: str) -> Tuning:
        if not valid(number := convert(value)):
            raise ValueError
        if random and now.sampling.temperature == 0:
            raise UserError(
                f"a temperature above 0 for /set {name} {value}",
                "temperature 0, where there is no choice",
                "enter /set temperature 0.7 or another one first",
            )
        return replace(now, sampling=replace(now.sampling, **{name.replace("-", "_"): number}))

    return change


def _budget(value: str) -> int | None:
    return None if value == "-1" else int(value)


SETTINGS = {
    "levels": Setting(
        "bits from critical to sub-critical experts, such as 4/2,",
        _levels,
        ("8", "4", "8/4", "4/2", "4/0", "8/4/2/0"),
        unset=_automatic,
    ),
    "exact": Setting(
        "8, 4 or 2",
        lambda now, value: _run(
            now, levels=parse_levels(str(int(value))), exact=True, bits=None, tpot_target=None
        ),
        ("8", "4", "2"),
        unset=_automatic,
    ),
    "retention": Setting(
        "a fraction above 0, at most 1",
        _ranking("retention", float, bits=None, tpot_target=None),
        example="0.75",
        unset=_automatic,
    ),
    "bits": Setting(
        "mean bits per weight, such as 3.5,",
        _ranking("bits", float, tpot_target=None),
        example="3.5",
        unset=_by_retention,
    ),
    "tpot-target": Setting(
        "a time per token, such as 50ms,",
        _ranking("tpot-target", parse_duration, bits=None),
        example="50ms",
        unset=_by_retention,
    ),
    "depth": Setting("a course over the layers", _ranking("depth", str), DEPTHS),
    "critical": Setting("a rounding", _ranking("critical", str), CRITICAL),
    "importance": Setting("a signal", _ranking("importance", str), SIGNALS),
    "heavy-hitters": Setting("a fraction up to 1", _ranking("heavy-hitters", float), example="0.5"),
    "renormalise": Setting("on or off", _ranking("renormalise", _switch), SWITCH, unset="off"),
    "speculate": Setting("a mode", lambda now, value: _run(now, speculate=value), MODES, unset="off"),
    "temperature": Setting(
        "a number from 0", _sampling("temperature", float, lambda t: 0 <= t < math.inf), example="0.7"
    ),
    "top-p": Setting(
        "a fraction from 0.01 to 1",
        _sampling("top-p", float, lambda p: 0.01 <= p <= 1, random=True),
        example="0.9",
        unset="1",
    ),
    "top-k": Setting(
        "a whole number from 0",
        _sampling("top-k", int, lambda k: k >= 0, random=True),
        example="20",
        unset="0",
    ),
    "min-p": Setting(
        "a fraction up to 1",
        _sampling("min-p", float, lambda p: 0 <= p <= 1, random=True),
        example="0.05",
        unset="0",
    ),
    "repeat-penalty": Setting(
        "a number from 0.01 to 100",
        _sampling("repetition-penalty", float, lambda p: 0.01 <= p <= 100),
        example="1.1",
        unset="1",
    ),
    "stop": Setting(
        f"a text that ends an answer, or {NONE},",
        _sampling("stop-strings", lambda text: () if text == NONE else (text,), lambda texts: True),
        (NONE,),
        unset=NONE,
    ),
    "max-new-tokens": Setting(
        "a whole number from 1, or -1,",
        _sampling("max-new-tokens", lambda n: UNLIMITED if n in ("0", "-1") else int(n), lambda n: n >= 1),
        example="512",
        unset="-1",
    ),
    "thinking-budget": Setting(
        "a number of tokens from 0, or -1 for no limit,",
        _sampling("thinking-budget", _budget, lambda n: n is None or n >= 0),
        example="500",
    ),
    "seed": Setting(
        "a whole number", _sampling("seed", int, lambda n: abs(n) < 1 << 63, random=True), example="1"
    ),
}
"""Every setting, by the name of its option."""
