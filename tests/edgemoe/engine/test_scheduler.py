"""Several requests at once: the bits of each alone, fair shares of steps, and a clean state after any end."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from integrity import check_integrity

from edgemoe.engine.engine import Engine
from edgemoe.engine.loop import REQUESTS_A_TRIM
from edgemoe.engine.pace import Pace
from edgemoe.engine.request import CANCELLED, Request
from edgemoe.engine.rules import Rules
from edgemoe.engine.sampling import Sampler, Sampling
from edgemoe.engine.scheduler import Scheduler
from edgemoe.errors import (
    ContextExceeded,
    DoesNotFit,
    ModelRefused,
    NotFinite,
    ReadFailed,
    UserError,
)
from edgemoe.experts.step import StepContext
from edgemoe.kernels.native import library as native
from edgemoe.kernels.registry import compute
from edgemoe.kv.blocks import BLOCK_ROWS
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.step import Segment, Step
from edgemoe.machine.process import resident_bytes
from edgemoe.machine.sigint import DeferredInterrupt
from edgemoe.policy.importance import PromptAttention
from edgemoe.storage.store.reader import RecordReader

MANY = 24
CHUNK = 5
GREEDY = Sampling(0, 1, 0, 1, 0, 4, frozenset())


def prompt_of(number: int) -> list[int]:
    """A prompt of 1 to 16 random tokens; neighbours have other lengths."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(3, 300, (1 + 7 * number % 16,), generator=generator).tolist()


def new_tokens_of(number: int) -> int:
    return 1 + number % 5


class Kept(Request):
    """A greedy request that keeps the logits of every token."""

    def __init__(self, tokens: list[int], new: int, **options: object) -> None:
        self.rows: list[torch.Tensor] = []
        sampler = Sampler(replace(GREEDY, max_new_tokens=new))
        super().__init__(tokens, sampler, on_token=self._keep, **options)

    def _keep(self, token: int, logits: torch.Tensor) -> bool:
        self.rows.append(logits.clone())
        return False


def alone(engine: Engine, tokens: list[int], new: int, chunk: int = CHUNK) -> torch.Tensor:
    """The logits of every greedy token, from steps of one sequence without a scheduler."""
    sequence, tokens, prompt, rows = engine.sequences.new(), list(tokens), PromptAttention(), []
    for start in range(0, len(tokens), chunk):
        logits = engine.step(Step((Segment(sequence, tuple(tokens[start : start + chunk]), prompt),)))[0]
    while True:
        rows.append(logits)
        if len(rows) == new:
            engine.sequences.end(sequence)
            return torch.stack(rows)
        logits = engine.step(Step((Segment(sequence, (int(logits.argmax()),)),)))[0]


def assert_nothing_is_left(engine: Engine, nbytes: int) -> None:
    """No block, pin, lease or byte of KV belongs to a request."""
    assert engine.budget.used_bytes == nbytes
    for tier in (engine.vram, engine.dram):
        if tier is not None:
            check_integrity(tier)
            assert not tier.residents.leases
            assert not tier.residents.pending


@pytest.mark.e2e
@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"level": 4}, marks=pytest.mark.folders),
        {"levels": (4, 2), "exact": True, "retention": 0.5},
        pytest.param({"level": 4, "kv": "q8_0"}, marks=pytest.mark.folders),
        {"level": 4, "kv": "q4_0"},
    ],
)
def test_sequences_that_come_and_go_have_the_bits_of_each_alone(open_engine, tiny_store, how):
    """24 requests that join and are cancelled at random steps, in little memory, have the bits of one by one.

    Other sequences decode between all layers of a prompt.
    """
    engine = open_engine(tiny_store, experts=5, dram_experts=3, parallel=MANY, **how)
    single = open_engine(tiny_store, **how)
    want = [alone(single, prompt_of(i), new_tokens_of(i)) for i in range(MANY)]
    used = engine.budget.used_bytes

    @settings(max_examples=2, suppress_health_check=list(HealthCheck))
    @given(
        joins=st.lists(st.integers(0, 20), min_size=MANY, max_size=MANY),
        leaves=st.dictionaries(st.integers(0, MANY - 1), st.integers(0, 40), max_size=6),
        every=st.integers(0, 4),
    )
    def run(joins: list[int], leaves: dict[int, int], every: int) -> None:
        scheduler = Scheduler(engine, Pace(chunk=CHUNK, every=every, work=1))
        requests = [Kept(prompt_of(i), new_tokens_of(i)) for i in range(MANY)]
        for step in range(250):
            for i, at in enumerate(joins):
                if at == step:
                    scheduler.submit(requests[i])
            for i, at in leaves.items():
                if at == step and at >= joins[i]:
                    scheduler.cancel(requests[i])
            scheduler.loop.step()
        assert scheduler.active == 0
        for i, request in enumerate(requests):
            assert request.reason == "length" or (request.reason == CANCELLED and i in leaves)
            if request.rows:
                assert torch.equal(torch.stack(request.rows), want[i][: len(request.rows)])
            if request.reason == "length":
                assert len(request.rows) == new_tokens_of(i)
        assert_nothing_is_left(engine, used)

    run()


def test_a_step_is_of_one_kind_and_has_each_sequence_once(open_engine, tiny_store):
    """A sequence twice, or a prompt together with new tokens, is refused before anything runs; so are too many rows."""
    engine = open_engine(tiny_store, parallel=2)
    one, two = engine.sequences.new(), engine.sequences.new()
    with pytest.raises(ValueError, match="each sequence once"):
        Step((Segment(one, (3,)), Segment(one, (4,))))
    with pytest.raises(ValueError, match="prompts or of new tokens"):
        Step((Segment(one, (3,)), Segment(two, (4,), PromptAttention())))
    assert engine.plan.prefill_rows == BLOCK_ROWS
    with pytest.raises(ValueError, match=f"at most {BLOCK_ROWS} rows"):
        engine.step(Step((Segment(one, (3,) * (BLOCK_ROWS + 1)),)))


def test_each_sequence_has_a_context_of_its_own(open_engine, tiny_store):
    """The budget has KV for `parallel` whole contexts, or for more sequences that need less."""
    engine = open_engine(tiny_store, context=64, parallel=2)
    assert engine.plan.kv_bytes == 2 * engine.shape.kv.bytes_for(64)
    used = engine.budget.used_bytes
    free = (engine.plan.vram_limit_bytes - used) // engine.shape.kv.bytes_for(16)
    assert free >= 8
    sequences = [engine.sequences.new(16) for _ in range(free)]
    with pytest.raises(DoesNotFit, match="free for kv"):
        engine.sequences.new(16)
    for sequence in sequences:
        engine.sequences.end(sequence)
    assert engine.budget.used_bytes == used


def test_decode_goes_first_and_a_chunk_comes_every_n_steps(open_engine, tiny_store, monkeypatch):
    """While a sequence decodes, a chunk of the second prompt comes after every 3 of its steps."""
    engine, steps, run = open_engine(tiny_store, parallel=2), [], Engine.run

    def noted(self: Engine, context: StepContext) -> Iterator[int]:
        steps.append(("decode" if context.decode else "chunk", context.step.rows))
        return run(self, context)

    monkeypatch.setattr(Engine, "run", noted)
    scheduler = Scheduler(engine, Pace(chunk=4, every=3))
    first, second = Kept([5] * 4, 12), Kept([9] * 10, 2)
    scheduler.submit(first)
    scheduler.loop.step()
    scheduler.submit(second)
    scheduler.wait(first)
    scheduler.wait(second)
    three = [("decode", 1)] * 3
    expected = [("chunk", 4), *three, ("chunk", 4), *three, ("chunk", 4), *three, ("chunk", 2), ("decode", 2)]
    assert steps[: len(expected)] == expected
    assert set(steps[len(expected) :]) == {("decode", 1)}
    assert first.trace.decode.rows == first.trace.decode.steps + 1


def test_other_sequences_decode_between_the_layers_of_a_chunk(open_engine, tiny_store, monkeypatch):
    """Two layers of 8 rows are the work of one pause, which comes after the second layer: two decode steps.

    A request that is cancelled before a pause ends there. Each request keeps its counts.
    """
    engine, steps, run = open_engine(tiny_store, experts=3, parallel=3), [], Engine.run

    def noted(self: Engine, context: StepContext) -> Iterator[int]:
        steps.append(("decode" if context.decode else "chunk", context.step.rows))
        yield from run(self, context)
        steps.append("end")

    scheduler = Scheduler(engine, Pace(chunk=8, every=2, work=8))
    first, second, prompt = Kept([5] * 4, 30), Kept([6] * 4, 30), Kept([9] * 16, 2)
    for request in (first, second):
        scheduler.submit(request)
    while len(scheduler.queue.running) < 2:
        scheduler.loop.step()
    scheduler.submit(prompt)
    monkeypatch.setattr(Engine, "run", noted)
    scheduler.loop._since_chunk, scheduler.loop._work = 2, 0
    scheduler.loop.step()
    decode = [("decode", 2), "end"]
    assert steps == [("chunk", 8), *decode, *decode, "end"]
    assert (prompt.length, prompt.partly) == (8, 0)
    prefill, decoded = (total.transfers for total in scheduler.totals)
    mine, *others = (r.trace.prefill.transfers.requests for r in (prompt, first, second))
    assert mine > 0
    assert others[0] == others[1]  # their prompts ran in one step, whose counts both have
    assert prefill.requests == mine + others[0]
    assert decoded.requests == first.trace.decode.transfers.requests
    steps.clear()
    engine.watch(lambda layer, chosen: scheduler.cancel(second))
    scheduler.loop._since_chunk, scheduler.loop._work = 2, 0
    scheduler.loop.step()
    assert steps[:1] == [("chunk", 8)]
    assert second.reason == CANCELLED
    assert ("decode", 1) in steps
    scheduler.wait(first)
    scheduler.wait(prompt)
    assert (first.reason, prompt.reason) == ("length", "length")


def test_a_prompts_cancel_between_layers_ends_it_alone(open_engine, tiny_store):
    """A cancel that comes while other sequences decode within the prompt's step ends the prompt, and them not."""
    engine = open_engine(tiny_store, parallel=2)
    scheduler, used = Scheduler(engine, Pace(chunk=8, every=2, work=1)), engine.budget.used_bytes
    first, prompt = Kept([5] * 4, 12), Kept([9] * 16, 2)
    scheduler.submit(first)
    scheduler.loop.step()
    scheduler.submit(prompt)
    on_token = first.on_token
    first.on_token = lambda token, logits: (scheduler.cancel(prompt), on_token(token, logits))[1]
    scheduler.loop._since_chunk = 4
    scheduler.loop.step()
    assert prompt.reason == CANCELLED
    scheduler.wait(first)
    assert torch.equal(torch.stack(first.rows), alone(open_engine(tiny_store), [5] * 4, 12))
    assert_nothing_is_left(engine, used)


def test_a_cancelled_prompt_keeps_its_kv_until_its_step_ends(open_engine, tiny_store):
    """Cancelled in its step's first layer, one of two prompts has its KV through all layers; others decode between."""
    engine = open_engine(tiny_store, parallel=3, context=128, prefill_rows=256)
    single = open_engine(tiny_store, context=128)
    scheduler, used, seen = Scheduler(engine, Pace(every=1)), engine.budget.used_bytes, []
    first, gone, other = Kept([5] * 4, 12), Kept([9] * 120, 2), Kept([7] * 120, 2)
    scheduler.submit(first)
    scheduler.loop.step()

    def cancel(layer: int, choice: torch.Tensor) -> None:
        if len(choice) > 2:
            scheduler.cancel(gone)
            seen.append((layer, len(choice), gone.sequence is not None))

    engine.watch(cancel)
    for request in (gone, other):
        scheduler.submit(request)
    for request in (first, other):
        scheduler.wait(request)
    assert seen == [(0, 240, True), (2, 240, True)]
    assert len(first.rows) == 12
    assert (gone.reason, other.reason) == (CANCELLED, "length")
    assert torch.equal(torch.stack(other.rows), alone(single, [7] * 120, 2, chunk=120))
    assert_nothing_is_left(engine, used)


def test_prompts_first_fill_a_step(open_engine, tiny_store):
    """Without decode steps between chunks every prompt runs before the sequences decode together."""
    scheduler = Scheduler(open_engine(tiny_store, parallel=3), Pace(chunk=4, every=0))
    requests = [Kept([5 + i] * (3 + 3 * i), 6) for i in range(3)]
    for request in requests:
        scheduler.submit(request)
    for request in requests:
        scheduler.wait(request)
    assert [request.trace.decode.rows for request in requests] == [3 * 5] * 3
    with pytest.raises(UserError, match="0 or more decode steps"):
        Pace(every=-1)


def test_requests_wait_for_kv_in_the_order_of_arrival(open_engine, tiny_store):
    """A context for two runs two at once; the third starts when the first has ended, before the fourth."""
    engine = open_engine(tiny_store, context=32, parallel=2)
    scheduler = Scheduler(engine)
    requests = [Kept([5 + i] * 4, 6 + 4 * (i % 2)) for i in range(4)]
    for request in requests:
        scheduler.submit(request)
    for request in requests:
        scheduler.wait(request)
    begins = [request.trace.token_times[0] for request in requests]
    assert begins == sorted(begins)
    assert requests[0].trace.token_times[-1] <= begins[2]
    assert requests[1].trace.token_times[-1] <= begins[3]


def test_wrong_requests_are_refused_at_once(open_engine, tiny_store):
    """An empty prompt, one beyond the context, and one with unknown tokens never wait."""
    scheduler = Scheduler(open_engine(tiny_store, context=16))
    with pytest.raises(UserError, match="at least one token"):
        scheduler.submit(Kept([], 1))
    with pytest.raises(ContextExceeded, match=r"17 tokens.*one of 16"):
        scheduler.submit(Kept([3] * 17, 1))
    with pytest.raises(ModelRefused, match="300"):
        scheduler.submit(Kept([300], 1))
    assert scheduler.active == 0


def batch(scheduler: Scheduler, number: int = 8, new: int = 5) -> list[Kept]:
    requests = [Kept(prompt_of(i), new) for i in range(number)]
    for request in requests:
        scheduler.submit(request)
    return requests


def test_a_full_context_ends_one_sequence_alone(open_engine, tiny_store):
    """The sequence whose context is full ends with reason context; the others have their bits of alone."""
    engine = open_engine(tiny_store, level=4, context=20, parallel=3)
    single = open_engine(tiny_store, level=4)
    scheduler = Scheduler(engine, Pace(chunk=CHUNK))
    long, others = Kept([7] * 17, 40), [Kept(prompt_of(i), 4) for i in (1, 2)]
    for request in (long, *others):
        scheduler.submit(request)
    for request in (long, *others):
        scheduler.wait(request)
    assert (long.reason, len(long.rows)) == ("context", 4)
    for request in others:
        want = alone(single, request.tokens[: request.prompt], 4)
        assert torch.equal(torch.stack(request.rows), want)


def test_logits_that_are_not_finite_end_one_sequence_alone(open_engine, tiny_store):
    """NaN in one sequence's keys ends it with an error; the others run on, with their bits of alone."""
    engine = open_engine(tiny_store, level=4, parallel=4)
    single = open_engine(tiny_store, level=4)
    used, scheduler = engine.budget.used_bytes, Scheduler(engine, Pace(chunk=CHUNK, every=1))
    requests = batch(scheduler, 4, new=16)
    while len(scheduler.queue.running) < 4:
        scheduler.loop.step()
    bad = scheduler.queue.running[1]
    assert bad.sequence
    bad.sequence.keys.fill_(float("nan"))
    with pytest.raises(NotFinite, match="layer 0's output") as caught:
        scheduler.wait(bad)
    assert caught.value.segments == (1,)
    for request in requests:
        if request is not bad:
            scheduler.wait(request)
            want = alone(single, request.tokens[: request.prompt], 16)
            assert torch.equal(torch.stack(request.rows), want)
    assert_nothing_is_left(engine, used)


def test_a_callbacks_error_ends_its_request_alone(open_engine, tiny_store):
    """The error is raised where its request is waited for; another request in the same steps goes on."""
    engine = open_engine(tiny_store, parallel=2)
    scheduler = Scheduler(engine)

    def fail(token: int, logits: torch.Tensor) -> bool:
        raise OSError("the pipe is closed")

    bad, good = Kept([5, 6], 3), Kept([7, 8, 9], 3)
    bad.on_token = fail
    scheduler.submit(bad)
    scheduler.run(good)
    assert good.reason == "length"
    with pytest.raises(OSError, match="the pipe is closed"):
        scheduler.wait(bad)


def test_a_cancel_within_a_long_prompt_ends_it_at_the_next_layer(open_engine, tiny_store, monkeypatch):
    """A cancel that comes in a chunk's first layer with experts runs no experts of the other layers."""
    engine = open_engine(tiny_store)
    scheduler, used = Scheduler(engine, Pace(chunk=64)), engine.budget.used_bytes
    request, layers = Kept([5] * 60, 4), []
    engine.watch(lambda layer, chosen: (layers.append(layer), scheduler.cancel(request)))
    scheduler.submit(request)
    scheduler.wait(request)
    assert (request.reason, layers) == (CANCELLED, [0])
    assert_nothing_is_left(engine, used)


def read_error(engine: Engine, scheduler: Scheduler, requests: list[Kept], patch: pytest.MonkeyPatch) -> None:
    """Every read of the next step fails."""

    def fail(self: RecordReader, *_: object) -> int:
        raise ReadFailed("bytes", "an error of the disk", "check the disk")

    patch.setattr(RecordReader, "read", fail)
    engine.forget_experts()


def ctrl_c(engine: Engine, scheduler: Scheduler, requests: list[Kept], patch: pytest.MonkeyPatch) -> None:
    """SIGINT comes while the next step computes experts."""
    forward, sent = compute().kernel.forward, []

    def interrupted(*arguments: object) -> object:
        if not sent:
            sent.append(1)
            os.kill(os.getpid(), signal.SIGINT)
        return forward(*arguments)

    patch.setattr(compute().kernel, "forward", interrupted)
    engine.forget_experts()


def cancel(engine: Engine, scheduler: Scheduler, requests: list[Kept], patch: pytest.MonkeyPatch) -> None:
    """Every second request is cancelled."""
    for request in requests[::2]:
        scheduler.cancel(request)


def close(engine: Engine, scheduler: Scheduler, requests: list[Kept], patch: pytest.MonkeyPatch) -> None:
    """The scheduler is closed."""
    scheduler.close()


Fault = Callable[[Engine, Scheduler, list[Kept], pytest.MonkeyPatch], None]


FAULTS = (read_error, ctrl_c, cancel, close)


@pytest.mark.e2e
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_step_of_a_batch_leaves_nothing(open_engine, tiny_store, monkeypatch, fault: Fault):
    """A failed read, Ctrl-C, cancels or a close at each step of a batch of 8: no block, pin, KV or thread is left.

    Every other step meets one of the faults. Where it ends no request, all have the bits of an undisturbed run.
    """
    engine = open_engine(tiny_store, level=4, experts=3, dram_experts=2, parallel=8)
    used, threads = engine.budget.used_bytes, threading.active_count()
    undisturbed = Scheduler(engine, Pace(chunk=CHUNK, every=1))
    want, steps = batch(undisturbed, new=3), 0
    while undisturbed.active:
        undisturbed.loop.step()
        steps += 1
    assert steps > 20
    for at in range(FAULTS.index(fault), steps, 2 * len(FAULTS)):
        scheduler = Scheduler(engine, Pace(chunk=CHUNK, every=1))
        requests = batch(scheduler, new=3)
        for _ in range(at):
            scheduler.loop.step()
        with monkeypatch.context() as patch:
            fault(engine, scheduler, requests, patch)
            with pytest.raises(KeyboardInterrupt) if fault is ctrl_c else nullcontext(), DeferredInterrupt():
                scheduler.loop.step()
        while scheduler.active:
            scheduler.loop.step()
        for request, whole in zip(requests, want, strict=True):
            assert request.ended
            assert request.sequence is None
            kept = len(request.rows)
            assert all(map(torch.equal, request.rows, whole.rows[:kept]))
            if fault is ctrl_c or (fault is cancel and request not in requests[::2]):
                assert (request.reason, kept) == ("length", 3)
        assert_nothing_is_left(engine, used)
    assert threading.active_count() == threads


def test_a_kept_sequence_stays_with_its_owner(open_engine, tiny_store):
    """A request in a sequence of the caller's leaves it with all tokens but the last, also when it is cancelled."""
    engine = open_engine(tiny_store)
    sequence: SequenceKV = engine.sequences.new()
    scheduler = Scheduler(engine)
    first = Kept([5, 6, 7], 4, sequence=sequence)
    scheduler.run(first)
    assert sequence.length == 6
    again = Kept([*first.tokens, 8], 9, sequence=sequence)
    again.on_token = lambda token, logits: scheduler.cancel(again) or False
    scheduler.run(again)
    assert again.reason == CANCELLED
    assert sequence.length == 8
    assert again.tokens[:6] == first.tokens[:6]


@pytest.mark.e2e
def test_threads_share_the_steps(open_engine, tiny_store):
    """Eight threads that each run a request have the tokens of a single one, and end."""
    engine = open_engine(tiny_store, level=4, parallel=4)
    single = open_engine(tiny_store, level=4)
    scheduler = Scheduler(engine, Pace(chunk=CHUNK))
    requests = [Kept(prompt_of(i), 5) for i in range(8)]
    threads = [threading.Thread(target=scheduler.run, args=(request,)) for request in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for i, request in enumerate(requests):
        assert torch.equal(torch.stack(request.rows), alone(single, prompt_of(i), 5))
    scheduler.close()
    with pytest.raises(UserError, match="an open model"):
        scheduler.submit(Kept([5], 1))


def test_each_gap_between_tokens_is_observed_once(open_engine, tiny_store, monkeypatch):
    """A wanted time per token sees each new token of the first running request, and only once."""
    engine, seen = open_engine(tiny_store), []
    monkeypatch.setattr(Rules, "observe_token", lambda self, seconds: seen.append(seconds))
    request = Kept([5, 6], 5)
    Scheduler(engine).run(request)
    assert seen == request.trace.gaps


def test_free_blocks_are_filled_while_nothing_runs(open_engine, tiny_store):
    """With `fill` the thread reads experts until a request comes, whose answer is as from an empty cache."""
    engine, cold = open_engine(tiny_store, level=4), open_engine(tiny_store, level=4)
    want = Kept([5, 6, 7], 4)
    Scheduler(cold).run(want)
    scheduler = Scheduler(engine)
    scheduler.start(fill=True)
    while len(engine.vram.resident()) < engine.shape.experts:
        assert scheduler._thread.is_alive()
    found = Kept([5, 6, 7], 4)
    scheduler.run(found)
    scheduler.close()
    assert torch.equal(torch.stack(found.rows), torch.stack(want.rows))


def test_a_failed_fill_is_only_logged(open_engine, tiny_store, monkeypatch, caplog):
    """A disk that fails while nothing runs is a warning, and requests are answered."""
    engine = open_engine(tiny_store)

    def fail(*_: object) -> None:
        raise ReadFailed("bytes", "an error of the disk", "check the disk")

    monkeypatch.setattr(Engine, "fill", fail)
    scheduler = Scheduler(engine)
    scheduler.start(fill=True)
    request = Kept([5], 1)
    scheduler.run(request)
    while scheduler._turns.taken or not caplog.text:
        assert scheduler._thread.is_alive()
    scheduler.close()
    assert request.reason == "length"
    assert "prefetch into free blocks failed" in caplog.text


@pytest.mark.skipif(not native.available() or os.cpu_count() == 1, reason="torch has one thread in no step")
def test_threads_that_drive_leave_no_others(open_engine, tiny_store):
    """A callback whose operator is large enough for torch's threads: each driving thread would keep a worker."""
    scheduler, ended = Scheduler(open_engine(tiny_store, level=4)), threading.Event()

    def on_token(token: int, logits: torch.Tensor) -> bool:
        return bool(torch.ones(64, 4096).sum() == 0)

    def drive(end: threading.Event) -> None:
        scheduler.run(Request([3, 4, 5], Sampler(GREEDY), on_token=on_token))
        end.set()
        ended.wait(60)

    drivers, counts = list[threading.Thread](), list[int]()
    for _ in range(3):
        done = threading.Event()
        drivers.append(threading.Thread(target=drive, args=(done,)))
        drivers[-1].start()
        assert done.wait(60)
        counts.append(psutil.Process().num_threads())
    ended.set()
    for driver in drivers:
        driver.join()
    scheduler.close()
    assert counts == [counts[0], counts[0] + 1, counts[0] + 2]


@pytest.mark.e2e
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another malloc than glibc's")
def test_memory_that_malloc_keeps_goes_back_after_some_requests(open_engine, tiny_store):
    """Holes between blocks that stay are resident until so many requests have ended."""
    library, size, blocks = ctypes.CDLL(None), 1 << 16, []
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    scheduler = Scheduler(open_engine(tiny_store, level=4))
    for _ in range(1000):
        blocks.append(library.malloc(size))
        ctypes.memset(blocks[-1], 1, size)
    stay = blocks[::10]
    for block in sorted({*blocks} - {*stay}):
        library.free(block)
    before = resident_bytes()
    for _ in range(REQUESTS_A_TRIM - 1):
        scheduler.run(Kept([5], 1))
    assert resident_bytes() > before - 400 * size
    scheduler.run(Kept([5], 1))
    assert resident_bytes() < before - 800 * size
    for block in stay:
        library.free(block)
    scheduler.close()


def test_dropping_an_ended_request_ends_none_within_a_step(open_engine, tiny_store):
    """A thread that drops a request which has ended leaves others to the step that runs, cancelled ones too."""
    scheduler = Scheduler(open_engine(tiny_store, parallel=2))
    over, other = Kept([5], 1), Kept([7] * 4, 40)
    scheduler.run(over)
    seen: list[tuple[str | None, bool]] = []

    def on_token(token: int, logits: torch.Tensor) -> bool:
        other.cancelled = True
        dropping = threading.Thread(target=scheduler.drop, args=(over,))
        dropping.start()
        dropping.join(60)
        seen.append((other.reason, other.sequence is not None))
        return True

    scheduler.submit(other)
    while len(other.rows) < 2:
        scheduler.loop.step()
    scheduler.run(Request([9], Sampler(GREEDY), on_token=on_token))
    assert seen == [(None, True)]
    scheduler.drop(other)
    assert other.reason == CANCELLED


def test_no_step_runs_within_a_pause(open_engine, tiny_store, monkeypatch):
    """A pause begins between two steps, the driving thread waits through it, and every token follows after it."""
    engine, inside, running = open_engine(tiny_store), [], threading.Event()
    run = engine.run

    def watched(context):
        inside.append(True)
        running.set()
        try:
            yield from run(context)
        finally:
            inside.pop()

    monkeypatch.setattr(engine, "run", watched)
    scheduler, request = Scheduler(engine), Kept([5, 6], 40)
    scheduler.start()
    scheduler.submit(request)
    assert running.wait(60)
    for _ in range(3):
        with scheduler.paused():
            before = len(request.rows)
            time.sleep(0.05)
            assert not inside
            assert len(request.rows) == before
    scheduler.wait(request)
    scheduler.close()
    assert len(request.rows) == 40


def test_a_pause_ends_a_fill(open_engine, tiny_store, monkeypatch):
    """Reading into free blocks, which may take minutes, gives way to a pause."""
    begun = threading.Event()

    def fill(self, go_on):
        begun.set()
        while go_on():
            time.sleep(0.001)

    monkeypatch.setattr(Engine, "fill", fill)
    scheduler = Scheduler(open_engine(tiny_store))
    scheduler.start(fill=True)
    assert begun.wait(60)
    entered = threading.Event()

    def pause() -> None:
        with scheduler.paused():
            entered.set()

    thread = threading.Thread(target=pause, daemon=True)
    thread.start()
    assert entered.wait(60)
    thread.join(60)
    scheduler.close()
