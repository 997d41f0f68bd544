"""tools/hotness.py: rows of a toy store, beside what they must be by definition."""

from __future__ import annotations

import json
import random

import pytest

from tools import hotness


@pytest.fixture
def texts(tmp_path):
    """Two texts of different words."""
    words = {"one": ("a", "quick", "fox", "jumps"), "two": ("over", "lazy", "dogs", "again")}
    for name, some in words.items():
        (tmp_path / name).write_text(" ".join(random.Random(1).choices(some, k=600)))
    return [f"--text={name}={tmp_path / name}" for name in words]


@pytest.mark.e2e
def test_rows(damageable, checkpoint, texts, capsys):
    """Static sets of all or no experts are the uniform levels; every part has a row for each of its cases."""
    of_store = ["--model", str(damageable), "--reference", str(checkpoint)]
    assert hotness.main([*of_store, *texts, "--tokens", "64", "--hot", "2"]) == 0
    rows = json.loads(capsys.readouterr().out)
    parts = {part: [row for row in rows if row["part"] == part] for part in (*hotness.PARTS, "traffic")}
    (overlap,) = parts["overlap"]
    assert overlap["texts"] == ["one", "two"]
    assert 0 <= overlap["jaccard"] <= 1
    assert all(0 < row["fraction"] < 1 for row in parts["traffic"])
    for row in parts["demotion"]:
        if row["demoted"] == 0:
            assert row["gap_recovered"] == pytest.approx(1)
    experts = max(row["demoted"] for row in parts["demotion"])
    assert all(row["kl"] == row["kl_low"] for row in parts["demotion"] if row["demoted"] == experts)
    policies = {(row["text"], row["policy"]) for row in parts["policy"]}
    assert policies == {
        (text, policy)
        for text, other in (("one", "two"), ("two", "one"))
        for policy in ("static, same text", f"static, {other}", "online mass", "online count")
    }
    assert len(parts["change"]) == 2 * 4
    assert all(len(row["kl_by_place"]) == 2 for row in parts["change"])  # 63 predicted tokens


def test_a_text_without_a_name_is_refused(damageable, checkpoint, capsys):
    options = ["--model", str(damageable), "--reference", str(checkpoint), "--text", "book.txt"]
    assert hotness.main(options) == 2
    assert "NAME=FILE" in capsys.readouterr().err
