"""What /set changes, and what it refuses."""

from __future__ import annotations

import pytest

from edgemoe.chat.set_command import SETTINGS, Tuning, changed
from edgemoe.engine.generate import Sampling
from edgemoe.policy.settings import RunSettings
from storage.errors import UserError

GREEDY = Tuning(RunSettings(levels=(8,)), Sampling(0.0, 1.0, 0, 1.0, 0, 64, frozenset({2})))
MIXED = Tuning(RunSettings(levels=(4, 2)), Sampling(0.7, 0.9, 20, 1.1, 5, 64, frozenset({2})))


@pytest.mark.parametrize(
    ("now", "name", "value", "where", "want"),
    [
        (GREEDY, "levels", "4/2", ("run", "levels"), (4, 2)),
        (GREEDY, "exact", "4", ("run", "levels"), (4,)),
        (GREEDY, "exact", "4", ("run", "exact"), True),
        (MIXED, "retention", "0.9", ("run", "retention"), 0.9),
        (MIXED, "importance", "load", ("run", "importance"), "load"),
        (GREEDY, "speculate", "auto", ("run", "speculate"), "auto"),
        (GREEDY, "temperature", "0.5", ("sampling", "temperature"), 0.5),
        (MIXED, "temperature", "0", ("sampling", "temperature"), 0.0),
        (MIXED, "top-p", "0.5", ("sampling", "top_p"), 0.5),
        (MIXED, "seed", "-7", ("sampling", "seed"), -7),
        (GREEDY, "max-new-tokens", "1", ("sampling", "max_new_tokens"), 1),
    ],
)
def test_one_setting_changes_and_no_other(now, name, value, where, want):
    """The value is there, is shown as it was typed, and setting back what was shown before undoes it."""
    then = changed(now, name, value)
    assert getattr(getattr(then, where[0]), where[1]) == want
    assert then.values()[name] == value
    before = now.values()
    others = {n for n in then.values() if n != name} & {n for n in before if n != name}
    assert {n: then.values()[n] for n in others} == {n: before[n] for n in others}
    if name in before and not (name == "temperature" and want == 0):
        assert changed(then, name, before[name]) == now


def test_heavy_hitters_after_an_importance_that_counts_them():
    """And not before."""
    with pytest.raises(UserError, match="importance gate counts none"):
        changed(MIXED, "heavy-hitters", "0.2")
    counting = changed(MIXED, "importance", "heavy-hitters")
    assert changed(counting, "heavy-hitters", "0.2").run.heavy_hitters == 0.2


@pytest.mark.parametrize(
    ("now", "name", "value", "said"),
    [
        (GREEDY, "retention", "0.9", "one level for all, 8"),
        (GREEDY, "importance", "load", "one level for all, 8"),
        (GREEDY, "top-p", "0.5", "at temperature 0"),
        (GREEDY, "seed", "1", "at temperature 0"),
        (MIXED, "retention", "0.3", "from 0.5 to 1"),
        (MIXED, "retention", "nan", "from 0.5 to 1"),
        (MIXED, "retention", "much", "got 'much'"),
        (MIXED, "importance", "taste", "got 'taste'"),
        (MIXED, "speculate", "maybe", "got 'maybe'"),
        (MIXED, "levels", "2/4", "got '2/4'"),
        (MIXED, "exact", "3", "got '3'"),
        (MIXED, "exact", "0", "got '0'"),
        (MIXED, "temperature", "-1", "got '-1'"),
        (MIXED, "temperature", "nan", "got 'nan'"),
        (MIXED, "temperature", "inf", "got 'inf'"),
        (MIXED, "top-p", "0", "got '0'"),
        (MIXED, "top-p", "1.5", "got '1.5'"),
        (MIXED, "max-new-tokens", "0", "got '0'"),
        (MIXED, "max-new-tokens", "2.5", "got '2.5'"),
        (MIXED, "seed", str(1 << 70), "a whole number was wanted"),
        (MIXED, "temprature", "1", "Did you mean /set temperature?"),
        (MIXED, "xyz", "1", "Choose levels"),
    ],
)
def test_what_cannot_be_set_is_refused(now, name, value, said):
    """With the value, or with why it would change nothing, or with the nearest name."""
    with pytest.raises(UserError) as caught:
        changed(now, name, value)
    assert said in str(caught.value)


def test_every_choice_offered_is_taken():
    """What Tab completes to is never refused."""
    for name, setting in SETTINGS.items():
        for choice in setting.choices:
            assert changed(MIXED, name, choice).values()[name] == choice
