"""KV of ended requests: later ones that begin alike compute the rest only, with the bits of all of it."""

from __future__ import annotations

import pytest
import torch
from greedy import GREEDY, Greedy, assert_right, plain, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from integrity import check_kept

from edgemoe.engine import kept_sequences
from edgemoe.engine.engine import Engine
from edgemoe.engine.kept_sequences import LEAST_TOKENS
from edgemoe.engine.pace import Pace
from edgemoe.engine.request import CANCELLED, Request
from edgemoe.engine.sampling import PromptScores, Sampler
from edgemoe.engine.scheduler import Scheduler
from edgemoe.errors import NotFinite
from edgemoe.kv import blocks
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.shape import KVShape, LinearState

STEM = list(range(40, 70))


@pytest.fixture
def engine(open_engine, tiny_store) -> Engine:
    return open_engine(tiny_store, level=4, context=64, parallel=3)


def test_a_conversation_computes_its_new_tokens_only(engine):
    """The next turn takes all of the answer's KV but its last token, moves the sequence, and has the same bits."""
    scheduler, used = Scheduler(engine, keep=True), engine.budget.used_bytes
    first = run(scheduler, STEM)
    taken = engine.budget.used_bytes
    second = run(scheduler, [*first.tokens, 7, 8, 9], 3)
    assert (first.cached, second.cached) == (0, len(STEM) + 3)
    assert engine.budget.used_bytes == taken == engine.shape.kv.bytes_for(64) + used
    third = run(scheduler, second.tokens[:-1])
    assert third.cached == len(third.tokens) - 4 - 1
    scheduler.forget()
    assert engine.budget.used_bytes == used
    for request in (first, second, third):
        assert_right(engine, request)


def test_a_branch_leaves_the_kept_sequence_whole(engine):
    """A prompt that shares a part gets a copy; the kept one is still there for its own continuation."""
    scheduler = Scheduler(engine, keep=True)
    long = run(scheduler, STEM)
    branch = run(scheduler, [*STEM[:20], 9, 9, 9])
    after = run(scheduler, [*long.tokens, 5])
    again = run(scheduler, [*STEM[:20], 9, 9, 9, 4])
    assert [r.cached for r in (long, branch, after, again)] == [0, 20, len(STEM) + 3, 23]
    scheduler.forget()
    for request in (branch, after, again):
        assert_right(engine, request)


def test_short_matches_and_short_sequences_are_not_kept(engine):
    """Below LEAST_TOKENS in common nothing is copied; a request of fewer tokens leaves nothing."""
    scheduler, used = Scheduler(engine, keep=True), engine.budget.used_bytes
    run(scheduler, STEM[: LEAST_TOKENS - 2], 1)
    assert engine.budget.used_bytes == used
    run(scheduler, STEM)
    assert run(scheduler, [*STEM[: LEAST_TOKENS - 1], 3, 3, 3]).cached == 0
    assert run(scheduler, [*STEM[:LEAST_TOKENS], 3, 3, 4]).cached == LEAST_TOKENS


def test_the_least_recently_used_leaves_for_a_new_request(engine):
    """A budget of three contexts keeps the latest that fit; a reuse counts as use."""
    scheduler = Scheduler(engine, keep=True)
    prompts = [[100 * i + j for j in range(58)] for i in range(2)] + [[250] * 58]
    for prompt in prompts:
        run(scheduler, prompt, 6)
    assert scheduler.kept_bytes == engine.plan.kv_bytes
    assert run(scheduler, [*prompts[0][:50], 1], 13).cached == 50  # a copy: prompts[1] leaves for it
    assert run(scheduler, prompts[0], 6).cached == 57
    assert run(scheduler, prompts[1], 6).cached == 0
    assert scheduler.kept_bytes <= engine.plan.kv_bytes
    assert engine.budget.used_bytes <= engine.budget.limit


def test_one_sequence_alone_is_cut_where_two_do_not_fit(open_engine, tiny_store):
    """Where memory holds one KV, a prompt that branches takes the kept one's place and its beginning."""
    engine = open_engine(tiny_store, level=4, context=64)
    scheduler = Scheduler(engine, keep=True)
    run(scheduler, STEM, 60)
    branch = run(scheduler, [*STEM[:20], 9, 9, 9], 60)
    other = run(scheduler, list(range(200, 230)), 60)
    assert (branch.cached, other.cached) == (20, 0)
    scheduler.forget()
    assert_right(engine, branch)
    assert_right(engine, other)


def test_a_conversation_grows_where_it_is(open_engine, tiny_store):
    """With memory for one KV each turn reuses all before it, up to the end of the context."""
    engine = open_engine(tiny_store, level=4, context=64)
    scheduler, tokens, cached = Scheduler(engine, keep=True), STEM[:20], []
    for _ in range(5):
        request = run(scheduler, [*tokens, 5, 6], 4)
        cached.append(request.cached)
        tokens = request.tokens
    assert cached == [0, 25, 31, 37, 43]
    scheduler.forget()
    assert_right(engine, request)


def test_requests_that_run_share_their_prompt(engine):
    """Three answers to one prompt compute it once: the others copy from the first, which decodes."""
    scheduler = Scheduler(engine, Pace(chunk=8, every=1), keep=True)
    requests = [Greedy(STEM, 12) for _ in range(3)]
    for request in requests:
        scheduler.submit(request)
    for request in requests:
        scheduler.wait(request)
    assert [request.cached for request in requests] == [0, len(STEM) - 1, len(STEM) - 1]
    scheduler.forget()
    for request in requests:
        assert_right(engine, request)


def test_other_levels_have_other_kv(open_engine, tiny_store):
    """A change of levels makes kept sequences unusable, and changing back usable."""
    engine = open_engine(tiny_store, levels=(4, 2), exact=True, retention=0.5, parallel=3)
    scheduler, before = Scheduler(engine, keep=True), engine.settings
    run(scheduler, STEM)
    engine.configure(before.with_(levels=(4,)))
    assert run(scheduler, STEM).cached == 0
    engine.configure(before)
    assert run(scheduler, STEM).cached == len(STEM) - 1


def test_a_cancelled_prompt_leaves_its_finished_chunks(engine):
    """A client that comes back computes the rest only."""
    scheduler = Scheduler(engine, Pace(chunk=8), keep=True)
    request = Greedy(STEM)
    scheduler.submit(request)
    scheduler.loop.step()
    scheduler.loop.step()
    scheduler.cancel(request)
    scheduler.wait(request)
    assert request.reason == CANCELLED
    again = run(scheduler, STEM)
    assert again.cached == 16
    scheduler.forget()
    assert_right(engine, again)


def test_scores_reuse_what_comes_before_them(engine):
    """Two continuations of one context compute it once; scores of a whole prompt reuse nothing."""
    scheduler, found = Scheduler(engine, keep=True), []
    for tail, first in (([5, 6], 29), ([7, 8, 9], 29), ([7, 8, 9], 0)):
        tokens = [*STEM, *tail]
        scores = PromptScores(tokens, 0)
        request = Request(tokens, Sampler(GREEDY), on_rows=scores.add, scored=True, rows_from=first)
        scheduler.run(request)
        found.append((request.cached, [each.logprob for each in scores.logprobs]))
    assert [cached for cached, _ in found] == [0, 29, 0]
    assert found[1][1] == found[2][1][29:]
    assert len(found[1][1]) == 3


def test_a_value_that_is_not_finite_is_not_kept(engine):
    """NaN in a kept sequence ends the request that takes it, and all kept ones go with it."""
    scheduler, used = Scheduler(engine, keep=True), engine.budget.used_bytes
    first = run(scheduler, STEM)
    scheduler.kept_sequences.index.entries[0].sequence.keys.fill_(float("nan"))
    with pytest.raises(NotFinite):
        run(scheduler, [*first.tokens, 5])
    assert engine.budget.used_bytes == used
    assert_right(engine, run(scheduler, [*first.tokens, 5]))


def test_closing_frees_what_is_kept(engine):
    """The budget is as before."""
    scheduler, used = Scheduler(engine, keep=True), engine.budget.used_bytes
    run(scheduler, STEM)
    scheduler.close()
    assert engine.budget.used_bytes == used


@pytest.mark.e2e
@pytest.mark.parametrize("block", [8, 256])
def test_any_order_of_requests_has_the_bits_of_none_kept(engine, open_engine, tiny_store, monkeypatch, block):
    """Random prompts over few stems, cancelled at random steps: bits, budget and kept tokens stay right."""
    for module in (blocks, kept_sequences):
        monkeypatch.setattr(module, "BLOCK", block)
    stems, used = [[10 * i + j % 7 for j in range(40)] for i in range(1, 4)], engine.budget.used_bytes
    known, other = dict[tuple[int, ...], torch.Tensor](), open_engine(tiny_store, level=4, context=64)

    @settings(max_examples=15, suppress_health_check=list(HealthCheck))
    @given(
        st.lists(
            st.tuples(
                st.integers(0, 2), st.integers(1, 40), st.integers(0, 3), st.none() | st.integers(0, 9)
            ),
            max_size=10,
        )
    )
    def check(calls: list[tuple[int, int, int, int | None]]) -> None:
        scheduler = Scheduler(engine, Pace(chunk=8, every=1), keep=True)
        for stem, length, tail, leaves in calls:
            request = Greedy([*stems[stem][:length], *[200 + tail] * tail], 3)
            scheduler.submit(request)
            for step in range(60):
                if step == leaves:
                    scheduler.cancel(request)
                scheduler.loop.step()
            key = tuple(request.tokens[: request.prompt])
            if key not in known:
                known[key] = plain(other, list(key), 3)
            if request.rows:
                assert torch.equal(torch.stack(request.rows), known[key][: len(request.rows)])
            assert engine.budget.used_bytes - used == scheduler.kept_bytes <= engine.plan.kv_bytes
            check_kept(scheduler)
        scheduler.close()
        assert engine.budget.used_bytes == used

    check()


def test_a_state_of_linear_attention_is_copied_whole_or_not():
    """A copy of all tokens has the state after them; there is none of fewer tokens."""
    linear = LinearState((0,), channels=3, kernel=2, heads=1, key_dim=2, value_dim=2)
    shape = KVShape((1,), 1, 4, 4, linear=linear)
    one, two = SequenceKV(shape, 8), SequenceKV(shape, 8)
    one.keys.normal_()
    one.values.normal_()
    one.states._conv.normal_()
    one.states._recurrent.normal_()
    one.commit(5)
    assert two.copy_prefix(one, 4) == two.length == 0
    assert two.copy_prefix(one, 5) == two.length == 5
    assert torch.equal(two.keys[:, :, :5], one.keys[:, :, :5])
    assert torch.equal(two.values[:, :, :5], one.values[:, :, :5])
    layer, other = (each.states.of(0, fresh=False) for each in (one, two))
    assert torch.equal(layer.conv[0], other.conv[0])
    assert torch.equal(layer.recurrent[0], other.recurrent[0])
