"""Sequences with linear attention go back to checkpoints of their states, and have the bits of a new computation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from family_models import random_model, save
from greedy import Greedy, assert_right, run

from edgemoe.engine.scheduler import Scheduler
from edgemoe.kv import checkpoints
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.shape import KVShape, LinearState
from edgemoe.models.conversion.run import convert_checkpoint

TAIL = 3
STEM = list(range(40, 70))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with linear attention in half of its layers."""
    directory = tmp_path_factory.mktemp("hybrid")
    source = save(random_model("qwen3_next"), directory / "source", fused=True)
    convert_checkpoint(source, directory / "store", max_level=8, layout="auto", dense_bits=16)
    return directory / "store"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes short prompts worth a checkpoint."""
    monkeypatch.setattr(checkpoints, "BLOCK", 8)
    monkeypatch.setattr(checkpoints, "TAIL", TAIL)


def test_a_turn_that_writes_the_answer_in_another_way_goes_back_to_the_prompt(open_engine, store):
    """The next prompt has the end of the first one otherwise: all before its tail is there, bit for bit."""
    engine = open_engine(store, parallel=3)
    scheduler = Scheduler(engine, keep=True)
    first = run(scheduler, STEM)
    second = run(scheduler, [*STEM[:-2], 9, 8, 7, 6])
    third = run(scheduler, [*second.tokens, 5])
    earlier = run(scheduler, [*STEM[:20], 9])
    assert [each.cached for each in (first, second, third, earlier)] == [0, len(STEM) - TAIL, 35, 0]
    scheduler.forget()
    for request in (second, third):
        assert_right(engine, request)


def test_the_third_prompt_with_one_beginning_takes_it(open_engine, store):
    """The second one computes it again and leaves a state at its end; a request that runs at once copies it too."""
    engine = open_engine(store, parallel=3)
    scheduler = Scheduler(engine, keep=True)
    prompts = [[*STEM, *[number] * 10] for number in range(1, 6)]
    found = [run(scheduler, prompt) for prompt in prompts[:3]]
    assert [each.cached for each in found] == [0, 0, len(STEM)]
    scheduler.forget()
    both = [Greedy(prompt) for prompt in prompts[3:]]
    for request in both:
        scheduler.submit(request)
    for request in both:
        scheduler.wait(request)
    assert [each.cached for each in both] == [0, len(STEM)]
    scheduler.forget()
    assert_right(engine, found[2])
    assert_right(engine, both[1])


def test_an_edit_of_the_last_message_goes_back_to_the_prompt_before(open_engine, store):
    """Also once more in the next turn; an edit where others went on goes back to there."""
    engine = open_engine(store, parallel=3, context=96)
    scheduler = Scheduler(engine, keep=True)
    first = run(scheduler, STEM)
    second = run(scheduler, [*first.tokens, *range(5, 15)], 12)
    third = run(scheduler, [*second.tokens, *range(5, 15)])
    edits = [run(scheduler, [*second.tokens, *[number] * 10]) for number in (3, 4)]
    assert [each.cached for each in (second, third)] == [33, 55]
    assert [each.cached for each in edits] == [41, 56]
    scheduler.forget()
    for request in edits:
        assert_right(engine, request)


def test_a_sequence_without_room_for_a_copy_goes_back_itself(open_engine, store):
    """Where memory holds one sequence, it is cropped to its checkpoint."""
    engine = open_engine(store)
    scheduler = Scheduler(engine, keep=True)
    run(scheduler, STEM, 30)
    branch = run(scheduler, [*STEM[:-1], 9, 9], 30)
    assert branch.cached == len(STEM) - TAIL
    scheduler.forget()
    assert_right(engine, branch)


def test_a_copy_has_the_state_after_its_tokens():
    """At a mark it is the state that was committed there; checkpoints after it do not come along."""
    linear = LinearState((0,), channels=3, kernel=2, heads=1, key_dim=2, value_dim=2)
    one, two = (SequenceKV(KVShape((1,), 1, 4, 4, linear=linear), 64) for _ in range(2))
    one.mark(10, 30)
    ends = []
    for tokens, value in ((10, 1.0), (17, 2.0), (3, 3.0), (5, 4.0)):
        assert one.states.checkpoints.following(one.length) == (10, 27, None, None)[len(ends)]
        state = one.states.of(0, fresh=not ends)
        state.conv[1].fill_(value)
        state.recurrent[1].fill_(value)
        one.commit(tokens)
        ends.append(one.length)
    assert ends == [10, 27, 30, 35]
    assert [one.reach(length) for length in (9, 10, 26, 27, 34, 35)] == [0, 10, 10, 27, 27, 35]
    assert two.copy_prefix(one, 26) == two.length == 10
    assert float(two.states.of(0, fresh=False).recurrent[0].unique()) == 1.0
    two.commit(20)
    assert two.reach(29) == 10
    assert one.crop(29) == 27
    assert float(one.states.of(0, fresh=False).conv[0].unique()) == 2.0
    assert (one.reach(26), one.crop(5), one.reach(0)) == (10, 0, 0)


def test_short_prompts_have_no_step_of_their_own():
    """Neither a prompt of less than a block, nor a beginning that is less than a block longer than what is there."""
    made = checkpoints.Checkpoints((torch.zeros(2),))
    made.mark(12, 7, 5)
    assert made.following(0) is None
    made.mark(13, 7, 5)
    assert made.following(0) == 13
    made.save((torch.ones(2),), 13)
    assert made.reach(20) == 13
