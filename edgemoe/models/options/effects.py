"""Refuses options without effect, and warns of settings that are rarely wanted.

Only options that a user has given are refused, never defaults: `options` maps their names to their values.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from edgemoe.errors import UserError
from edgemoe.models.options.declared import flag

if TYPE_CHECKING:
    from edgemoe.policy.settings import RunSettings

LEAVE_OUT = "leave it out"


def require_several(settings: RunSettings, sequences: int, option: str = "") -> None:
    """Refuses --lynx where only one sequence runs at a time.

    Args:
        settings: the settings that the options stand for.
        sequences: number of sequences that run at once.
        option: makes them more, such as "--parallel 8"; empty: nothing does.
    """
    if settings.remapping and sequences == 1:
        action = f"give {option}, or leave --lynx out" if option else "leave --lynx out"
        raise UserError("several sequences at once, for --lynx", "one", action)


def require_one_mean(options: Mapping[str, Any]) -> list[str]:
    """Returns which of retention, bits and wanted time is given; refuses two of them."""
    rivals = [name for name in ("retention", "bits", "tpot_target") if name in options]
    if len(rivals) > 1:
        found = " and ".join(_written(name, options[name]) for name in rivals)
        raise UserError("one of --retention, --bits and --tpot-target", found, "leave the others out")
    return rivals


def require_no_ranking(options: Mapping[str, Any], finding: str) -> None:
    """Refuses options that rank experts where all of them have one level; `finding` says which."""
    for option in _ranking(options):
        raise UserError(
            f"two or more levels for {option}", finding, "give --levels 4/2 or another pair with it"
        )


def require_no_ranking_beside_hotness(options: Mapping[str, Any]) -> None:
    """Refuses options that rank experts by the gate weights of a step where levels follow hotness."""
    for option in _ranking(options):
        found = "--policy hotness, which ranks by use alone"
        raise UserError(f"--policy dymoe for {option}", found, LEAVE_OUT)


def require_paper_rules(settings: RunSettings, options: Mapping[str, Any]) -> None:
    """Refuses options of DyMoE's rules for two levels where levels go by damage."""
    for name in unused_rules(settings):
        if name in options:
            raise UserError(
                f"two levels that go by retention, for {_written(name, options[name])}",
                f"{settings.name}, which goes by damage",
                LEAVE_OUT,
            )


def unused_rules(settings: RunSettings) -> tuple[str, ...]:
    """DyMoE's rules for two levels that have no effect on these settings.

    Look-ahead at critical experts alone counts them by depth and rounding also where levels go by damage.
    """
    if not settings.priced:
        return ()
    counted = ("depth", "critical") if settings.speculate != "critical" else ()
    return ("importance", "heavy_hitters", *counted)


def require_effect(settings: RunSettings, options: Mapping[str, Any]) -> None:
    """Refuses a fraction of heavy hitters that is not counted, --renormalise where no expert is skipped, and --draft
    with settings that have no guesses.
    """
    from edgemoe.policy.importance import needs_attention

    if options.get("heavy_hitters") is not None and not needs_attention(settings.importance):
        raise UserError(
            f"an importance that counts heavy hitters, for --heavy-hitters {settings.heavy_hitters}",
            f"--importance {settings.importance}, which counts none",
            "give --importance heavy-hitters or mix with it",
        )
    if settings.drafts != "off" and not settings.most_drafts:
        found = "--lynx" if settings.remapping else "--tpot-target"
        raise UserError(f"tokens that are chosen one by one, for --draft {settings.drafts}", found, LEAVE_OUT)
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


def _ranking(options: Mapping[str, Any]) -> list[str]:
    """The options that rank experts, as they were given."""
    from edgemoe.policy.settings import RANKING

    return [_written(name, options[name]) for name in RANKING if options.get(name) not in (None, False)]


def _written(name: str, value: Any) -> str:
    """An option on a command line with its value, which a switch does not have."""
    return flag(name) if value is True else f"{flag(name)} {value}"
