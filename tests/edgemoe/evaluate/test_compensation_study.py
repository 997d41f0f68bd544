"""The study of compensators on the tiny model, and `eval --compensate`."""

from __future__ import annotations

import json
import shutil

import pytest
from compensator_bytes import add_random

from edgemoe.evaluate.arm import COMPENSATION, STORED, Arm, Made
from edgemoe.evaluate.compensation.arms import equal_arms, with_gains
from edgemoe.evaluate.compensation.making import compensated
from edgemoe.evaluate.request import EvalRequest
from edgemoe.evaluate.rows import EvalRow
from edgemoe.evaluate.run import run_eval
from edgemoe.evaluate.studies import study_arms
from edgemoe.models.store_model import StoreModel
from edgemoe.policy.compensation import Compensation
from edgemoe.policy.settings import RunSettings


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog while another one thinks about it " * 8)
    return path


def test_the_study_varies_everything_that_it_says():
    """Counts and places of one sort of compensators; every rank, rule and base level; without any."""
    arms = study_arms(COMPENSATION)
    made = {arm.compensators for arm in arms if arm.compensators}
    assert {(each.rank, each.rule, each.base_level) for each in made} == {
        (rank, rule, level)
        for rank in (8, 16, 32)
        for rule in ("uniform", "kurtosis", "error")
        for level in (2, 4)
    }
    chosen = {arm.settings.compensation for arm in arms if arm.compensators == Made(16)}
    assert chosen >= {Compensation(n) for n in range(1, 9)} | {Compensation(1, 1), Compensation(1, 2)}
    assert [arm.settings.name for arm in arms if arm.compensators is None] == ["exact 2", "exact 4"]
    assert all(arm.compensators.base_level in arm.settings.levels for arm in arms if arm.compensators)
    assert len({arm.name for arm in arms}) == len(arms)


@pytest.mark.e2e
def test_compensators_bring_the_model_nearer(tiny_store, checkpoint, text):
    """Of full rank for all experts they take back most of what 2 bits cost, and less for one expert of a token."""
    two, full = RunSettings.uniform(2), Made(32)
    arms = [Arm(two, ("decode",), COMPENSATION)] + [
        Arm(two.with_(compensation=Compensation(n)), ("prefill", "decode"), COMPENSATION, compensators=full)
        for n in (1, 2)
    ]
    request = EvalRequest(text, checkpoint, 128, 64, 0, 0, tuple(arms))
    report = run_eval(StoreModel.open(tiny_store), request)
    by = {(row.setting, row.phase): row for row in report.rows}
    alone, one, both = (
        by[name, "decode"]
        for name in (
            "exact 2 alone",
            "exact 2, compensate 1, rank 32 uniform",
            "exact 2, compensate 2, rank 32 uniform",
        )
    )
    assert both.kl < one.kl < alone.kl
    assert both.kl < 0.3 * alone.kl
    assert both.kl_over_base == pytest.approx(both.kl / alone.kl)
    more = both.bits_per_weight_read - 2.5
    assert one.bits_per_weight_read == pytest.approx(2.5 + more / 2)
    assert both.kl_less_per_bit == pytest.approx((alone.kl - both.kl) / more)
    assert by[both.setting, "prefill"].bits_per_weight_read == pytest.approx(both.bits_per_weight_read)
    assert not list(tiny_store.glob("compensators"))
    assert StoreModel.open(tiny_store).manifest.compensators is None


def test_the_reference_must_be_there(run, tiny_store, text):
    code, _, error = run("eval", "--model", tiny_store, "--text", text, "--study", COMPENSATION)
    assert (code, "--reference" in error) == (2, True)


@pytest.mark.e2e
def test_the_stores_own_compensators(run, tiny_store, checkpoint, text, tmp_path):
    """`eval --compensate` adds a row for each setting that has their level; without them the command says how."""
    store = shutil.copytree(tiny_store, tmp_path / "store")
    add_random(store, lambda layer, expert: (4, 4, 4))
    options = (
        "--text",
        text,
        "--tokens",
        64,
        "--window",
        32,
        "--levels",
        "4",
        "--levels",
        "2",
        "--compensate",
        1,
        "--json",
    )
    code, out, _ = run("eval", "--model", store, *options)
    rows = [(row["setting"], row["phase"], row["bits_per_weight_read"]) for row in json.loads(out)["rows"]]
    assert code == 0
    assert [name for name, phase, _ in rows if phase == "decode"] == [
        *("exact 4", "exact 2", "exact 2, compensate 1, the store's")
    ]
    bits = {name: bits for name, phase, bits in rows if phase == "decode"}
    assert bits["exact 2"] == 2.5 < bits["exact 2, compensate 1, the store's"]
    code, _, error = run("eval", "--model", tiny_store, *options)
    assert (code, "edgemoe compensate STORE" in error) == (2, True)


def test_an_engine_has_its_own_again_behind_the_block(open_engine, tiny_store, tmp_path):
    store = shutil.copytree(tiny_store, tmp_path / "store")
    add_random(store, lambda layer, expert: (4, 4, 4))
    engine = open_engine(store, level=2)
    with compensated(engine, None, STORED):
        engine.configure(engine.settings.with_(compensation=Compensation(1)))
        assert engine.compensators is not None
    assert (engine.compensators, engine.settings.compensation) == (None, None)


def test_levels_of_as_many_bits_stand_beside_the_rows():
    """Two levels as far as they have so many, and four; each number once, a tenth of a bit apart."""
    bits = (2.71, 2.69, 4.83, 9.1)
    rows = [EvalRow("x", "decode", "2", bits_per_weight_read=b, study=COMPENSATION, made="y") for b in bits]
    other = EvalRow("x", "decode", "2", bits_per_weight_read=3.3, study=COMPENSATION)
    names = [arm.settings.name for arm in equal_arms([*rows, other], 8)]
    assert names == ["4/2 2.7 bits", "8/4/2/0 2.7 bits", "8/4/2/0 4.8 bits"]
    assert [arm.settings.name for arm in equal_arms(rows, 4)] == ["4/2 2.7 bits", "4/2/0 2.7 bits"]


def test_rows_without_a_base_have_no_gain():
    """Rows of other studies, and rows whose base level was not measured, stay as they are."""
    rows = [
        EvalRow("exact 2", "decode", "2", kl=0.5),
        EvalRow("x", "decode", "2", kl=0.2, study=COMPENSATION, made="y"),
    ]
    assert list(with_gains(rows)) == rows
    assert equal_arms([], 8) == []
