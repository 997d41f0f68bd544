"""A prompt next to running answers leaves the scores, activation, look-ahead and bits that it leaves alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from edgemoe.engine.engine import Engine
from edgemoe.engine.pace import Pace
from edgemoe.engine.request import Request
from edgemoe.engine.rules import Rules
from edgemoe.engine.sampling import Sampler, Sampling
from edgemoe.engine.scheduler import Scheduler
from edgemoe.experts.records import StepRecord
from edgemoe.experts.step import StepContext
from edgemoe.kv.step import Segment, Step
from edgemoe.policy.hotness import Hotness, scores_of
from edgemoe.policy.importance import PromptAttention

ANSWERS = [[5, 9, 200, 17], [17, 3, 88, 41, 250]]
PROMPT = torch.randint(3, 300, (32,), generator=torch.Generator().manual_seed(7)).tolist()
STILL = Hotness(warmup=10_000, experts=0)
"""Nothing moves, so that the same steps have the same bits."""

ROUTED = (0, 2)
"""The layers with experts; layer 1 is dense."""

SETTINGS = [
    {"level": 4},
    {"levels": (4, 2), "exact": True, "retention": 0.5},
    {"levels": (4, 2), "exact": True, "retention": 0.5, "importance": "load"},
    {"levels": (8, 4, 2, 0), "exact": True, "bits": 3.5},
]


def request_of(tokens: Sequence[int], new: int = 60) -> Request:
    return Request(list(tokens), Sampler(Sampling(0, 1, 0, 1, 0, new, frozenset())))


def records_of(engine: Engine, *, shared: bool, cold: bool = False) -> tuple[list[StepRecord], StepRecord]:
    """The records of all steps in order, and of PROMPT's one step.

    Two answers have decoded some tokens before the prompt comes. `shared`: they decode between its layers too. `cold`:
    no expert is resident when it comes.
    """
    scheduler = Scheduler(engine, Pace(chunk=32, every=2 if shared else 0, work=1))
    answers, prompt = [request_of(tokens) for tokens in ANSWERS], request_of(PROMPT, new=1)
    with engine.recorded() as records:
        for answer in answers:
            scheduler.submit(answer)
        scheduler.wait(answers[0], lambda: len(answers[0].tokens) >= 24)
        if cold:
            engine.forget_experts()
        scheduler.submit(prompt)
        scheduler.wait(prompt)
    scheduler.close()
    (mine,) = [record for record in records if not record.decodes and record.rows == len(PROMPT)]
    before = records.index(mine)
    if shared:
        # Steps of new tokens have ended while the prompt's was open: they stand before it.
        assert records[before - 1].decodes
    return records, mine


@pytest.fixture
def open_hot(open_engine, tiny_store) -> Callable[..., Engine]:
    def open_one(**options) -> Engine:
        return open_engine(tiny_store, levels=(4, 2), exact=False, hotness=STILL, parallel=3, **options)

    return open_one


def test_a_prompt_counts_its_own_choices(open_hot):
    """The routers' choices in the prompt's record are the prompt's alone, in every layer."""
    _, shared = records_of(open_hot(), shared=True)
    _, alone = records_of(open_hot(), shared=False)
    assert np.array_equal(shared.choices.counts, alone.choices.counts)
    assert shared.choices.counts[list(ROUTED)].sum(1).tolist() == [2 * len(PROMPT)] * 2
    np.testing.assert_allclose(shared.choices.mass, alone.choices.mass, rtol=1e-6)


def test_hot_scores_are_those_of_the_steps_one_after_another(open_hot):
    """After a prompt next to answers the scores are what the records of all steps make, and no layer is erased."""
    engine = open_hot()
    records, _ = records_of(engine, shared=True)
    want = scores_of(STILL, engine.shape.layers, engine.shape.experts_per_layer)
    for record in records:
        weight = 1.0 if record.decodes else STILL.prompt_weight
        want.observe(weight * record.choices.counts, weight * record.choices.mass, weight * record.rows)
    got = engine.rules.hot.scores.values
    np.testing.assert_allclose(got, want.values, rtol=1e-12)
    sums = got[list(ROUTED)].sum(1)
    assert sums.min() > 0.99 * sums.max()


def test_nothing_moves_within_a_prompt(open_engine, tiny_store):
    """With hot sets that change at every step, no promotion starts between two layers of a prompt."""
    soon = Hotness(interval=1, warmup=0, half_life=4)
    engine = open_engine(tiny_store, levels=(4, 2), exact=False, hotness=soon, parallel=3, experts=12)
    within: list[list[dict[object, int]]] = []
    run = engine.run

    def noted(context: StepContext) -> Iterator[int]:
        resident = []
        if not context.decode:
            within.append(resident)
        for layer in run(context):
            resident.append(engine.vram.resident())
            yield layer
            resident.append(engine.vram.resident())

    engine.run = noted
    engine.fill()
    records, _ = records_of(engine, shared=True)
    assert sum(record.transfers.promoted for record in records) > 0
    for resident in within:
        assert resident == [resident[0]] * 2 * engine.shape.layers


def test_activation_is_counted_by_kind_of_step(open_hot):
    """Steps of new tokens activate at most their rows' experts; the prompt's record has every layer once."""
    engine = open_hot()
    records, prompt = records_of(engine, shared=True)
    top = engine.shape.top_k
    decoded = [record for record in records if record.decodes]
    assert decoded
    assert all(n <= top * record.rows for record in decoded for n in record.active.values())
    assert all(sorted(record.active) == list(ROUTED) for record in records)
    assert min(prompt.active.values()) > top * 2


def test_a_prompts_look_ahead_is_used(open_engine, tiny_store):
    """A prompt's look-ahead is used in full next to answers as it is alone, and nothing of it is wasted."""
    for shared in (True, False):
        engine = open_engine(tiny_store, level=4, parallel=3, speculate="full")
        records, prompt = records_of(engine, shared=shared, cold=True)
        counts = prompt.transfers
        assert 0 < counts.speculated == counts.speculated_used
        assert sum(record.transfers.wasted_bytes for record in records) == 0


@pytest.mark.parametrize("settings", SETTINGS)
def test_bits_stay_within_a_prompt_whatever_is_configured(open_engine, tiny_store, settings):
    """Settings that change between two layers of a prompt hold from the next step on: the prompt keeps its levels."""
    engine, other = (open_engine(tiny_store, **settings) for _ in range(2))
    contexts = []
    for each, changes in ((engine, True), (other, False)):
        segment = Segment(each.sequences.new(), tuple(PROMPT), PromptAttention())
        context = each.begin(Step((segment,)))
        for _ in each.run(context):
            if changes:
                each.configure(replace(each.settings, levels=(2,), bits=None, retention=1.0))
        contexts.append(context)
    mine, alone = contexts
    assert torch.equal(mine.logits, alone.logits)
    assert mine.record.use == alone.record.use
    assert engine.settings.levels == (2,)


def test_times_of_tokens_leave_prompts_out(open_engine, tiny_store, monkeypatch):
    """A gap between tokens with a prompt's layers in it counts without these layers for a time per token."""
    engine, seen = open_engine(tiny_store, parallel=2), []
    monkeypatch.setattr(Rules, "observe_token", lambda self, seconds: seen.append(seconds))
    scheduler = Scheduler(engine, Pace(chunk=32, every=1, work=1))
    answer, prompt = request_of(ANSWERS[0], 40), request_of(PROMPT, 1)
    with engine.recorded() as records:
        scheduler.submit(answer)
        scheduler.wait(answer, lambda: len(answer.tokens) >= 10)
        scheduler.submit(prompt)
        scheduler.wait(answer)
        scheduler.wait(prompt)
    (mine,) = [record for record in records if not record.decodes and record.rows == len(PROMPT)]
    gaps = answer.trace.gaps
    assert len(seen) == len(gaps)
    assert sum(gaps) - sum(seen) == pytest.approx(mine.seconds, rel=0.01)
    assert min(seen) > 0


@pytest.mark.parametrize("settings", [*SETTINGS, {"level": 4, "kv": "q8_0"}, {"level": 4, "experts": 5}])
def test_prompts_in_one_step_have_the_bits_of_each_alone(open_engine, tiny_store, settings):
    """Six prompts that wait together run in one step, and begin their answers with the logits of each alone."""
    prompts = [PROMPT[i : i + 1 + 4 * i] for i in range(6)]
    engine, single = (open_engine(tiny_store, parallel=6, **settings) for _ in range(2))
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    requests = []
    for tokens, kept in zip(prompts, rows, strict=True):
        request = request_of(tokens, 3)
        request.on_token = lambda token, logits, kept=kept: bool(kept.append(logits.clone()))
        requests.append(request)
    scheduler = Scheduler(engine, Pace(every=0, work=1))
    with engine.recorded() as records:
        for request in requests:
            scheduler.submit(request)
        for request in requests:
            scheduler.wait(request)
    first = records[0]
    assert (first.decodes, first.sequences, first.rows) == (False, 6, sum(map(len, prompts)))
    assert [record.rows for record in records[1:]] == [6, 6]
    for tokens, kept in zip(prompts, rows, strict=True):
        sequence = single.sequences.new()
        want = single.prefill(sequence, tokens)
        assert torch.equal(kept[0], want)
        for got in kept[1:]:
            want = single.step(Step((Segment(sequence, (int(want.argmax()),)),)))[0]
            assert torch.equal(got, want)
        single.sequences.end(sequence)


def test_a_prompt_that_begins_as_another_waits_for_it(open_engine, tiny_store):
    """Prompts that share most of their tokens do not compute them twice: the second copies them."""
    engine = open_engine(tiny_store, parallel=3, level=4)
    scheduler = Scheduler(engine, Pace(every=0, work=1), keep=True)
    requests = [request_of([*PROMPT, last], 2) for last in (3, 4, 5)]
    for request in requests:
        scheduler.submit(request)
    for request in requests:
        scheduler.wait(request)
    scheduler.close()
    assert [request.cached for request in requests] == [0, len(PROMPT), len(PROMPT)]


def test_a_cancelled_prompt_leaves_the_others_of_its_step(open_engine, tiny_store):
    """One of two prompts in a step is cancelled after the first layer: the other answers with its bits of alone."""
    engine, single = (open_engine(tiny_store, parallel=2, level=4) for _ in range(2))
    used = engine.budget.used_bytes
    scheduler, kept = Scheduler(engine, Pace(every=0, work=1)), []
    gone, stays = request_of(PROMPT[:9], 3), request_of(PROMPT[9:20], 1)
    stays.on_token = lambda token, logits: bool(kept.append(logits.clone()))
    engine.watch(lambda layer, chosen: scheduler.cancel(gone))
    for request in (gone, stays):
        scheduler.submit(request)
    scheduler.wait(stays)
    assert torch.equal(kept[0], single.prefill(single.sequences.new(), PROMPT[9:20]))
    scheduler.wait(gone)
    assert gone.reason == "cancelled"
    assert engine.budget.used_bytes == used
