"""`eval --study cache-front`: rows of a toy store, and what each rule does with an absent expert."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from edgemoe.calibrate.run import CalibrationRequest, calibrate
from edgemoe.engine.engine import StoreModel
from edgemoe.evaluate.arm import TABLE, Arm, Miss
from edgemoe.evaluate.cache_front import BITS, CACHES, DropAbsent, instead_of_absent, miss_study
from edgemoe.evaluate.plot import plot_front
from edgemoe.evaluate.request import EvalRequest
from edgemoe.evaluate.run import run_eval
from edgemoe.evaluate.studies import study_arms
from edgemoe.evaluate.table import quality_lines
from edgemoe.kv.step import Segment, Step
from edgemoe.policy.settings import RunSettings


def test_arms_have_names_of_their_own():
    """Every rule at every cache; with a second tier, prices by memory are a rule more."""
    fronts = {study: study_arms(study) for study in ("cache-front", "cache-front-dram")}
    rules = {study: len(arms) / len(CACHES) for study, arms in fronts.items()}
    assert rules == {"cache-front": 2 + 2 * len(BITS) + 4, "cache-front-dram": 2 + 3 * len(BITS) + 4}
    assert all(len({arm.name for arm in arms}) == len(arms) for arms in fronts.values())
    assert {arm.dram for arm in fronts["cache-front"]} == {0}


@pytest.mark.e2e
def test_rows(damageable, checkpoint, tmp_path):
    """Exact rows cost the same at every cache; a smaller cache reads more; dropping reads less than exact 4."""
    calibrate(StoreModel.open(damageable), CalibrationRequest(None, 512))
    text, plot = tmp_path / "a.txt", tmp_path / "front.png"
    text.write_text(" ".join(random.Random(1).choices(("a", "quick", "fox", "jumps", "over", "dogs"), k=600)))
    front = [arm for arm in study_arms("cache-front") if arm.cache == CACHES[-1]]
    front = [arm for arm in front if arm.settings.bits in (None, 3.05)]
    arms = [Arm(RunSettings.uniform(4), ("decode",), TABLE)]
    arms += [replace(arm, cache=0.5) for arm in front]
    arms.append(replace(next(arm for arm in front if arm.settings.levels == (4,)), cache=0.9))
    by_memory = [arm for arm in study_arms("cache-front-dram") if arm.variation.name == "by memory"]
    arms.append(replace(by_memory[0], cache=0.5))
    report = run_eval(StoreModel.open(damageable), EvalRequest(text, checkpoint, 64, 32, 0, 0, tuple(arms)))
    own = [row for row in report.rows if row.study == "cache-front"]
    rows = {(row.cache, row.levels, row.variation): row for row in own}
    assert len(rows) == len(own) == 8 + 1
    small, large = (rows[cache, "4", "as scheduled"] for cache in (0.5, 0.9))
    assert small.kl == large.kl
    assert small.bits_scheduled == 4.5
    assert small.bits_from_disk > large.bits_from_disk > 0
    dropped = rows[0.5, "4/0", "drop below 1"]
    assert dropped.bits_from_disk < small.bits_from_disk
    assert dropped.kl > small.kl
    assert dropped.bits_scheduled < 4.5
    assert dropped.skipped > 0
    assert rows[0.5, "4", "instead below 1"].bits_from_disk < small.bits_from_disk
    (tiered,) = (row for row in report.rows if row.study == "cache-front-dram")
    assert tiered.bits_from_dram > 0
    assert all(row.bits_from_dram == 0 for row in own)
    assert "study: cache-front" in quality_lines(report.rows)
    plot_front(report.rows, plot)
    assert plot.stat().st_size > 5000


def test_absent_experts_with_little_weight_are_dropped(damageable, open_engine):
    """Below half of the mean weight an absent expert has level 0; a resident one keeps its level."""
    engine = open_engine(damageable, levels=(4, 0), exact=True, experts=2)
    policy = DropAbsent(engine, 0.5)
    chosen, gates = torch.tensor([[0, 1, 2]]), torch.tensor([[0.7, 0.2, 0.1]])
    absent = policy.levels(0, chosen, gates, None, decode=True)
    assert absent.tolist() == [[4, 4, 0]]
    engine.fill()
    (first, *_) = engine.vram.resident()
    others = [expert for expert in range(engine.shape.experts_per_layer) if expert != first.expert][:2]
    resident = torch.tensor([[*others, first.expert]])
    assert policy.levels(first.layer, resident, gates, None, decode=True).tolist() == [[4, 4, 4]]


def test_the_study_of_a_miss_drops_absent_experts(damageable, open_engine):
    """Where no expert is resident and every weight is below the fraction, each expert has level 0."""
    engine = open_engine(damageable, levels=(4, 0), exact=True, experts=2)
    sequence = engine.sequences.new()
    with engine.studied(miss_study(engine, Miss(drop=1e9))):
        engine.prefill(sequence, [5, 9, 11])
        engine.step(Step((Segment(sequence, (4,)),)))
    use = engine.take_use()
    assert (use.scheduled, engine.take_counts().requests) == ({0: 4 * engine.shape.top_k * 2}, 0)


def test_resident_experts_run_instead_of_absent_ones(damageable, open_engine):
    """Where every absent expert is weak all that run are resident, the likeliest first; where none is, none changes."""
    engine = open_engine(damageable, experts=10)
    engine.fill()
    (layer, *_) = engine.store.manifest.layers
    there = [key.expert for key in engine.vram.resident() if key.layer == layer]
    count = engine.shape.experts_per_layer
    assert 2 <= len(there) < count
    logits = torch.randn(64, count, generator=torch.Generator().manual_seed(1))
    assert instead_of_absent(engine, 0.0)(layer, logits, 2).tolist() == logits.topk(2).indices.tolist()
    among = torch.full_like(logits, -torch.inf)
    among[:, there] = logits[:, there]
    changed = instead_of_absent(engine, 100.0)(layer, logits, 2)
    assert changed.sort().values.tolist() == among.topk(2).indices.sort().values.tolist()
