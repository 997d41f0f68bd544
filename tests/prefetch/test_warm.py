"""Free room filled before anybody asks: in order, at the right levels, in nobody's way; and a chat that does it."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest
import torch
from device_double import DoubleDevice
from engine_rig import DECODED, PROMPT, engines_on, logits
from fetch_rig import Rig, broken, rigs
from terminals import Terminal
from toys import MERGED, SLICED, disk_bytes

from edgemoe.chat.conversation import Conversation
from edgemoe.chat.idle_prefetch import idle_prefetch
from edgemoe.chat.loop import _read_and_prefetch, run_chat
from edgemoe.console.input import Turn
from edgemoe.engine.sampling import Sampling
from prefetch.lookahead_gate import Judge
from prefetch.warm import fill
from storage.base import ExpertKey

KEYS = [ExpertKey(layer, expert) for layer in range(2) for expert in range(3)]

rig = pytest.fixture(rigs)


@pytest.fixture
def engines(tiny_store, monkeypatch):
    """Opens engines on a double, or in RAM; ends them after the test."""
    yield from engines_on(tiny_store, monkeypatch)


def test_the_first_layers_come_as_far_as_there_is_room(rig: type[Rig]) -> None:
    """Also across several streams; not one byte more is read, and the counters start anew."""
    r = rig(SLICED, 5)
    fill(r.fetcher, r.vram, KEYS, [4], 2)
    assert r.vram.resident() == dict.fromkeys(KEYS[:5], 4)
    assert r.reader.bytes == 5 * disk_bytes(0, 4)
    assert r.fetcher.take_counts().requests == 0
    r.whole()


def test_room_that_the_highest_level_leaves_goes_to_the_next(rig: type[Rig]) -> None:
    """Blocks of d4 for two experts only: the others come at 2."""
    r = rig(SLICED, 4)
    r.vram._blocks.take("d4")  # as if the tier had fewer
    r.vram._blocks.take("d4")
    fill(r.fetcher, r.vram, KEYS, [4, 2], 2)
    assert r.vram.resident() == dict.fromkeys(KEYS[:2], 4) | dict.fromkeys(KEYS[2:4], 2)


def test_nobody_is_evicted_or_read_again(rig: type[Rig]) -> None:
    """What is resident stays, at whatever level; a full tier is left alone."""
    r = rig(MERGED, 3)
    r.fetch({KEYS[5]: 8, KEYS[0]: 2})
    fill(r.fetcher, r.vram, KEYS, [4], 2)
    assert r.vram.resident() == {KEYS[5]: 8, KEYS[0]: 2, KEYS[1]: 4}
    read = r.reader.bytes
    fill(r.fetcher, r.vram, KEYS, [4], 2)
    assert r.reader.bytes == read
    r.whole()


def test_a_prompt_takes_room_from_the_last_layers(rig: type[Rig]) -> None:
    """And not from those that it has asked for, nor from an expert that was used before any of them came."""
    r = rig(SLICED, 4)
    r.fetch({KEYS[2]: 4})
    fill(r.fetcher, r.vram, [KEYS[0], KEYS[3], KEYS[4]], [4], 2)
    with r.fetcher.stream({KEYS[0]: 4, KEYS[1]: 4}, passing=True) as leases:
        assert [lease.key for lease in leases] == [KEYS[0], KEYS[1]]
    assert r.vram.resident().keys() == {KEYS[0], KEYS[1], KEYS[2], KEYS[3]}


def test_layers_of_a_prompt_make_room_for_each_other(rig: type[Rig]) -> None:
    """What had to be read goes first, the latest before the earlier, and what was found stays; until a token comes."""
    r = rig(SLICED, 3)
    r.fetch({KEYS[4]: 4, KEYS[5]: 4})
    for now, left in ((KEYS[0], {KEYS[0]}), (KEYS[1], {KEYS[1]}), (KEYS[2], {KEYS[2]})):
        with r.fetcher.stream({now: 4}, passing=True) as leases:
            assert [lease.key for lease in leases] == [now]
        assert r.vram.resident().keys() == {KEYS[4], KEYS[5]} | left
    with r.fetcher.stream({KEYS[3]: 4}) as leases:
        assert [lease.key for lease in leases] == [KEYS[3]]
    assert r.vram.resident().keys() == {KEYS[5], KEYS[2], KEYS[3]}
    r.whole()


def test_what_is_asked_for_again_stays(rig: type[Rig]) -> None:
    """Within the same prompt: its second part found what the first had to read."""
    r = rig(SLICED, 3)
    for keys in (KEYS[:2], KEYS[1:2], KEYS[2:3], KEYS[3:4]):
        with r.fetcher.stream(dict.fromkeys(keys, 4), passing=True) as leases:
            assert [lease.key for lease in leases] == keys
    assert r.vram.resident().keys() == {KEYS[0], KEYS[1], KEYS[3]}


def test_a_guess_that_came_true_passes_too(rig: type[Rig]) -> None:
    """It was read for the prompt like the others."""
    r = rig(SLICED, 3, speculate="full")
    r.fetch({KEYS[5]: 4})
    with r.fetcher.stream({KEYS[0]: 4}, passing=True) as leases:
        r.fetcher.speculate({KEYS[1]: 4})
        assert [lease.key for lease in leases] == [KEYS[0]]
        r.landed(KEYS[1])
    with r.fetcher.stream({KEYS[1]: 4}, passing=True) as leases:
        assert [lease.key for lease in leases] == [KEYS[1]]
    with r.fetcher.stream({KEYS[2]: 4}, passing=True) as leases:
        assert [lease.key for lease in leases] == [KEYS[2]]
    assert r.vram.resident().keys() == {KEYS[5], KEYS[0], KEYS[2]}


def test_it_ends_when_it_is_told(rig: type[Rig]) -> None:
    """Within a stream: what is being read comes, nothing else is begun."""
    r = rig(SLICED, 6, workers=1)
    begun, gate = r.reader.hold(KEYS[1])
    told = []

    def go_on():
        if len(told) == 2:  # before the stream, before its first expert, and now
            assert begun.wait(30)
            threading.Timer(0.2, gate.set).start()
            return False
        told.append(True)
        return True

    fill(r.fetcher, r.vram, KEYS, [4], 6, go_on)
    assert r.vram.resident().keys() == set(KEYS[:2])
    r.whole()


def test_a_second_filling_leaves_the_first_ones_marks(rig: type[Rig]) -> None:
    """An expert that was used outlives what either has brought."""
    r = rig(SLICED, 5)
    r.fetch({KEYS[2]: 4})
    for _ in range(2):
        answers = iter([True, True, True])
        fill(r.fetcher, r.vram, KEYS, [4], 2, lambda answers=answers: next(answers, False))
    assert len(r.vram.resident()) == 5
    assert len(r.vram._first) == 4
    with r.fetcher.stream({KEYS[5]: 4}, passing=True) as leases:
        assert [lease.key for lease in leases] == [KEYS[5]]
    assert KEYS[2] in r.vram.resident()


def test_what_came_beside_a_damaged_one_goes_first_too(rig: type[Rig]) -> None:
    """Nobody has asked for it either."""
    r = rig(SLICED, 6, workers=1)
    r.reader.errors[KEYS[1]] = broken(KEYS[1])
    fill(r.fetcher, r.vram, KEYS, [4], 3)
    assert r.vram.resident().keys() == r.vram._first.keys() != set()


def test_what_would_stay_below_comes_up(engines) -> None:
    """A split that was left over from a token is not asked while room is filled, and is there again afterwards."""
    engine = engines(DoubleDevice(seed=1), None, 16)
    engine.fill()
    for key in list(engine.vram.resident()):
        engine.vram.drop(key)

    def split(levels):
        return len(levels)

    engine._source.split = split
    engine.fill()
    assert len(engine.vram.resident()) == engine.shape.experts
    assert engine._source.split is split


def test_an_expert_that_cannot_be_read_is_somebody_elses_error(rig: type[Rig]) -> None:
    """It ends there without one; the tier is whole, and whoever asks for the expert is told."""
    r = rig(SLICED, 6)
    r.reader.errors[KEYS[1]] = broken(KEYS[1])
    fill(r.fetcher, r.vram, KEYS, [4], 2)
    assert KEYS[1] not in r.vram.resident()
    r.whole()
    with pytest.raises(type(broken(KEYS[1]))):
        r.fetch({KEYS[1]: 4})


def test_the_look_ahead_is_not_judged_by_it(rig: type[Rig]) -> None:
    """Streams without guesses would have mode auto rest."""
    r = rig(SLICED, 6, speculate="auto", judge=Judge(window=2))
    fill(r.fetcher, r.vram, KEYS, [4], 2)
    assert len(r.vram.resident()) == 6
    assert r.fetcher.mode == "auto"
    assert r.fetcher.looks_ahead


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("experts", [None, 5])
def test_an_engine_answers_the_same_with_fewer_reads(engines, experts, on_device) -> None:
    """To the bit; where all fits, with none at all."""

    def device():
        return DoubleDevice(seed=1) if on_device else None

    plain, filled = engines(device(), experts), engines(device(), experts)
    filled.fill()
    assert len(filled.vram.resident()) == (experts or filled.shape.experts)
    assert torch.equal(logits(plain), logits(filled))
    before, after = plain.take_counts(), filled.take_counts()
    assert after.ssd_bytes < before.ssd_bytes
    assert after.ssd_bytes == 0 or experts


def test_a_prompt_passes_and_a_token_does_not(engines, monkeypatch) -> None:
    """21 tokens want nearly all of a layer; one wants two, and so do two that are appended."""
    engine, passed = engines(None, 6), []
    stream = engine._source.stream

    def seen(wanted, *, passing=False):
        passed.append((len(wanted), passing))
        return stream(wanted, passing=passing)

    monkeypatch.setattr(engine._source, "stream", seen)
    sequence = engine.new_sequence()
    engine.prefill(sequence, PROMPT)
    engine.prefill(sequence, DECODED[:1])
    engine.prefill(sequence, DECODED[1:3])
    assert {passing for _, passing in passed} == {False, True}
    assert all(passing == (wanted > 4) for wanted, passing in passed)


def test_loading_on_demand_fills_nothing(engines) -> None:
    """A run without a cache stays one."""
    engine = engines(None, cache=False)
    engine.fill()
    assert engine.vram.resident() == {}


def test_the_engine_fills_while_somebody_waits(engines) -> None:
    """On a thread of its own, which has ended when the waiting has; then the engine is the waiter's again."""
    engine = engines(None)
    deadline = time.monotonic() + 60
    with idle_prefetch(engine):
        while len(engine.vram.resident()) < engine.shape.experts:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert "idle-prefetch" not in [thread.name for thread in threading.enumerate()]
    engine.prefill(engine.new_sequence(), PROMPT)
    assert engine.take_counts().ssd_bytes == 0


def slowed(engine, begun: threading.Event, patch: pytest.MonkeyPatch) -> None:
    """Has every read take 0.1 s more."""
    reader = engine._source._traffic._reader
    read = reader.read

    def slow(*arguments):
        begun.set()
        time.sleep(0.1)
        return read(*arguments)

    patch.setattr(reader, "read", slow)


def test_who_leaves_does_not_wait_for_all_of_it(engines, monkeypatch) -> None:
    """An error ends the filling behind the reads that are under way."""
    engine, begun = engines(None), threading.Event()
    slowed(engine, begun, monkeypatch)
    with suppress(ZeroDivisionError), idle_prefetch(engine):
        assert begun.wait(60)
        raise ZeroDivisionError
    assert len(engine.vram.resident()) < engine.shape.experts
    engine.vram.check_integrity()


def test_ctrl_c_while_the_filling_ends(engines, monkeypatch) -> None:
    """It is raised behind the end of the filling, whose read goes on for a while: the engine can be closed then."""
    engine, begun, gate = engines(None), threading.Event(), threading.Event()
    read = engine._source._traffic._reader.read

    def held(*arguments):
        begun.set()
        assert gate.wait(60)
        return read(*arguments)

    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        gate.set()

    def wait_and_leave():
        with idle_prefetch(engine):
            assert begun.wait(60)
            threading.Thread(target=interrupt).start()

    monkeypatch.setattr(engine._source._traffic._reader, "read", held)
    with pytest.raises(KeyboardInterrupt):
        wait_and_leave()
    assert gate.is_set()
    engine._source.settle()  # no stream is open
    engine.vram.check_integrity()


def test_a_turn_is_dropped_by_ctrl_c_behind_it(engines, monkeypatch, capsys) -> None:
    """Read already, not yet asked: the chat goes on; at an empty prompt it ends."""
    chat = SimpleNamespace(engine=engines(None), say=print)

    @contextmanager
    def interrupted(engine):
        yield
        raise KeyboardInterrupt

    monkeypatch.setattr("edgemoe.chat.loop.idle_prefetch", interrupted)
    assert _read_and_prefetch(chat, SimpleNamespace(read=lambda: Turn("the fox"))) is None
    assert "dropped" in capsys.readouterr().out

    def empty():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _read_and_prefetch(chat, SimpleNamespace(read=empty))


def test_what_goes_wrong_is_logged(engines, monkeypatch, caplog) -> None:
    """And the waiting goes on."""
    engine = engines(None)

    def fail(go_on):
        raise RuntimeError("a device refused a copy")

    monkeypatch.setattr(engine, "fill", fail)
    with idle_prefetch(engine):
        pass
    assert "refused a copy" in caplog.text


@pytest.mark.e2e
def test_a_chat_fills_at_a_terminal(tiny_store, tmp_path) -> None:
    """What a person finds who took their time: every expert resident before the first question."""
    with Terminal(tmp_path, "chat", "--model", tiny_store) as terminal:
        terminal.ready()
        deadline = time.monotonic() + 60
        while "16 of at most 16 experts resident" not in terminal.enter("/mem"):
            assert time.monotonic() < deadline


def test_a_pipe_is_not_kept_waiting(engines, monkeypatch) -> None:
    """A script's first line is there already: nothing is read for nobody."""
    engine = engines(None)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    run_chat(engine, Conversation(engine, None, Sampling(0, 1, 0, 1, 0, 2, frozenset())), None, as_json=True)
    assert engine.vram.resident() == {}
