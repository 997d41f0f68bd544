"""RunSettings of the options that are given, and what their combinations mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from edgemoe.console.durations import parse_duration
from edgemoe.errors import UserError
from edgemoe.models.options import effects
from edgemoe.models.options.declared import flag
from edgemoe.models.options.papers import take_compensation, take_hotness, take_remapping
from edgemoe.models.options.settings import SettingOptions
from edgemoe.storage.base import LEVELS

if TYPE_CHECKING:
    from edgemoe.policy.hotness import Hotness
    from edgemoe.policy.settings import RunSettings


AUTO_RETENTION = 0.9
"""Retention of automatic levels where not every expert fits."""

Levels = tuple[int, ...]


def run_settings(max_level: int, *, fits: bool = True, hot: bool = False, **options: Any) -> RunSettings:
    """Makes the settings that options stand for.

    Args:
        max_level: highest level of the store.
        fits: all experts fit at that level, which they get then where levels are automatic.
        hot: --policy auto is hotness, where levels allow it.
        options: fields of SettingOptions.

    Raises:
        UserError: a value out of its range, two options that exclude each other, or an option without effect.
    """
    from edgemoe.policy.settings import RunSettings

    given = SettingOptions(**options)
    levels, exact = _given_levels(given.exact, given.levels), given.exact is not None
    chosen = {name: value for name, value in vars(given).items() if value is not None and value is not False}
    remapping, compensation = take_remapping(chosen), take_compensation(chosen, levels)
    rivals = effects.require_one_mean(chosen)
    two = levels is None or (len(levels) == 2 and 0 not in levels)
    hotness = take_hotness(chosen, automatic=hot and two and not rivals and max_level > 2)
    if levels is None:
        levels, hotness, more = _automatic(max_level, rivals, hotness, fits=fits)
        chosen |= more
    if len(levels) == 1:
        effects.require_no_ranking(chosen, f"one level for all, {levels[0]}")
    elif hotness:
        effects.require_no_ranking_beside_hotness(chosen)
    if given.tpot_target is not None:
        chosen["tpot_target"] = parse_duration(given.tpot_target)
    # The library's own default, in RunSettings, is off.
    own = {"levels": levels, "exact": exact, "remapping": remapping, "compensation": compensation}
    own |= {"drafts": chosen.pop("draft", "off"), "hotness": hotness}
    settings = RunSettings(**{"speculate": "auto"} | _of_paper(chosen) | chosen | own)
    effects.require_paper_rules(settings, chosen)
    effects.require_effect(settings, chosen)
    effects.warn_of_doubt(settings)
    return settings


def _of_paper(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that --rule paper stands for, where no option of theirs is given."""
    from edgemoe.policy.settings import PAPER_CACHE, PAPER_RANKING

    return PAPER_RANKING | PAPER_CACHE if chosen.get("rule") == "paper" else {}


def _automatic(
    max_level: int, rivals: list[str], hotness: Hotness | None, *, fits: bool
) -> tuple[Levels, Hotness | None, dict[str, Any]]:
    """Chooses levels where none are given.

    Args:
        max_level, fits: see run_settings.
        rivals: the option that decides the mean of the bits, or none.
        hotness: the hotness that the options stand for; None: no hotness.

    Returns:
        the levels; the hotness, where several levels are left; and settings that go with the levels.

    Raises:
        UserError: hotness, and an option or a store that allows no two levels.
    """
    if hotness and (rivals or max_level == 2):
        found = flag(rivals[0]) if rivals else "a store of 2 bits"
        raise UserError(
            "two levels that follow hotness, for --policy hotness", found, "leave one of them out"
        )
    every = tuple(level for level in LEVELS if level <= max_level)
    if {"bits", "tpot_target"} & {*rivals}:
        return every, hotness, {}
    if fits or max_level == 2:
        return (max_level,), None, {}
    if hotness:
        return (4, 2), hotness, {}
    return every if max_level == 8 else (4, 2), None, {"retention": AUTO_RETENTION}


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
