"""`eval --study hotness`: rows of a toy store, compared with what they must be by definition."""

from __future__ import annotations

import random

import pytest

from edgemoe.engine.engine import StoreModel
from edgemoe.errors import UserError
from edgemoe.evaluate import hotness
from edgemoe.evaluate.hotness import hotness_rows
from edgemoe.evaluate.table import hotness_lines


@pytest.fixture(autouse=True)
def two_shares(monkeypatch):
    """Hot sets of two sizes, of which the first is half of the experts."""
    monkeypatch.setattr(hotness, "HOT_SHARES", (1 / 2, 3 / 4))


@pytest.fixture
def texts(tmp_path):
    """Two texts of different words."""
    words = {"one": ("a", "quick", "fox", "jumps"), "two": ("over", "lazy", "dogs", "again")}
    for name, some in words.items():
        (tmp_path / f"{name}.txt").write_text(" ".join(random.Random(1).choices(some, k=600)))
    return [tmp_path / f"{name}.txt" for name in words]


@pytest.mark.e2e
def test_rows(damageable, checkpoint, texts):
    """Hot sets of all or of no experts are the uniform levels; every part has a row for each of its cases."""
    store = StoreModel.open(damageable)
    rows = hotness_rows(store, checkpoint, texts, 64, 32, changes=False)
    parts = {
        part: [row for row in rows if row.part == part]
        for part in ("overlap", "traffic", "demotion", "policy")
    }
    assert sum(map(len, parts.values())) == len(rows)
    (overlap,) = parts["overlap"]
    assert (overlap.text, overlap.other) == ("one", "two")
    assert 0 <= overlap.fraction <= 1
    assert all(0 < row.fraction < 1 for row in parts["traffic"])
    experts = store.shape.experts_per_layer
    assert all(row.gap_recovered == pytest.approx(1) for row in parts["demotion"] if row.hot == experts)
    none = [row for row in parts["demotion"] if row.hot == 0]
    assert len(none) == 2 * 3
    assert all(row.kl == row.kl_low for row in none)
    assert {(row.text, row.policy) for row in parts["policy"]} == {
        (text, policy)
        for text, other in (("one", "two"), ("two", "one"))
        for policy in ("static, same text", f"static, {other}", "online mass", "online count")
    }
    assert len(hotness_lines(rows)) == 2 + len(rows)


@pytest.mark.e2e
def test_changes(damageable, checkpoint, texts):
    """Each policy has the KL of each place after a change: 63 predicted tokens lie in two of them."""
    rows = hotness_rows(StoreModel.open(damageable), checkpoint, texts, 128, 64, changes=True)
    counts = {row.hot for row in rows}
    assert len(rows) == 2 * len(counts) * 4
    assert {(row.other, row.text) for row in rows} == {("one", "two"), ("two", "one")}
    for row in rows:
        first, second = row.kl_by_place
        assert row.kl == pytest.approx((50 * first + 13 * second) / 63)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--study", "hotness"), "two texts for --study hotness, got 1"),
        (("--text", "b.txt"), "one --text, got 2"),
    ],
)
def test_numbers_of_texts_that_do_not_fit_the_study_are_refused(run, tmp_path, words, said):
    """A study of hotness needs two texts; anything else takes one."""
    code, _, error = run("eval", "--text", tmp_path / "a.txt", *words)
    assert code == 2
    assert said in error


def test_a_text_of_one_window_is_refused(damageable, checkpoint, texts):
    """Half of each text is counted, and the other half measured."""
    with pytest.raises(UserError, match="two windows of each text"):
        hotness_rows(StoreModel.open(damageable), checkpoint, texts, 64, 64, changes=False)
