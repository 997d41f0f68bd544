"""Blocks of 256 tokens: prompts that begin alike share their KV, and a match in part changes no kept sequence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from greedy import Greedy, assert_right, run
from integrity import check_integrity, check_kept

from edgemoe.engine import kept_sequences
from edgemoe.engine.engine import Engine
from edgemoe.engine.pace import Pace
from edgemoe.engine.scheduler import Scheduler
from edgemoe.errors import DoesNotFit
from edgemoe.kv.blocks import BLOCK, chain
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.shape import KVShape
from edgemoe.kv.step import Segment, Step

SYSTEM = [(7 * i) % 290 + 3 for i in range(2 * BLOCK + 60)]
"""A long beginning that conversations share: two blocks, and a part of the third."""


@pytest.fixture
def engine(open_engine, tiny_store) -> Engine:
    """KV for one context of eight blocks."""
    return open_engine(tiny_store, level=4, context=8 * BLOCK)


def blocks_of(engine: Engine, count: int) -> int:
    return engine.shape.kv.bytes_for(count * BLOCK)


def test_hashes_cover_the_model_the_tokens_and_all_before_them():
    """Another root, another token, and another order each change every later hash and no earlier one."""
    tokens = np.array(SYSTEM[: 2 * BLOCK], np.int64)
    root, one, two = chain(b"root", tokens)
    assert len({root, one, two}) == 3
    assert set(chain(b"other", tokens)).isdisjoint({root, one, two})
    changed = tokens.copy()
    changed[BLOCK] += 1
    assert chain(b"root", changed)[:2] == [root, one]
    assert chain(b"root", changed)[2] != two
    swapped = np.concatenate((tokens[BLOCK:], tokens[:BLOCK]))
    assert set(chain(b"root", swapped)[1:]).isdisjoint({one, two})
    assert chain(b"root", tokens[: BLOCK + 200]) == [root, one]


def test_two_branches_of_one_beginning_stay_beside_each_other(engine):
    """In one context's memory: both reuse the beginning, neither changes the other, and both go on where they were."""
    scheduler, used = Scheduler(engine, keep=True), engine.budget.used_bytes
    first = run(scheduler, [*SYSTEM, *[5] * 40])
    second = run(scheduler, [*SYSTEM, *[9] * 70])
    assert [first.cached, second.cached] == [0, len(SYSTEM)]
    assert scheduler.kept_bytes == 2 * blocks_of(engine, 3) == engine.budget.used_bytes - used
    again = [run(scheduler, [*each.tokens, 11, 12]) for each in (first, second)]
    assert [each.cached for each in again] == [len(first.tokens) - 1, len(second.tokens) - 1]
    check_kept(scheduler)
    check_integrity(engine.vram)
    scheduler.forget()
    assert engine.budget.used_bytes == used
    for request in (first, second, *again):
        assert_right(engine, request)


def test_a_part_of_a_match_changes_no_kept_sequence(engine):
    """The kept tokens, keys and values are the same bytes after a branch of them has been answered."""
    scheduler = Scheduler(engine, keep=True)
    run(scheduler, [*SYSTEM, *[5] * 40])
    (kept,) = scheduler.kept_sequences.index.entries
    n = kept.sequence.length
    before = kept.tokens.copy(), kept.sequence.keys[:, :, :n].clone(), kept.sequence.values[:, :, :n].clone()
    branch = run(scheduler, [*SYSTEM[:300], *[9] * 300])
    assert branch.cached == 300
    assert kept in scheduler.kept_sequences.index.entries
    assert kept.sequence.length == n
    assert np.array_equal(kept.tokens, before[0])
    assert torch.equal(kept.sequence.keys[:, :, :n], before[1])
    assert torch.equal(kept.sequence.values[:, :, :n], before[2])


def test_equal_hashes_of_other_tokens_are_not_reused(engine, monkeypatch):
    """Where every block has the same hash, tokens alone decide."""
    monkeypatch.setattr(
        kept_sequences,
        "chain",
        lambda root, tokens: [root + bytes([i]) for i in range(len(tokens) // BLOCK + 1)],
    )
    scheduler = Scheduler(engine, keep=True)
    run(scheduler, SYSTEM)
    other = run(scheduler, [SYSTEM[0] + 1, *SYSTEM[1:]])
    half = run(scheduler, [*SYSTEM[:BLOCK], *[9] * BLOCK, 4])
    assert [other.cached, half.cached] == [0, BLOCK]
    scheduler.forget()
    assert_right(engine, other)
    assert_right(engine, half)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("changes", "reused"),
    [
        ({"retention": 0.75}, False),
        ({"bits": 3.0}, False),
        ({"exact": False}, False),
        ({"levels": (4,)}, False),
        ({"importance": "load"}, False),
        ({"speculate": "full"}, True),
    ],
)
def test_kv_of_other_settings_is_not_reused(open_engine, tiny_store, changes, reused):
    """A setting that changes levels makes kept KV unusable, and the first settings usable again; others do not."""
    engine = open_engine(tiny_store, levels=(4, 2), retention=0.5, context=8 * BLOCK)
    before, scheduler = engine.settings, Scheduler(engine, keep=True)
    engine.configure(before.with_(bits=3.0))  # measures damage while the KV is free
    engine.configure(before)
    first = run(scheduler, SYSTEM)
    engine.configure(before.with_(**changes))
    changed = run(scheduler, [*SYSTEM, 8, 8])
    assert (changed.cached > 0) == reused
    engine.configure(before)
    assert run(scheduler, [*SYSTEM[:-1], 9]).cached == len(SYSTEM) - 1
    assert first.cached == 0


def test_settings_that_change_within_a_request_leave_nothing(open_engine, tiny_store):
    """KV of two settings belongs to neither: it is not kept, and not copied while its request runs."""
    engine = open_engine(tiny_store, levels=(4, 2), exact=True, retention=0.5, context=2 * BLOCK, parallel=2)
    scheduler, used = Scheduler(engine, Pace(chunk=BLOCK, every=1), keep=True), engine.budget.used_bytes
    one, two = Greedy(SYSTEM[:100], 20), Greedy(SYSTEM[:100], 2)
    scheduler.submit(one)
    scheduler.loop.step()
    assert one.rows
    engine.configure(engine.settings.with_(retention=0.75))
    scheduler.submit(two)
    scheduler.wait(two)
    assert (two.cached, one.ended) == (0, False)
    scheduler.wait(one)
    assert scheduler.kept_bytes == blocks_of(engine, 1) == engine.budget.used_bytes - used
    assert run(scheduler, SYSTEM[:100]).cached == 99


def test_the_least_recently_used_leaves_first_and_as_late_as_possible(engine):
    """Sequences of two blocks in eight: a model of a list of four; a fifth one costs the one that is unused longest."""
    scheduler, recent = Scheduler(engine, keep=True), list[int]()
    prompts = [[(i + 31 * n) % 290 + 3 for i in range(BLOCK + 30)] for n in range(7)]
    for n in (0, 1, 2, 3, 1, 4, 0, 2, 5, 5, 6, 1, 4):
        request = run(scheduler, [*prompts[n], 1], 2)
        assert (request.cached > 0) == (n in recent), (n, recent)
        # The new sequence lies next to the copied one while it runs; then it takes the place of the one it continues.
        recent = [*[m for m in recent if m != n], n][-4:]
        assert scheduler.kept_bytes <= engine.plan.kv_bytes
        assert engine.budget.used_bytes <= engine.budget.limit
        check_kept(scheduler)


def test_a_copied_sequence_is_a_used_one(engine):
    """Of two that are as old, the one that a branch was copied from stays longer."""
    scheduler = Scheduler(engine, keep=True)
    one, two, three, four = ([(i + 31 * n) % 290 + 3 for i in range(BLOCK + 30)] for n in range(4))
    for prompt in (one, two, [*one[:200], *[9] * 100], three, four):
        run(scheduler, prompt)
    assert [run(scheduler, [*prompt, 1]).cached for prompt in (one, two)] == [BLOCK + 30, 0]


def test_a_request_that_grows_takes_the_memory_of_kept_ones(open_engine, tiny_store):
    """Kept sequences leave one at a time while it comes to their blocks; the budget holds at every step."""
    engine = open_engine(tiny_store, level=4, context=4 * BLOCK)
    scheduler, left = Scheduler(engine, Pace(chunk=64), keep=True), []
    for n in (3, 4, 5):
        run(scheduler, [n] * (BLOCK - 20))
    request = Greedy([(11 * i) % 290 + 3 for i in range(4 * BLOCK - 10)])
    scheduler.submit(request)
    while not request.ended:
        scheduler.loop.step()
        left.append(len(scheduler.kept_sequences.index.entries))
        assert engine.budget.used_bytes <= engine.budget.limit
        check_kept(scheduler)
    assert list(dict.fromkeys(left[:-1])) == [3, 2, 1, 0]
    scheduler.forget()
    assert_right(engine, request)


def test_a_new_request_waits_where_the_contexts_of_running_ones_are_promised(open_engine, tiny_store):
    """Two that run have two contexts, whatever they have used of them; a third one's would break the promise."""
    engine = open_engine(tiny_store, level=4, context=2 * BLOCK, parallel=2)
    scheduler = Scheduler(engine, Pace(chunk=16), keep=True)
    kept = scheduler.kept_sequences
    one, two = kept.sequence_for([1] * 20)[0], kept.sequence_for([2] * 20)[0]
    with pytest.raises(DoesNotFit, match="free for kv"):
        kept.sequence_for([3] * 20)
    kept.keep(one, [1] * 20)
    assert kept.sequence_for([3] * 20)[1] == 0
    kept.discard(two, [2] * 20)


def test_a_step_never_writes_beyond_reserved_memory(engine):
    """The engine refuses rows whose bytes the budget does not have."""
    sequence = engine.sequences.new(reserve=BLOCK)
    engine.step(Step((Segment(sequence, (5,) * BLOCK),)))
    with pytest.raises(AssertionError, match="beyond the reserved"):
        engine.step(Step((Segment(sequence, (5,)),)))
    engine.sequences.reserve(sequence, BLOCK + 1)
    engine.step(Step((Segment(sequence, (5,)),)))
    used = engine.budget.used_bytes
    engine.sequences.end(sequence)
    assert used - engine.budget.used_bytes == blocks_of(engine, 2)


def test_tokens_that_are_not_written_take_no_memory():
    """The system may put no huge page under a sequence, which would be resident for tokens that it lacks."""
    sequence = SequenceKV(KVShape((0, 1), 2, 128, 128), 1 << 14)
    start, found = sequence.keys.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        first = line.split(" ", 1)[0].split("-")
        if len(first) == 2:
            low, high = (int(part, 16) for part in first)
            inside = low <= start + (1 << 20) < high
        elif inside and line.startswith("Rss:"):
            assert int(line.split()[1]) < 1024
        elif inside and line.startswith("VmFlags:"):
            found = True
            assert "nh" in line.split()
    assert found
