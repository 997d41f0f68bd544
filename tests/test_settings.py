"""Settings: what is refused, and what they are called."""

from __future__ import annotations

import pytest

from edgemoe.options import run_settings
from edgemoe.settings import RunSettings, parse_levels
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
        {"levels": (2, 4)},
    ],
)
def test_settings_out_of_range_are_refused(change):
    """Every setting is checked when it is made, and the message says what was got."""
    with pytest.raises(UserError, match=r"got"):
        RunSettings(**change)


def test_options_that_exclude_each_other_or_do_nothing_are_refused():
    """--exact with --levels, and a retention with nothing to retain."""
    with pytest.raises(UserError, match="--exact"):
        run_settings(8, exact=4, levels="4/2")
    with pytest.raises(UserError, match="--levels 4/2"):
        run_settings(8, exact=4, retention=0.75)
    with pytest.raises(UserError, match="level"):
        run_settings(8, exact=3)


def test_defaults_are_the_stores_highest_level():
    """Nothing asked: one level, and better planes may be used."""
    assert run_settings(4) == RunSettings(levels=(4,))
    assert run_settings(8, exact=4) == RunSettings(levels=(4,), exact=True)
    assert run_settings(8, levels="4/2", retention=0.9).name == "4/2 r 0.9"
    assert RunSettings.uniform(4).name == "exact 4"
