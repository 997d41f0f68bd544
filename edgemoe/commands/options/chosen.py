"""RunSettings of the options that are given, and what their combinations mean."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any

from edgemoe.commands.options.settings import POLICIES, HotnessOptions, LevelOptions, StepSettingOptions
from edgemoe.console.durations import parse_duration
from edgemoe.console.sizes import parse_size
from edgemoe.errors import UserError
from edgemoe.storage.base import LEVELS

if TYPE_CHECKING:
    from edgemoe.policy.compensation import Compensation
    from edgemoe.policy.hotness import Hotness
    from edgemoe.policy.remapping import Remapping
    from edgemoe.policy.settings import RunSettings


AUTO_RETENTION = 0.9
"""Of automatic levels where not every expert fits."""


def run_settings(max_level: int, *, fits: bool = True, hot: bool = False, **options: Any) -> RunSettings:
    """Makes the settings of a command line.

    Args:
        max_level: of the store.
        fits: all experts fit at that level, which they get then where levels are automatic.
        hot: --policy auto is hotness, where levels allow it.
        options: fields of StepSettingOptions.

    Raises:
        UserError: a value out of its range, two options that exclude each other, or an option without effect.
    """
    from edgemoe.policy.settings import RunSettings

    given = StepSettingOptions(**options)
    levels, exact = _given_levels(given.exact, given.levels), given.exact is not None
    chosen = {name: value for name, value in vars(given).items() if value is not None}
    remapping, compensation = take_remapping(chosen), take_compensation(chosen, levels)
    rivals = require_one_mean(chosen)
    two = levels is None or (len(levels) == 2 and 0 not in levels)
    hotness = take_hotness(chosen, automatic=hot and two and not rivals and max_level > 2)
    if levels is None:
        if hotness and (rivals or max_level == 2):
            found = f"--{rivals[0].replace('_', '-')}" if rivals else "a store of 2 bits"
            raise UserError(
                "two levels that follow hotness, for --policy hotness", found, "leave one of them out"
            )
        levels, more = _automatic(max_level, rivals, fits=fits) if fits or not hotness else ((4, 2), {})
        hotness = hotness if len(levels) > 1 else None
        chosen |= more
    if len(levels) == 1:
        require_no_ranking(chosen, f"one level for all, {levels[0]}")
    elif hotness:
        require_no_ranking(chosen, "--policy hotness, which ranks by use alone")
    if given.tpot_target is not None:
        chosen["tpot_target"] = parse_duration(given.tpot_target)
    # The library's own default, in RunSettings, is off.
    own = {"levels": levels, "exact": exact, "remapping": remapping, "compensation": compensation}
    settings = RunSettings(**{"speculate": "auto"} | chosen | own, hotness=hotness)
    require_signals(settings, chosen)
    require_effect(settings, chosen)
    warn_of_doubt(settings)
    return settings


def take_remapping(chosen: dict[str, Any]) -> Remapping | None:
    """Takes the options of --lynx out of `chosen`, option's name -> value, and makes the setting of them.

    Raises:
        UserError: one of them without --lynx, or out of its range.
    """
    from edgemoe.policy.remapping import Remapping

    names = {"lynx_alpha": "alpha", "lynx_beta": "bins"}
    given = {names[name]: chosen.pop(name) for name in names if chosen.get(name) is not None}
    if chosen.pop("lynx", False):
        return Remapping(**given)
    if given:
        option = "--lynx-alpha" if "alpha" in given else "--lynx-beta"
        raise UserError(f"--lynx for {option}", "none", "give --lynx too, or leave it out")
    return None


def take_compensation(chosen: dict[str, Any], levels: tuple[int, ...] | None) -> Compensation | None:
    """Takes --compensate out of `chosen`, option's name -> value, and makes the setting of it, with its limit in bytes.

    Args:
        chosen: changed.
        levels: given ones; None: automatic.

    Raises:
        UserError: automatic levels, which may leave out the compensators' own, a number out of its range, or a limit
            without compensators.
    """
    from edgemoe.policy.compensation import Compensation

    count, limit = chosen.pop("compensate", None), chosen.pop("compensators_limit", None)
    if count is None:
        if limit is not None:
            raise UserError(
                f"--compensate for --compensators-limit {limit}", "none", "give --compensate 1 with it"
            )
        return None
    if limit is not None:
        chosen["compensators_limit"] = parse_size(limit)
    if levels is None and not {"bits", "tpot_target"} & {*chosen}:
        wanted = f"levels that the store's compensators are of, for --compensate {count}"
        raise UserError(wanted, "automatic levels", "give --levels 4/2 with it")
    return Compensation(count)


def take_hotness(chosen: dict[str, Any], *, automatic: bool) -> Hotness | None:
    """Takes the options of --policy out of `chosen`, option's name -> value, and makes the setting of them.

    Args:
        chosen: changed.
        automatic: whether --policy auto is hotness.

    Raises:
        UserError: no such policy, an option of another policy, or one out of its range.
    """
    from edgemoe.policy.hotness import Hotness

    policy = chosen.pop("policy", None) or POLICIES[0]
    if policy not in POLICIES:
        raise UserError(f"--policy {' or '.join(POLICIES)}", repr(policy), "choose one of them")
    given = {f.name: chosen.pop(f.name) for f in fields(HotnessOptions) if chosen.get(f.name) is not None}
    if policy == POLICIES[0]:
        if given:
            option = f"--{next(iter(given)).replace('_', '-')}"
            raise UserError(
                f"--policy hotness for {option}", "--policy dymoe", "give it, or leave the other out"
            )
        return None
    if policy == "auto" and not automatic:
        return None
    named = {name.removeprefix("hot_"): value for name, value in given.items()}
    if "hotness" in named:
        named["signal"] = named.pop("hotness")
    if "migration_rate" in named:
        named["rate"] = float(parse_size(named.pop("migration_rate")))
    if (interval := named.pop("interval", None)) is not None:
        tokens = interval.removesuffix("t")
        by_token = interval.endswith("t") and tokens.isdecimal()
        named |= (
            {"interval": int(tokens)} if by_token else {"interval": 0, "seconds": parse_duration(interval)}
        )
    return Hotness(**named)


def require_several(settings: RunSettings, sequences: int, option: str) -> None:
    """Refuses --lynx where only one sequence runs at a time.

    Args:
        settings: of the command.
        sequences: at once.
        option: of the command, that makes them more.
    """
    if settings.remapping and sequences == 1:
        raise UserError("several sequences at once, for --lynx", "one", f"give {option}, or leave --lynx out")


def require_one_mean(chosen: Mapping[str, Any]) -> list[str]:
    """Returns which of retention, bits and wanted time is given; refuses two of them."""
    rivals = [name for name in ("retention", "bits", "tpot_target") if name in chosen]
    if len(rivals) > 1:
        found = " and ".join(f"--{name.replace('_', '-')} {chosen[name]}" for name in rivals)
        raise UserError("one of --retention, --bits and --tpot-target", found, "leave the others out")
    return rivals


def levels_are_automatic(given: LevelOptions) -> bool:
    """Whether run_settings chooses the levels by what fits."""
    others = given.exact, given.bits, given.tpot_target
    return given.levels in (None, "auto") and others == (None, None, None)


def describe_levels(given: LevelOptions, settings: RunSettings) -> list[str]:
    """A line on automatic levels, for people; none where they were given."""
    if not levels_are_automatic(given):
        return []
    some = len(settings.levels) > 1
    why = f"not every expert fits at {settings.levels[0]} bits" if some else "every expert fits"
    return [f"levels auto: {settings.name}, since {why}"]


def _automatic(max_level: int, rivals: list[str], *, fits: bool) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Levels where none are given, and the settings that go with them."""
    every = tuple(level for level in LEVELS if level <= max_level)
    if {"bits", "tpot_target"} & {*rivals}:
        return every, {}
    if fits or max_level == 2:
        return (max_level,), {}
    return every if max_level == 8 else (4, 2), {"retention": AUTO_RETENTION}


def require_no_ranking(chosen: Mapping[str, Any], found: str) -> None:
    """Refuses options that rank experts.

    Args:
        chosen: option's name -> value; None and False: not given.
        found: why they have no effect, for the error.
    """
    from edgemoe.policy.settings import RANKING

    for name in RANKING:
        if chosen.get(name) not in (None, False):
            option = f"--{name.replace('_', '-')}"
            wanted = f"{option} {chosen[name]}" if name != "renormalise" else option
            raise UserError(
                f"two or more levels for {wanted}", found, "give --levels 4/2 or another pair with it"
            )


def require_signals(settings: RunSettings, chosen: Mapping[str, Any]) -> None:
    """Refuses signals of importance where levels go by damage."""
    for name in ("importance", "heavy_hitters"):
        if name in chosen and settings.priced:
            raise UserError(
                f"two levels that go by retention, for --{name.replace('_', '-')} {chosen[name]}",
                f"{settings.name}, which goes by damage",
                "leave that option out, or give --levels 4/2 without --bits",
            )


def require_effect(settings: RunSettings, chosen: Mapping[str, Any]) -> None:
    """Refuses a fraction of heavy hitters that is not counted, and --renormalise where no expert is skipped."""
    from edgemoe.policy.importance import needs_attention

    if chosen.get("heavy_hitters") is not None and not needs_attention(settings.importance):
        raise UserError(
            f"an importance that counts heavy hitters, for --heavy-hitters {settings.heavy_hitters}",
            f"--importance {settings.importance}, which counts none",
            "give --importance heavy-hitters or mix with it",
        )
    if settings.renormalise and 0 not in settings.levels:
        raise UserError(
            "levels that skip experts, for --renormalise",
            "/".join(map(str, settings.levels)),
            "give --levels 4/0 or another list that ends with 0, or leave --renormalise out",
        )


def warn_of_doubt(settings: RunSettings) -> None:
    """Logs the doubt about settings, if there is one; each once a process."""
    if settings.doubt:
        _warn(settings.doubt)


@cache
def _warn(sentence: str) -> None:
    logging.getLogger("edgemoe").warning("%s", sentence)


def _given_levels(exact: int | None, levels: str | None) -> tuple[int, ...] | None:
    """Parses --exact or --levels, high to low; None where neither is given."""
    from edgemoe.policy.settings import parse_levels

    if exact is not None and levels is not None:
        raise UserError(
            "either --exact or --levels",
            f"--exact {exact} and --levels {levels}",
            "leave one of the two out (--exact N computes every expert at N bits, whatever planes are in memory)",
        )
    if exact is None:
        return parse_levels(levels) if levels not in (None, "auto") else None
    if exact not in (8, 4, 2):
        raise UserError("a level of 8, 4 or 2 bits for --exact", str(exact), "choose one of them")
    return (exact,)
