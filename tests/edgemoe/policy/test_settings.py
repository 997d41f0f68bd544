"""Settings: parsing, refusals, defaults and names."""

from __future__ import annotations

import pytest

from edgemoe.errors import UserError
from edgemoe.models.options.run_settings import run_settings
from edgemoe.policy.settings import RunSettings, parse_levels


@pytest.mark.parametrize(
    ("text", "levels"), [("4", (4,)), ("4/2", (4, 2)), ("8/4/2/0", (8, 4, 2, 0)), ("8/0", (8, 0))]
)
def test_levels_are_read(text, levels):
    """Bits from high to low, separated by slashes."""
    assert parse_levels(text) == levels


@pytest.mark.parametrize("text", ["", "0", "2/4", "4/4", "3", "4/", "four", "4,2", "16/4"])
def test_wrong_levels_are_refused(text):
    """Rising, repeated or unknown levels, and text that is no number: exit 2, with an example."""
    with pytest.raises(UserError, match="4/2") as caught:
        parse_levels(text)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ({"retention": 0.0}, "0.0"),
        ({"retention": 1.1}, "1.1"),
        ({"heavy_hitters": 0.0}, "0.0"),
        ({"importance": "luck"}, "'luck'"),
        ({"depth": "linear"}, "'linear'"),
        ({"critical": "floor"}, "'floor'"),
        ({"eviction": "fifo"}, "'fifo'"),
        ({"speculate": "always"}, "'always'"),
        ({"levels": (2, 4)}, "'2/4'"),
    ],
)
def test_settings_out_of_range_are_refused(change, value):
    """Every setting is validated at construction, and the error carries the value."""
    with pytest.raises(UserError) as caught:
        RunSettings(**change)
    assert caught.value.finding == value


def test_options_that_exclude_each_other_are_refused():
    """--exact with --levels or with a retention; a level that does not exist."""
    with pytest.raises(UserError, match="--exact"):
        run_settings(8, exact=4, levels="4/2")
    with pytest.raises(UserError, match="--levels 4/2"):
        run_settings(8, exact=4, retention=0.75)
    with pytest.raises(UserError, match="level"):
        run_settings(8, exact=3)
    with pytest.raises(UserError, match="''"):
        run_settings(8, levels="")


@pytest.mark.parametrize(
    "option",
    [
        {"retention": 1.0},
        {"importance": "load"},
        {"heavy_hitters": 0.2},
        {"depth": "equal"},
        {"critical": "ceil"},
        {"renormalise": True},
    ],
)
def test_options_of_the_schedule_need_two_levels(option):
    """One level ranks no experts, so an option of the ranking is refused; two levels accept it."""
    with pytest.raises(UserError, match="one level for all, 8"):
        run_settings(8, **option)
    wanted = option | ({"importance": "mix"} if "heavy_hitters" in option else {})
    taken = run_settings(8, levels="4/0", **wanted)
    assert {name: getattr(taken, name) for name in wanted} == wanted


@pytest.mark.parametrize("signal", ["load", "gate", "random", None])
def test_heavy_hitters_need_a_signal_that_counts_them(signal):
    """A fraction of heavy hitters is refused where the signal, the default included, counts none."""
    with pytest.raises(UserError, match="counts none"):
        run_settings(8, levels="4/2", heavy_hitters=0.2, importance=signal)


def test_scaling_needs_levels_that_skip():
    """--renormalise is refused where no expert is skipped, and nothing is refused without it."""
    with pytest.raises(UserError, match="levels that skip experts"):
        run_settings(8, levels="4/2", renormalise=True)
    assert not run_settings(8, levels="4/2").renormalise


def test_a_low_retention_warns_once(caplog):
    """Below 0.5 one line warns, however often the settings are made; 0.5 and a single level do not."""
    for _ in range(2):
        assert run_settings(8, levels="4/2", retention=0.3125).retention == 0.3125
    run_settings(8, levels="4/2", retention=0.5)
    assert len(caplog.records) == 1
    assert "retention of 0.3125" in caplog.text


def test_levels_alone_are_a_schedule():
    """Without a retention the default r, below 1, puts experts at the low level."""
    assert run_settings(8, levels="4/0").retention == 0.75


def test_defaults_are_the_stores_highest_level():
    """Without options: one level, better planes are used, and look-ahead runs as far as it pays."""
    assert run_settings(4) == RunSettings(levels=(4,), speculate="auto")
    assert run_settings(8, exact=4, speculate="off") == RunSettings(levels=(4,), exact=True)
    assert run_settings(8, levels="4/2", retention=0.9).name == "4/2 r 0.9"
    assert RunSettings.uniform(4).name == "exact 4"
