"""Windows of a text that are decoded together: `edgemoe eval --batch`."""

from __future__ import annotations

import pytest

from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.errors import UserError
from edgemoe.evaluate.arm import PHASES, TABLE, Arm
from edgemoe.evaluate.request import EvalRequest
from edgemoe.evaluate.run import run_eval
from edgemoe.evaluate.studies import batched_arms, hot_arms
from edgemoe.policy.hotness import Hotness
from edgemoe.policy.settings import RunSettings

pytestmark = pytest.mark.e2e

BATCHES = (1, 2, 4)


@pytest.fixture(scope="module")
def evaluate(tiny_store, tmp_path_factory):
    """Returns a function that evaluates the tiny store on four windows of 24 tokens."""
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, while another one sleeps. " * 4, "utf-8")

    def run(arms: list[Arm], tokens: int = 96):
        return run_eval(
            StoreModel.open(tiny_store), EvalRequest(text, None, tokens, 24, 0, 0, tuple(arms))
        ).rows

    return run


def test_one_level_has_the_same_quality_in_every_batch(evaluate):
    """Rows that are decoded together do not change each other, so every batch has the perplexity of one by one."""
    rows = evaluate(batched_arms([Arm(RunSettings.uniform(4), PHASES, TABLE)], BATCHES))
    assert [(row.batch, row.phase) for row in rows] == [(batch, "decode") for batch in BATCHES]
    assert len({row.setting for row in rows}) == len(BATCHES)
    assert len({row.perplexity for row in rows}) == 1


def test_every_step_has_as_many_rows_as_the_batch(evaluate, monkeypatch):
    """Precision by hotness runs in steps that are full, and counts the tokens of all of their rows."""
    taken, step = [], Engine.step

    def counted(engine, each):
        taken.append(each.rows)
        return step(engine, each)

    monkeypatch.setattr(Engine, "step", counted)
    arms = hot_arms([Arm(RunSettings(levels=(4, 2)), PHASES, TABLE)], Hotness(experts=2))
    (row,) = evaluate(batched_arms(arms, [4]))
    assert taken == [4] * 24
    assert row.batch == 4
    assert 0 < row.effective_retention < 1


def test_rows_count_the_experts_that_lose_the_higher_level(evaluate, tiny_store):
    """With a slack of all ranks a full hot set stays as it is; rows of one level have no count."""
    ranks = StoreModel.open(tiny_store).shape.experts_per_layer
    hot = [Hotness(experts=2, interval=4, slack=slack) for slack in (0, ranks)]
    mixed = Arm(RunSettings(levels=(4, 2)), PHASES, TABLE)
    free, fixed = (evaluate(batched_arms(hot_arms([mixed], each), [4]))[0] for each in hot)
    (uniform,) = evaluate([Arm(RunSettings.uniform(4), ("decode",), TABLE)])
    assert free.demoted
    assert fixed.demoted == 0
    assert uniform.demoted is None


@pytest.mark.parametrize(("batch", "tokens"), [(3, 96), (4, 90)])
def test_a_batch_that_would_not_be_full_is_refused(evaluate, batch, tokens):
    with pytest.raises(UserError, match=rf"multiple of --batch {batch}.*--tokens {batch * 24}"):
        evaluate(batched_arms([Arm(RunSettings.uniform(4), PHASES, TABLE)], [batch]), tokens)
