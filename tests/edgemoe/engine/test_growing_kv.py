"""KV that grows: experts' blocks give way to it and come back, inside one limit, without a bit of an answer changed."""

from __future__ import annotations

from contextlib import suppress
from itertools import count

import numpy as np
import pytest
import torch
from greedy import Greedy, plain, run
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from integrity import check_integrity, check_kept
from pairwise import pairwise
from present_pages import PAGEMAP, present_pages

from edgemoe.engine.engine import Engine
from edgemoe.engine.pace import Pace
from edgemoe.engine.scheduler import Scheduler
from edgemoe.errors import DoesNotFit
from edgemoe.kv import blocks
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.step import Segment, Step
from edgemoe.policy.hotness import Hotness
from edgemoe.storage.base import ExpertKey
from edgemoe.storage.store.reader import RecordReader

BLOCK, CONTEXT, EXPERTS = 128, 512, 3
PAGE, SLOTS, ROW = 4096, 12, 32
"""Of the tiny model's KV: keys and values of 3 layers and 2 heads, 16 numbers in bf16."""

PROMPT = [(7 * i) % 290 + 5 for i in range(1536)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Four blocks of tokens in a context, of which each takes a page of every layer's and head's keys and values."""
    monkeypatch.setattr(blocks, "BLOCK", BLOCK)


def kv_bytes(tokens: int, context: int = CONTEXT) -> int:
    """Bytes of the pages of whole blocks of so many tokens, by hand."""
    taken = min(-(-tokens // BLOCK) * BLOCK, context)
    return SLOTS * -(-taken * ROW // PAGE) * PAGE


def arena_bytes(engine: Engine) -> int:
    """Bytes of the blocks' mappings that the system has given to this process."""
    pages = 0
    for arena in engine.vram.blocks.arenas.values():
        address = np.frombuffer(arena._memory, np.uint8).ctypes.data
        pages += present_pages(address, len(arena._memory))
    return pages * PAGE


def sequence_bytes(sequence: SequenceKV) -> int:
    """Bytes of a sequence's KV that the system has given to this process."""
    storages = [stored.untyped_storage() for stored in (sequence.keys, sequence.values)]
    return sum(present_pages(each.data_ptr(), each.nbytes()) for each in storages) * PAGE


def blocks_of(engine: Engine) -> int:
    """Blocks that experts have now, of the kind that has the fewest."""
    return min(engine.memory.blocks.values())


@pytest.mark.e2e
@pairwise(
    alone=["kv", "changes"],
    kv=["bf16", "q8_0", "q4_0"],
    changes=[{}, {"eviction": "lru-pool"}, {"dram_experts": 4}],
)
def test_growing_changes_no_bit(open_engine, tiny_store, kv, changes):
    """Under a limit with blocks for 3 experts and the whole KV, an answer is an unlimited engine's."""
    context = CONTEXT if kv == "bf16" else 2048
    engine = open_engine(tiny_store, experts=EXPERTS, context=context, kv=kv, **changes)
    scheduler, used = Scheduler(engine, keep=True), engine.budget.used_bytes
    prompt = PROMPT[: context * 3 // 4]
    most = engine.memory.expert_bytes
    assert engine.plan.grows
    request = run(scheduler, prompt, 100)
    assert engine.memory.expert_bytes < most
    assert engine.budget.used_bytes <= engine.budget.limit
    check_kept(scheduler)
    check_integrity(engine.vram)
    want = plain(open_engine(tiny_store, context=context, kv=kv), prompt, 100)
    assert torch.equal(torch.stack(request.rows), want)
    scheduler.forget()
    assert (engine.memory.expert_bytes, engine.budget.used_bytes) == (most, used)


def test_experts_give_way_before_kept_sequences_leave(open_engine, tiny_store):
    """Conversations stay as long as the promised KV holds them: each costs blocks of experts, not its own tokens."""
    engine = open_engine(tiny_store, experts=EXPERTS, context=CONTEXT, parallel=2)
    scheduler, seen = Scheduler(engine, keep=True), [blocks_of(engine)]
    for first in range(3):
        run(scheduler, PROMPT[first : first + 250])
        seen.append(blocks_of(engine))
    assert seen[0] >= seen[1] > seen[2] > seen[3] >= EXPERTS
    assert run(scheduler, [*PROMPT[:250], 3, 4]).cached == 250
    check_kept(scheduler)


@pytest.mark.e2e
def test_a_branch_of_a_long_conversation_returns_its_blocks(open_engine, tiny_store):
    """With memory for one KV a kept sequence is cropped for a prompt that shares its beginning: experts come back."""
    engine = open_engine(tiny_store, experts=EXPERTS, context=CONTEXT)
    scheduler = Scheduler(engine, keep=True)
    run(scheduler, PROMPT[:400], 80)
    before = blocks_of(engine)
    branch = run(scheduler, [*PROMPT[:100], 9, 9], 300)
    assert branch.cached == 100
    assert blocks_of(engine) == before
    scheduler.forget()
    branch = run(scheduler, PROMPT[:400], 80)
    sequence = scheduler.kept_sequences.index.entries[0].sequence
    assert engine.sequences.crop(sequence, 130) == 130
    assert sequence.reserved == 2 * BLOCK
    assert blocks_of(engine) > before
    assert engine.memory.kv_bytes == kv_bytes(130)


def test_a_request_that_would_not_fit_beside_the_fewest_blocks_waits(open_engine, tiny_store):
    """Another one's whole context is promised: the second runs once the first has ended, the third of no memory."""
    engine = open_engine(tiny_store, experts=EXPERTS, context=CONTEXT)
    outside = engine.sequences.new(reserve=10)
    scheduler = Scheduler(engine, keep=True)
    with pytest.raises(DoesNotFit):
        scheduler.run(Greedy(PROMPT[:400]))
    engine.sequences.end(outside)
    assert len(run(scheduler, PROMPT[:400]).rows) == 4


@pytest.mark.e2e
def test_look_ahead_is_ended_before_blocks_leave(open_engine, tiny_store):
    """Predicted reads pin blocks between steps; growth ends them, and no lease or reservation is left."""
    engine = open_engine(tiny_store, experts=EXPERTS, context=CONTEXT, speculate="full")
    request = run(Scheduler(engine, Pace(chunk=64), keep=True), PROMPT[:400], 100)
    assert len(request.rows) == 100
    check_integrity(engine.vram)
    engine.source.release_pins()
    assert not engine.vram.residents.leases
    assert not engine.vram.residents.pending


def test_hot_sets_follow_the_blocks(open_engine, tiny_store):
    """Precision by hotness: fewer blocks of upper planes make smaller hot sets, and more make them larger again."""
    hot = {"levels": (4, 2), "exact": False, "hotness": Hotness(warmup=8, settled=True)}
    engine = open_engine(tiny_store, experts=EXPERTS, context=CONTEXT, **hot)
    before = sum(engine.rules.hot.capacity.values())
    scheduler = Scheduler(engine, keep=True)
    run(scheduler, PROMPT[:400], 100)
    assert sum(engine.rules.hot.capacity.values()) < before
    check_integrity(engine.vram)
    scheduler.forget()
    assert sum(engine.rules.hot.capacity.values()) == before


class GrowingMachine(RuleBasedStateMachine):
    """Sequences of one engine grow, are cropped and end while experts come and go.

    The model is the tokens that each sequence has reserved, from which all bytes follow, and the bytes of every expert
    as a reader gives them.
    """

    engine: Engine
    reader: RecordReader
    contents: dict[tuple[ExpertKey, int], dict[str, bytes]]

    @initialize()
    def build(self) -> None:
        self.model: dict[SequenceKV, int] = {}
        self.request, self.draws = None, count()
        self.engine.forget_experts()
        self.fixed = self.engine.budget.limit - self.engine.plan.kv_bytes - self.engine.plan.plane_bytes
        self.least = blocks_of(self.engine)

    def reserved(self) -> int:
        return sum(kv_bytes(tokens) for tokens in self.model.values())

    def fits(self, more: int) -> bool:
        """Whether so many bytes more are free with the fewest blocks, by hand."""
        kinds, plan = self.engine.store.form.kinds, self.engine.plan
        fewest = sum(kind.size * plan.vram_blocks.get(kind.name, 0) for kind in kinds)
        return self.fixed + fewest + self.reserved() + more <= plan.vram_limit_bytes

    closed = precondition(lambda self: self.request is None)

    @closed
    @precondition(lambda self: len(self.model) < 4)
    @rule(tokens=st.integers(1, CONTEXT))
    def new(self, tokens: int) -> None:
        if not self.fits(kv_bytes(tokens)):
            with pytest.raises(DoesNotFit):
                self.engine.sequences.new(reserve=tokens)
            return
        self.model[self.engine.sequences.new(reserve=tokens)] = tokens

    @closed
    @precondition(lambda self: self.model)
    @rule(which=st.integers(0, 3), tokens=st.integers(1, CONTEXT))
    def grow(self, which: int, tokens: int) -> None:
        sequence = list(self.model)[which % len(self.model)]
        if not self.fits(max(kv_bytes(tokens) - kv_bytes(self.model[sequence]), 0)):
            with pytest.raises(DoesNotFit):
                self.engine.sequences.reserve(sequence, tokens)
            return
        self.engine.sequences.reserve(sequence, tokens)
        self.model[sequence] = max(tokens, self.model[sequence])

    @closed
    @precondition(lambda self: self.model)
    @rule(which=st.integers(0, 3), tokens=st.integers(1, 64))
    def step(self, which: int, tokens: int) -> None:
        """Writes tokens, as many as are reserved, and reads experts."""
        sequence = list(self.model)[which % len(self.model)]
        rows = min(tokens, self.model[sequence] - sequence.length)
        if rows:
            drawn = tuple((17 * next(self.draws)) % 290 for _ in range(rows))
            self.engine.step(Step((Segment(sequence, drawn),)))

    @closed
    @precondition(lambda self: self.model)
    @rule(which=st.integers(0, 3), tokens=st.integers(0, CONTEXT))
    def crop(self, which: int, tokens: int) -> None:
        sequence = list(self.model)[which % len(self.model)]
        left = min(tokens, sequence.length)
        before = self.model[sequence]
        assert self.engine.sequences.crop(sequence, left) == left
        self.model[sequence] = min(-(-left // BLOCK) * BLOCK, -(-before // BLOCK) * BLOCK)

    @closed
    @precondition(lambda self: self.model)
    @rule(which=st.integers(0, 3))
    def end(self, which: int) -> None:
        sequence = list(self.model)[which % len(self.model)]
        del self.model[sequence]
        self.engine.sequences.end(sequence)

    @closed
    @rule(
        experts=st.lists(st.integers(0, 7), min_size=1, max_size=2, unique=True),
        level=st.sampled_from([4, 8]),
    )
    def acquire(self, experts: list[int], level: int) -> None:
        self.step = self.engine.source.begin()
        self.request = self.step.request({ExpertKey(0, expert): level for expert in experts})
        self.leases = next(self.request.__enter__())

    @precondition(lambda self: self.request is not None)
    @rule()
    def release(self) -> None:
        self.request.__exit__(None, None, None)
        self.step.end()
        self.request = None

    @precondition(lambda self: self.request is not None and self.fits(kv_bytes(CONTEXT)))
    @rule()
    def grow_within_a_request(self) -> None:
        """Refused without a change, where blocks would have to leave."""
        before, used = blocks_of(self.engine), self.engine.budget.used_bytes
        if used + kv_bytes(CONTEXT) > self.engine.budget.limit:
            with pytest.raises(ValueError, match="no open request"):
                self.engine.sequences.new()
            assert (blocks_of(self.engine), self.engine.budget.used_bytes) == (before, used)

    @invariant()
    def inside_the_limit(self) -> None:
        """Reserved bytes are the model's, and neither they nor the system's pages exceed the limit."""
        engine = self.engine
        if not hasattr(self, "model"):
            return
        assert engine.memory.kv_bytes == self.reserved()
        assert engine.budget.used_bytes <= engine.budget.limit
        assert arena_bytes(engine) == engine.memory.expert_bytes
        for sequence, tokens in self.model.items():
            assert sequence_bytes(sequence) <= kv_bytes(tokens)
        if not self.model:
            assert blocks_of(engine) == min(engine.plan.first_blocks.values())
        check_integrity(engine.vram)

    @invariant()
    def experts_keep_their_bytes(self) -> None:
        engine = self.engine
        for key, version in engine.vram.residents.versions.items():
            found = {kind: bytes(block) for kind, block in version.blocks.items()}
            assert found == self.content(key, version.level)

    def content(self, key: ExpertKey, level: int) -> dict[str, bytes]:
        if (key, level) not in self.contents:
            form, reader = self.engine.store.form, self.reader
            into = {kind.name: memoryview(bytearray(kind.size)) for kind in form.kinds_at(level)}
            form.fill(reader, key, level, into, None)
            self.contents[key, level] = {kind: bytes(block) for kind, block in into.items()}
        return self.contents[key, level]

    def teardown(self) -> None:
        if self.request is not None:
            self.release()
        for sequence in self.model:
            self.engine.sequences.end(sequence)
        with suppress(KeyError):
            assert self.engine.memory.kv_bytes == 0


@pytest.mark.e2e
@pytest.mark.skipif(not PAGEMAP.exists(), reason="the system does not list pages")
@pytest.mark.parametrize("eviction", ["lfru", "lru-pool"])
def test_any_order_of_growth_stays_inside_the_limit(open_engine, tiny_store, eviction):
    """Grow, write, crop, end, request and release: reserved bytes, pages and experts' bytes are a plain model's."""
    engine = open_engine(tiny_store, experts=EXPERTS, context=CONTEXT, parallel=2, eviction=eviction)
    reader = RecordReader.open(engine.store.directory, engine.store.manifest)
    machine = type("Machine", (GrowingMachine,), {"engine": engine, "reader": reader, "contents": {}})
    try:
        run_state_machine_as_test(
            machine, settings=settings(max_examples=25, stateful_step_count=40, deadline=None)
        )
    finally:
        reader.close()
