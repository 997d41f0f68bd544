"""tools/cache_front.py: rows of a toy store, and what each rule does with an absent expert."""

from __future__ import annotations

import json
import random

import pytest
import torch

from edgemoe.calibrate.run import CalibrationRequest, calibrate
from edgemoe.engine.engine import StoreModel
from tools import cache_front


@pytest.fixture
def store(damageable):
    calibrate(StoreModel.open(damageable), CalibrationRequest(None, 512))
    return damageable


@pytest.mark.e2e
def test_rows(store, checkpoint, tmp_path, capsys):
    """Exact rows cost the same at every cache; a smaller cache reads more; dropping reads less than exact 4."""
    text, plot = tmp_path / "a.txt", tmp_path / "front.png"
    text.write_text(" ".join(random.Random(1).choices(("a", "quick", "fox", "jumps", "over", "dogs"), k=600)))
    options = [
        "--model",
        store,
        "--reference",
        checkpoint,
        "--text",
        text,
        "--tokens",
        512,
        "--bits",
        3,
        "--plot",
        plot,
    ]
    assert cache_front.main([*map(str, options), "--cache", "0.5", "--cache", "0.9"]) == 0
    rows = {(row["cache"], row["rule"]): row for row in json.loads(capsys.readouterr().out)}
    assert len(rows) == 2 * 8
    assert rows[0.5, "exact 4"]["kl"] == rows[0.9, "exact 4"]["kl"]
    assert rows[0.5, "exact 4"]["bits_scheduled"] == 4.5
    small, large = (rows[cache, "exact 4"]["bits_read_per_expert"] for cache in (0.5, 0.9))
    assert small > large > 0
    dropped = rows[0.5, "drop below 1"]
    assert dropped["bits_read_per_expert"] < small
    assert dropped["kl"] > rows[0.5, "exact 4"]["kl"]
    assert dropped["bits_scheduled"] < 4.5
    assert rows[0.5, "instead below 1"]["bits_read_per_expert"] < small
    assert plot.stat().st_size > 5000


def test_absent_experts_with_little_weight_are_dropped(store, open_engine):
    engine = open_engine(store, levels=(4, 0), exact=True, experts=2)
    policy = cache_front.DropAbsent(engine, 0.5)
    engine.vram.resident = dict  # nothing is in memory
    chosen, gates = torch.tensor([[0, 1, 2]]), torch.tensor([[0.7, 0.2, 0.1]])
    assert policy.levels(0, chosen, gates, None, decode=True).tolist() == [[4, 4, 0]]
    keys = {key: 4 for key in engine._keys if key.layer == 0}
    engine.vram.resident = lambda: keys
    assert policy.levels(0, chosen, gates, None, decode=True).tolist() == [[4, 4, 4]]
