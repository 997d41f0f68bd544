"""Settings that /set changes, and values that it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgemoe.chat.set_command import SETTINGS, UNSET, Tuning, changed
from edgemoe.chat.slash_commands import COMMANDS, COMPLETIONS
from edgemoe.engine.sampling import UNLIMITED, Sampling
from edgemoe.errors import UserError
from edgemoe.policy.settings import RunSettings

GREEDY = Tuning(RunSettings(levels=(8,)), Sampling(0.0, 1.0, 0, 1.0, 0, 64, frozenset({2})))
MIXED = Tuning(RunSettings(levels=(4, 2)), Sampling(0.7, 0.9, 20, 1.1, 5, 64, frozenset({2})))

PRICED = Tuning(RunSettings(levels=(8, 4, 2, 0), bits=3.0), MIXED.sampling)
SKIPPING = Tuning(RunSettings(levels=(4, 0)), MIXED.sampling)


@pytest.mark.parametrize(
    ("now", "name", "value", "where", "want"),
    [
        (GREEDY, "levels", "4/2", ("run", "levels"), (4, 2)),
        (GREEDY, "exact", "4", ("run", "levels"), (4,)),
        (GREEDY, "exact", "4", ("run", "exact"), True),
        (MIXED, "retention", "0.9", ("run", "retention"), 0.9),
        (MIXED, "retention", "0.2", ("run", "retention"), 0.2),
        (PRICED, "bits", "3.5", ("run", "bits"), 3.5),
        (MIXED, "depth", "equal", ("run", "depth"), "equal"),
        (MIXED, "critical", "ceil", ("run", "critical"), "ceil"),
        (SKIPPING, "renormalise", "on", ("run", "renormalise"), True),
        (MIXED, "importance", "load", ("run", "importance"), "load"),
        (GREEDY, "speculate", "auto", ("run", "speculate"), "auto"),
        (GREEDY, "temperature", "0.5", ("sampling", "temperature"), 0.5),
        (MIXED, "temperature", "0", ("sampling", "temperature"), 0.0),
        (MIXED, "top-p", "0.5", ("sampling", "top_p"), 0.5),
        (MIXED, "seed", "-7", ("sampling", "seed"), -7),
        (MIXED, "top-k", "0", ("sampling", "top_k"), 0),
        (MIXED, "min-p", "0.05", ("sampling", "min_p"), 0.05),
        (GREEDY, "repeat-penalty", "1.3", ("sampling", "repetition_penalty"), 1.3),
        (GREEDY, "stop", "the end.", ("sampling", "stop_strings"), ("the end.",)),
        (GREEDY, "max-new-tokens", "1", ("sampling", "max_new_tokens"), 1),
        (GREEDY, "max-new-tokens", "-1", ("sampling", "max_new_tokens"), UNLIMITED),
        (GREEDY, "thinking-budget", "500", ("sampling", "thinking_budget"), 500),
        (MIXED, "thinking-budget", "0", ("sampling", "thinking_budget"), 0),
    ],
)
def test_one_setting_changes_and_no_other(now, name, value, where, want):
    """The value is set and shown in the form it was typed; setting the earlier value undoes the change."""
    then = changed(now, name, value)
    assert getattr(getattr(then, where[0]), where[1]) == want
    assert then.values()[name] == value
    before = now.values()
    others = {n for n in then.values() if n != name} & {n for n in before if n != name}
    assert {n: then.values()[n] for n in others} == {n: before[n] for n in others}
    if name in before and not (name == "temperature" and want == 0):
        assert changed(then, name, before[name]) == now


def test_retention_and_bits_replace_each_other():
    """The one that was set last is shown; one level for all has none."""
    bits = changed(MIXED, "bits", "3.5")
    assert (bits.run.bits, bits.values()["bits"]) == (3.5, "3.5")
    assert "retention" not in bits.values()
    assert changed(bits, "retention", "0.9").run == MIXED.run.with_(retention=0.9)
    assert changed(bits, "exact", "4").run.bits is None
    assert changed(PRICED, "levels", "4/2/0").run.bits == 3.0
    with pytest.raises(UserError, match="mean bits per weight"):
        changed(bits, "levels", "8/4")
    with pytest.raises(UserError, match="goes by damage"):
        changed(PRICED, "importance", "load")


@pytest.mark.parametrize("word", UNSET)
def test_words_turn_settings_off(word):
    """off, none, auto and default remove a rule for the bits, go back to automatic levels, or disable a filter."""
    automatic = RunSettings(levels=(8, 4, 2, 0), retention=0.9)
    priced = replace(PRICED, automatic=automatic)
    assert changed(priced, "bits", word).run == priced.run.with_(bits=None)
    timed = changed(priced, "tpot-target", "50ms")
    assert changed(timed, "tpot-target", word).run == priced.run.with_(bits=None)
    for name in ("levels", "exact", "retention"):
        run = changed(replace(GREEDY, automatic=automatic), name, word).run
        assert (run.levels, run.retention, run.exact) == ((8, 4, 2, 0), 0.9, False)
    off = {
        "top-p": "1",
        "top-k": "0",
        "min-p": "0",
        "repeat-penalty": "1",
        "stop": '""',
        "max-new-tokens": "-1",
    }
    assert {name: changed(MIXED, name, word).values()[name] for name in off} == off
    with pytest.raises(UserError, match="enter for example /set seed 1"):
        changed(MIXED, "seed", word)


def test_heavy_hitters_need_an_importance_that_counts_them():
    """The setting is refused before such an importance is set."""
    with pytest.raises(UserError, match="importance gate, which counts none"):
        changed(MIXED, "heavy-hitters", "0.2")
    counting = changed(MIXED, "importance", "heavy-hitters")
    assert changed(counting, "heavy-hitters", "0.2").run.heavy_hitters == 0.2


@pytest.mark.parametrize(
    ("now", "name", "value", "message"),
    [
        (GREEDY, "retention", "0.9", "one level for all, 8"),
        (GREEDY, "importance", "load", "one level for all, 8"),
        (GREEDY, "top-p", "0.5", "temperature 0"),
        (GREEDY, "seed", "1", "temperature 0"),
        (MIXED, "retention", "0", "above 0, at most 1"),
        (MIXED, "retention", "nan", "above 0, at most 1"),
        (MIXED, "depth", "linear", "'linear'"),
        (MIXED, "critical", "floor", "'floor'"),
        (GREEDY, "critical", "ceil", "one level for all, 8"),
        (PRICED, "depth", "equal", "goes by damage"),
        (PRICED, "critical", "ceil", "goes by damage"),
        (MIXED, "renormalise", "on", "levels that skip experts"),
        (SKIPPING, "renormalise", "yes", "on or off for renormalise"),
        (MIXED, "retention", "much", "'much'"),
        (MIXED, "importance", "taste", "'taste'"),
        (MIXED, "speculate", "maybe", "'maybe'"),
        (MIXED, "levels", "2/4", "'2/4'"),
        (MIXED, "exact", "3", "'3'"),
        (MIXED, "exact", "0", "'0'"),
        (MIXED, "temperature", "-1", "'-1'"),
        (MIXED, "temperature", "nan", "'nan'"),
        (MIXED, "temperature", "inf", "'inf'"),
        (MIXED, "top-p", "0", "'0'"),
        (MIXED, "top-p", "1.5", "'1.5'"),
        (MIXED, "max-new-tokens", "-2", "'-2'"),
        (GREEDY, "top-k", "5", "temperature 0"),
        (MIXED, "top-k", "-1", "'-1'"),
        (MIXED, "min-p", "2", "'2'"),
        (MIXED, "repeat-penalty", "0", "'0'"),
        (MIXED, "max-new-tokens", "2.5", "'2.5'"),
        (MIXED, "seed", str(1 << 70), "a whole number for seed"),
        (MIXED, "temprature", "1", "id you mean /set temperature?"),
        (MIXED, "xyz", "1", "choose levels"),
    ],
)
def test_a_wrong_setting_is_refused(now, name, value, message):
    """The message has the value, the reason, or the nearest name."""
    with pytest.raises(UserError) as caught:
        changed(now, name, value)
    assert message in str(caught.value)


def test_every_completion_is_valid():
    """No value that Tab completes is refused."""
    for name, setting in SETTINGS.items():
        for choice in setting.choices:
            assert changed(SKIPPING, name, choice).values()[name] == choice


def test_every_command_is_completed():
    """Tab completes the name of every command after a slash."""
    assert set(COMPLETIONS) == {f"/{name}" for name in COMMANDS}
