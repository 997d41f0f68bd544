"""The settings of the papers' methods, made of their options: Lynx, low-rank compensation, DynaExq's hotness."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from edgemoe.console.durations import parse_duration
from edgemoe.console.sizes import parse_size
from edgemoe.errors import UserError
from edgemoe.models.options.declared import flag
from edgemoe.models.options.settings import POLICIES, HotnessOptions

if TYPE_CHECKING:
    from edgemoe.policy.compensation import Compensation
    from edgemoe.policy.hotness import Hotness
    from edgemoe.policy.remapping import Remapping


def take_remapping(options: dict[str, Any]) -> Remapping | None:
    """Takes the options of --lynx out of `options`, option's name -> value, and makes the setting of them.

    Raises:
        UserError: one of them without --lynx, or out of its range.
    """
    from edgemoe.policy.remapping import Remapping

    names = {"lynx_alpha": "alpha", "lynx_beta": "bins"}
    given = {names[name]: options.pop(name) for name in names if options.get(name) is not None}
    if options.pop("lynx", False):
        return Remapping(**given)
    if given:
        option = "--lynx-alpha" if "alpha" in given else "--lynx-beta"
        raise UserError(f"--lynx for {option}", "none", "give --lynx too, or leave it out")
    return None


def take_compensation(options: dict[str, Any], levels: tuple[int, ...] | None) -> Compensation | None:
    """Takes --compensate and its limit out of `options`, option's name -> value, and makes the setting of it.

    Args:
        options: option's name -> value; the ones that are taken are removed.
        levels: given ones; None: automatic.

    Raises:
        UserError: automatic levels, which may leave out the compensators' own, a number out of its range, or a limit
            without compensators.
    """
    from edgemoe.policy.compensation import Compensation

    count, limit = options.pop("compensate", None), options.pop("compensators_limit", None)
    if count is None:
        if limit is not None:
            raise UserError(
                f"--compensate for --compensators-limit {limit}", "none", "give --compensate 1 with it"
            )
        return None
    if limit is not None:
        options["compensators_limit"] = parse_size(limit)
    if levels is None and not {"bits", "tpot_target"} & {*options}:
        wanted = f"levels that the store's compensators are of, for --compensate {count}"
        raise UserError(wanted, "automatic levels", "give --levels 4/2 with it")
    return Compensation(count)


def take_hotness(options: dict[str, Any], *, automatic: bool) -> Hotness | None:
    """Takes the options of --policy out of `options`, option's name -> value, and makes the setting of them.

    Args:
        options: option's name -> value; the ones that are taken are removed.
        automatic: whether --policy auto is hotness.

    Raises:
        UserError: no such policy, an option of another policy, or one out of its range.
    """
    from edgemoe.policy.hotness import Hotness

    policy = options.pop("policy", None) or POLICIES[0]
    if policy not in POLICIES:
        raise UserError(f"--policy {' or '.join(POLICIES)}", repr(policy), "choose one of them")
    given = {f.name: options.pop(f.name) for f in fields(HotnessOptions) if options.get(f.name) is not None}
    if policy == POLICIES[0]:
        if given:
            option = flag(next(iter(given)))
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
