"""Settings: what is refused, and what they are called."""

from __future__ import annotations

import pytest

from edgemoe.commands.options import run_settings
from edgemoe.policy.settings import RunSettings, parse_levels
from storage.errors import UserError


@pytest.mark.parametrize(
    ("text", "levels"), [("4", (4,)), ("4/2", (4, 2)), ("8/4/2/0", (8, 4, 2, 0)), ("8/0", (8, 0))]
)
def test_levels_are_read(text, levels):
    """Bits from high to low, with slashes."""
    assert parse_levels(text) == levels


@pytest.mark.parametrize("text", ["", "0", "2/4", "4/4", "3", "4/", "four", "4,2", "16/4"])
def test_what_is_no_levels_is_refused(text):
    """Rising, repeated, unknown or no numbers at all: exit 2, with what would do."""
    with pytest.raises(UserError, match="4/2") as caught:
        parse_levels(text)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "change",
    [
        {"retention": 0.4},
        {"retention": 1.1},
        {"heavy_hitters": 0.0},
        {"importance": "luck"},
        {"depth": "linear"},
        {"eviction": "fifo"},
        {"speculate": "always"},
        {"cpu_experts": "on"},
        {"levels": (2, 4)},
    ],
)
def test_settings_out_of_range_are_refused(change):
    """Every setting is checked when it is made, and the message says what was got."""
    with pytest.raises(UserError, match=r"got"):
        RunSettings(**change)


def test_options_that_exclude_each_other_or_do_nothing_are_refused():
    """--exact with --levels or experts on the CPU, and a retention with nothing to retain."""
    with pytest.raises(UserError, match="--exact"):
        run_settings(8, exact=4, levels="4/2")
    with pytest.raises(UserError, match="--levels 4/2"):
        run_settings(8, exact=4, retention=0.75)
    with pytest.raises(UserError, match="level"):
        run_settings(8, exact=3)
    with pytest.raises(UserError, match="--exact 4"):
        run_settings(8, exact=4, cpu_experts="auto")
    assert run_settings(8, exact=4, cpu_experts="off").cpu_experts == "off"
    with pytest.raises(UserError, match="got ''"):
        run_settings(8, levels="")


@pytest.mark.parametrize("option", [{"retention": 1.0}, {"importance": "load"}, {"heavy_hitters": 0.2}])
def test_options_that_choose_need_a_choice(option):
    """With one level for all nothing ranks experts, so what ranks them is refused; with two it is taken."""
    with pytest.raises(UserError, match="one level for all, 8"):
        run_settings(8, **option)
    wanted = option | ({"importance": "mix"} if "heavy_hitters" in option else {})
    taken = run_settings(8, levels="4/2", **wanted)
    assert {name: getattr(taken, name) for name in wanted} == wanted


@pytest.mark.parametrize("signal", ["load", "gate", "random", None])
def test_heavy_hitters_need_a_signal_that_counts_them(signal):
    """A share of heavy hitters is refused where importance is not made from them, the default included."""
    with pytest.raises(UserError, match="counts none"):
        run_settings(8, levels="4/2", heavy_hitters=0.2, importance=signal)


def test_levels_alone_are_a_schedule():
    """Without a retention the low level is used all the same: r is below 1."""
    assert run_settings(8, levels="4/0").retention == 0.75


def test_defaults_are_the_stores_highest_level():
    """Nothing asked: one level, better planes may be used, and reading ahead as far as it pays."""
    assert run_settings(4) == RunSettings(levels=(4,), speculate="auto", cpu_experts="auto")
    assert run_settings(8, exact=4, speculate="off") == RunSettings(levels=(4,), exact=True)
    assert run_settings(8, levels="4/2", retention=0.9).name == "4/2 r 0.9"
    assert RunSettings.uniform(4).name == "exact 4"
