"""Levels that follow a wanted time, levels that follow what fits, and what an answer says of both."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch

from edgemoe.calibrate.run import CalibrationRequest, calibrate
from edgemoe.engine.engine import StoreModel
from edgemoe.errors import UserError
from edgemoe.experts.use import ExpertUse
from edgemoe.kv.step import Segment, Step
from edgemoe.models.options.run_settings import run_settings
from edgemoe.models.plans.division import Division, plan_levels
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.base import LEVELS
from edgemoe.storage.store.calibration import CALIBRATION_NAME

FOUR = (8, 4, 2, 0)
TOKENS = [5, 9, 11, 3, 7, 8, 2, 6]


@pytest.fixture
def store(damageable):
    (damageable / CALIBRATION_NAME).unlink(missing_ok=True)
    calibrate(StoreModel.open(damageable), CalibrationRequest(None, 512))
    return damageable


@pytest.mark.e2e
def test_bits_follow_the_time_of_tokens(store, open_engine, caplog):
    """Slow tokens lower the bits down to level 2's and then warn once, quick ones raise them to the top."""
    engine = open_engine(store, levels=FOUR, tpot_target=0.05, exact=False)
    first = engine.settings.mean_bits
    for _ in range(100):
        engine.rules.observe_token(0.5)
    assert engine.settings.mean_bits == 2.5 < first
    (warning,) = caplog.messages
    assert warning == "50 ms per token cannot be met: 2.5 bits per weight take 500 ms here: raise the limit"
    for _ in range(400):
        engine.rules.observe_token(0.001)
    assert engine.settings.mean_bits == 8.5
    assert engine.settings.tpot_target == 0.05
    sequence = engine.sequences.new()
    engine.prefill(sequence, TOKENS)
    assert {*engine.take_use().scheduled} == {8}


@pytest.mark.e2e
def test_a_new_target_begins_again(store, open_engine):
    """Another target, or none, forgets what was learned for the one before."""
    engine = open_engine(store, levels=FOUR, tpot_target=0.05, exact=False)
    for _ in range(100):
        engine.rules.observe_token(0.5)
    engine.configure(engine.settings.with_(tpot_target=0.7, bits=None))
    for _ in range(50):
        engine.rules.observe_token(0.5)
    assert engine.settings.mean_bits > 2.5
    engine.configure(engine.settings.with_(tpot_target=None, bits=3.0))
    for _ in range(50):
        engine.rules.observe_token(0.5)
    assert engine.settings.bits == 3.0


@pytest.mark.parametrize("change", [{"levels": (4,)}, {"exact": True}, {"tpot_target": 0.0}])
def test_a_target_needs_levels_to_choose_from(change):
    with pytest.raises(UserError, match="for a time per token"):
        RunSettings(**{"levels": FOUR, "tpot_target": 0.05} | change)


def test_options_of_how_many_bits_exclude_each_other():
    for pair in (
        {"bits": 3.5, "tpot_target": "50ms"},
        {"retention": 0.9, "levels": "4/2", "tpot_target": "50ms"},
    ):
        with pytest.raises(UserError, match="one of --retention, --bits and --tpot-target"):
            run_settings(8, **pair)
    assert run_settings(8, tpot_target="50ms").name == "8/4/2/0 50 ms"
    assert run_settings(4, tpot_target="50ms").levels == (4, 2, 0)
    with pytest.raises(UserError, match="a time such as 50ms"):
        run_settings(8, tpot_target="50")


@pytest.mark.parametrize(("level", "fewer"), [(8, "8/4/2/0 r 0.9"), (4, "4/2 r 0.9"), (2, "2")])
def test_automatic_levels(level, fewer):
    """The highest level where every expert fits, else several; given ones stay."""
    for levels in (None, "auto"):
        assert run_settings(level, levels=levels).name == str(level)
        assert run_settings(level, fits=False, levels=levels).name == fewer
    assert run_settings(8, fits=False, levels="4").name == "4"
    assert run_settings(8, fits=False, exact=8).name == "exact 8"


@pytest.mark.e2e
def test_levels_follow_the_plan(store):
    """One byte less than all experts at 8 bits need makes the levels several."""
    opened = StoreModel.open(store)
    plan, settings = plan_levels(opened, run_settings, Division(None, context=64))
    assert settings.name == "8"
    again, same = plan_levels(opened, run_settings, Division(plan.vram_limit_bytes, context=64))
    assert (again, same) == (plan, settings)
    smaller, several = plan_levels(opened, run_settings, Division(plan.vram_limit_bytes - 1, context=64))
    assert several.name == "8/4/2/0 r 0.9"
    assert smaller.levels == FOUR


@pytest.mark.e2e
def test_an_answer_says_what_it_cost(store, run):
    """Bits and predicted KL are in the JSON of levels by damage, and a line says what fits."""
    options = ("chat", "--model", store, "--prompt", "the fox", "--max-new-tokens", "6", "--context", "64")
    _, out, err = run(*options, "--json", "--bits", "3")
    answer = json.loads(out)
    assert 0 < answer["bits"] <= 8.5
    assert answer["predicted_kl"] >= 0
    _, out, _ = run(*options, "--json", "--exact", "4")
    answer = json.loads(out)
    assert (answer["bits"], answer["predicted_kl"]) == (4.5, None)
    _, _, err = run(*options)
    assert re.search(r"memory limit .*B: all 16 experts fit at 8 bits; each is read from the disk once", err)
    _, _, err = run(*options, "--tpot-target", "1s", "--stats")
    assert re.search(r"bits per weight +[\d.]+ on average: .*; estimated loss of quality: KL [\d.e-]+\n", err)


@pytest.mark.e2e
def test_predicted_kl_is_the_sum_over_layers(store, open_engine):
    """Of a token, by the compiled kernel or by the modules, as numbers of the calibration have it."""
    engine = open_engine(store, levels=FOUR, bits=3.0, exact=True)
    damage, sequence = engine.rules.damage, engine.sequences.new()
    assert damage is not None
    routed = []
    engine.watch(lambda layer, chosen: routed.append((layer, chosen)))
    engine.prefill(sequence, TOKENS)
    engine.take_use()
    routed.clear()
    engine.step(Step((Segment(sequence, (4,)),)))
    token = engine.take_use()
    assert [layer for layer, _ in routed] == list(damage.layers)
    sequence.crop(len(TOKENS))
    engine.all_logits(sequence, (4,), decode=True)
    modules = engine.take_use()
    assert token.damage == pytest.approx(modules.damage, rel=1e-5)
    assert 0 < token.damage <= float(damage.table.max(-1).values.sum())


def test_damage_by_hand():
    """Rows of layers 2 and 5: squared gate weights times the errors of the chosen levels."""
    from damages import a_damage

    damage = replace(a_damage(2, 3, 2), layers=(2, 5))
    damage.table[:] = torch.arange(2 * 3 * len(LEVELS), dtype=torch.float32).view(2, 3, len(LEVELS))
    chosen, levels = torch.tensor([[2, 0], [1, 2]]), torch.tensor([[4, 0], [8, 2]])
    gates = torch.tensor([[0.5, 0.25], [1.0, 0.5]])
    want = 0.25 * 9 + 0.0625 * 3 + 1.0 * 16 + 0.25 * 22
    use = ExpertUse()
    use.add_damage(damage, [2, 5], chosen, gates, levels)
    assert use.damage == pytest.approx(want)
