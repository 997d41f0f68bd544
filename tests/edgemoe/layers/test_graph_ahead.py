"""layers.graph.ahead: tokens that run ahead of their request change no answer, no count, and no block that is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from device_rig import crowd
from graph_rig import graph_engines, graph_store

from edgemoe.engine.engine import Engine
from edgemoe.engine.request import Request
from edgemoe.engine.sampling import Sampler, Sampling
from edgemoe.engine.scheduler import Scheduler
from edgemoe.kernels.triton import experts as triton_experts
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.step import Segment, Step
from edgemoe.layers.graph.ahead import OneLaunch
from edgemoe.layers.graph.promotions import Promotions
from edgemoe.prefetch.device_path import DevicePath
from edgemoe.storage.base import ExpertKey

pytestmark = [
    pytest.mark.triton,
    pytest.mark.e2e,
    pytest.mark.skipif(
        not triton_experts.INTERPRETED, reason="only Triton's interpreter reads experts in RAM"
    ),
]

SMALL = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_experts_per_tok": 2, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    """A random model of one layer, converted."""
    return graph_store(tmp_path_factory.mktemp("ahead"), "qwen3_moe", **SMALL)


@pytest.fixture
def open_on(store, monkeypatch) -> Iterator[Callable[..., Engine]]:
    """Opens engines on a double (graph_engines)."""
    yield from graph_engines(store, monkeypatch)


def filled(open_on, **how) -> Engine:
    """An engine with every expert in the device's memory or in DRAM."""
    engine = open_on(**{"experts": 3, "dram_experts": 64, "levels": (4,)} | how)
    engine.fill()
    engine.take_counts()
    return engine


def append(engine: Engine, sequence: SequenceKV, token: int) -> torch.Tensor:
    """The logits [vocab] after a token."""
    return engine.step(Step((Segment(sequence, (token,)),)))[0]


def greedy(engine: Engine, sequence: SequenceKV, token: int, count: int) -> list[torch.Tensor]:
    """The logits after a token and after the likeliest ones that follow it."""
    rows = list[torch.Tensor]()
    for _ in range(count):
        rows.append(append(engine, sequence, token))
        token = int(rows[-1].argmax())
    return rows


def prompted(engine: Engine, prompt: Sequence[int] = (5,)) -> SequenceKV:
    """A sequence with a prompt."""
    sequence = engine.sequences.new()
    engine.prefill(sequence, prompt)
    return sequence


def never_ahead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OneLaunch, "_pays", lambda *parts: False)


def launched_by_host(engine: Engine, patch: pytest.MonkeyPatch) -> list[int]:
    """The tokens whose state comes from the host, and not from the launch before."""
    tokens, memory = list[int](), engine.runner.fused._memory
    begin = memory.begin_token
    patch.setattr(
        memory, "begin_token", lambda sequence, token: (tokens.append(token), begin(sequence, token))
    )
    return tokens


def scenario(engine: Engine) -> list[torch.Tensor]:
    """Logits after tokens that are requested, and after what discards a token that ran ahead."""
    one, other = prompted(engine), prompted(engine, (9,))
    rows = greedy(engine, one, 11, 3)
    rows += greedy(engine, other, 11, 2)  # another sequence
    rows += [append(engine, other, 42)]  # another token
    rows += greedy(engine, one, 3, 2)
    length = one.length
    rows += [engine.prefill(one, (8,))]  # a prompt
    one.crop(length)
    rows += [append(engine, one, int(rows[-2].argmax()))]  # the token that ran ahead, after a prompt
    return rows


def test_answers_and_counts_are_as_without_running_ahead(open_on, monkeypatch):
    """Not a bit differs, whatever is requested, and tokens count once: by requests, levels, uses and choices."""
    engine = filled(open_on, parallel=2)
    host = launched_by_host(engine, monkeypatch)
    got, counts, use = scenario(engine), engine.take_counts(), engine.take_use()
    assert len(host) < len(got) - 1
    never_ahead(monkeypatch)
    engine = filled(open_on, seed=1, parallel=2)
    want, their_counts, their_use = scenario(engine), engine.take_counts(), engine.take_use()
    assert all(map(torch.equal, got, want))
    assert (counts.requests, counts.levels) == (their_counts.requests, their_counts.levels)
    assert use == their_use


def test_the_likeliest_tokens_run_ahead_up_to_the_end_of_the_context(open_on, monkeypatch):
    """From the second match on the host launches no token, and none runs ahead beyond the sequence's last row."""
    engine = filled(open_on)
    sequence = SequenceKV(engine.shape.kv, 6)
    engine.prefill(sequence, [5])
    host = launched_by_host(engine, monkeypatch)
    rows = greedy(engine, sequence, 11, 5)
    assert host == [11, int(rows[0].argmax())]
    assert sequence.length == sequence.context
    assert engine.runner.fused._whole._ahead is None


def test_drawn_tokens_run_ahead(open_on, monkeypatch):
    """The device draws by the host's random numbers, so the host launches two tokens of an answer alone."""
    engine, likeliest = filled(open_on), []
    host = launched_by_host(engine, monkeypatch)
    sampler = Sampler(Sampling(2.0, 0.9, 40, 1, 7, 5, frozenset()))
    request = Request([5], sampler, on_token=lambda token, logits: likeliest.append(int(logits.argmax())))
    Scheduler(engine).run(request)
    assert request.error is None
    assert host == request.tokens[1:3]
    assert len({*request.tokens[1:]} - {*likeliest}) > 2


def test_a_token_that_stops_ahead_is_computed_in_groups(open_on, monkeypatch):
    """Where a token that ran ahead finds an expert in neither memory, its bits and counts are as ever."""
    never = filled(open_on)
    with monkeypatch.context() as patch:
        never_ahead(patch)
        want, their_counts = greedy(never, prompted(never), 11, 4), never.take_counts()
    engine = filled(open_on)
    whole, vocab, landings = engine.runner.fused._whole, engine.shape.vocab, []
    landed = whole._landed

    def stops(step, flight):
        """Ends the third token as one that has stopped."""
        landings.append(flight)
        if len(landings) == 3:
            flight.outcome[vocab:].fill_(1)
        return landed(step, flight)

    monkeypatch.setattr(whole, "_landed", stops)
    got, counts = greedy(engine, prompted(engine), 11, 4), engine.take_counts()
    assert all(map(torch.equal, got, want))
    assert (counts.requests, counts.levels) == (their_counts.requests, their_counts.levels)


def promoted_at_once(patch: pytest.MonkeyPatch) -> None:
    """Moves every expert that a token reads in DRAM, so that experts move whatever a machine's rounding chooses."""
    patch.setattr(Promotions, "choose", lambda promotions, away, levels: dict(away))


def everything(promotions: Promotions, away, levels) -> dict[ExpertKey, int]:
    """Every expert that the device's memory lacks, so that a launch's blocks are overwritten at each token."""
    return {
        ExpertKey(int(layer), int(expert)): 4 for layer, expert in zip(*(levels == 0).nonzero(), strict=True)
    }


def test_experts_move_while_a_token_runs_ahead(open_on, monkeypatch):
    """Promotions into blocks that the launch before read wait for it: not a byte changes under a launch."""
    promoted_at_once(monkeypatch)
    engine = filled(open_on, haste=0.0)
    moved, promote = [], engine.source.promote
    monkeypatch.setattr(
        engine.source, "promote", lambda wanted, counts: (moved.append(wanted), promote(wanted, counts))
    )
    got = greedy(engine, prompted(engine), 11, 5)
    assert moved
    never_ahead(monkeypatch)
    engine = filled(open_on, in_place="off")
    assert all(map(torch.equal, got, greedy(engine, prompted(engine), 11, 5)))


@pytest.mark.parametrize("fault", [pytest.param("no event", marks=pytest.mark.folders), "no settling"])
def test_a_double_notices_a_missing_wait(open_on, monkeypatch, fault):
    """Promotions without an event after the launch, and emptied tiers under a token that runs ahead, are faults."""
    promoted_at_once(monkeypatch)
    engine = filled(open_on, haste=0.0)
    device = engine.store.device
    if fault == "no event":
        monkeypatch.setattr(DevicePath, "computed", lambda path: None)
    else:
        monkeypatch.setattr(engine.source.launched, "settle", lambda: None)
        monkeypatch.setattr(engine.runner, "discard_ahead", lambda: None)
    sequence = prompted(engine)
    if fault == "no event":
        monkeypatch.setattr(Promotions, "choose", everything)
        for token in range(11, 19):
            device.catch_up()  # a launch reads an expert in the device's memory once its copy is done
            append(engine, sequence, token)
    else:
        greedy(engine, sequence, 11, 4)
        engine.forget_experts()
        crowd(engine.dram, 4)
    with pytest.raises(AssertionError):
        device.end()
    assert {*device.broken} == {"a block was overwritten under a kernel"}
    device.broken.clear()


def test_every_change_of_blocks_settles_a_token_that_runs_ahead(open_on, monkeypatch):
    """Requests, filling, emptying and resizing wait for it first."""
    monkeypatch.setattr(OneLaunch, "_pays", lambda *parts: True)
    engine = filled(open_on, haste=0.0)
    sequence, whole = prompted(engine), engine.runner.fused._whole
    for change in (
        engine.fill,
        lambda: engine.source.resize(dict.fromkeys(engine.vram.blocks.kinds, 3)),
        lambda: engine.prefill(sequence, [5]),
        engine.forget_experts,
    ):
        append(engine, sequence, 11)
        flight = whole._ahead
        assert not flight.landed.finished
        change()
        assert flight.landed.finished
    crowd(engine.dram, 4)
