"""A new token's dense work in pieces: the same bits as without, on a double that notes and repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from device_double import DoubleDevice
from engine_rig import DECODED, PROMPT, engines_on, in_planes, limited, logits
from recorder_double import DoubleRecorder

from edgemoe.engine import cuda_graphs as graphs
from edgemoe.engine.engine import Engine
from edgemoe.kernels.native import library as native
from edgemoe.kv.sequence import StepKV
from edgemoe.kv.step import Segment, Step
from edgemoe.memory.plan import GRAPH_BYTES
from edgemoe.policy.settings import RunSettings
from storage.errors import ChecksumMismatch, DoesNotFit, NotFinite, UserError

LAYERS, MOE_LAYERS = 3, 2
PIECES = LAYERS + MOE_LAYERS + 1
"""Attention of every layer and the experts of two lie between them."""


@pytest.fixture(autouse=True)
def torchs_operators(monkeypatch) -> None:
    """The recorder sees these alone: as on a GPU, none of edgemoe's own kernels for RAM is used."""
    monkeypatch.setattr(native, "available", lambda: False)


@pytest.fixture
def open_on(tiny_store, monkeypatch) -> Iterator[Callable[..., Engine]]:
    """See engine_rig.engines_on."""
    yield from engines_on(tiny_store, monkeypatch)


def token(engine: Engine, sequence, number: int) -> torch.Tensor:
    return engine.step(Step((Segment(sequence, (number,)),)))[0]


@pytest.mark.parametrize("how", [{}, {"levels": (4, 2), "exact": False, "speculate": "full"}])
def test_pieces_change_no_bit(open_on, how):
    """Prompts and new tokens, experts that come and go: the logits of a device that runs every kernel by itself."""
    want = logits(open_on(DoubleDevice(1), 4, 16, **how))
    device = DoubleDevice(1)
    assert torch.equal(logits(open_on(device, 4, 16, graphs=True, **how)), want)
    assert device.pieces == PIECES
    # The first token runs as ever, the second is noted, and launched piece by piece as all that follow.
    assert device.launches == PIECES * (len(DECODED) - 1)


def test_any_sequence_goes_through_the_same_pieces(open_on):
    """Sequences of other lengths, one cropped, one with a prompt in between: each as it would be by itself."""
    plain, device = open_on(DoubleDevice(2)), DoubleDevice(2)
    noting = open_on(device, graphs=True)
    found = []
    for engine in (plain, noting):
        first = engine.new_sequence()
        rows = [engine.prefill(first, PROMPT[:5]), *(token(engine, first, n) for n in DECODED[:4])]
        first.crop(3)
        rows += [token(engine, first, n) for n in DECODED[4:]]
        rows.append(engine.prefill(first, PROMPT[5:9]))
        rows.append(token(engine, first, 7))
        found.append(torch.stack(rows))
        engine.end_sequence(first)
        second = engine.new_sequence()
        engine.prefill(second, PROMPT)
        rows.append(token(engine, second, 7))
        found[-1] = torch.stack(rows)
    assert torch.equal(*found)
    assert device.pieces == PIECES


def test_it_waits_no_more_often(open_on):
    """The host waits for the router's choice in each layer, and for the logits."""
    device = DoubleDevice(3)
    engine = open_on(device, 4, 16, graphs=True)
    sequence = engine.new_sequence()
    engine.prefill(sequence, PROMPT)
    for number in DECODED[:3]:
        before = device.waits
        token(engine, sequence, number)
        assert device.waits == before + MOE_LAYERS + 1


def keys_where_they_were(patch: pytest.MonkeyPatch) -> None:
    """Attention writes and reads as far as the sequence went when it was noted."""
    note = graphs.NewTokenGraph._note

    def fixed(graph, kv: StepKV):
        noted = note(graph, kv)
        length, (sequence, *_) = kv.get_seq_length(), kv.spans[0]

        def at_that_length(work):
            def run(now: StepKV) -> torch.Tensor:
                there, sequence.length = sequence.length, length
                try:
                    return work(now)
                finally:
                    sequence.length = there

            return run

        noted.pieces[:] = [(launch, at_that_length(work), result) for launch, work, result in noted.pieces]
        return noted

    patch.setattr(graphs.NewTokenGraph, "_note", fixed)


def attention_within_a_piece(patch: pytest.MonkeyPatch) -> None:
    """Keys are written where Python says, within a piece: for ever in the same place."""
    write = StepKV.write

    def update(kv: StepKV, keys, values, layer, *args, **kwargs):
        write(kv, layer, keys, values)
        return keys, values

    patch.setattr(StepKV, "update", update)
    patch.setattr(StepKV, "write", lambda kv, layer, keys, values: None)


def a_position_from_python(patch: pytest.MonkeyPatch) -> None:
    """The position is a number of Python's when the step is noted."""
    forward = graphs.NewTokenGraph._forward

    def fixed(graph, kv: StepKV):
        position, graph._position = graph._position, torch.full((1, 1), kv.get_seq_length())
        try:
            return forward(graph, kv)
        finally:
            graph._position = position

    patch.setattr(graphs.NewTokenGraph, "_forward", fixed)


@pytest.mark.parametrize("mistake", [keys_where_they_were, attention_within_a_piece, a_position_from_python])
def test_what_python_knew_when_noting_is_noticed(open_on, monkeypatch, mistake):
    """With a value that changes from token to token noted as it was, the logits are others."""
    want = logits(open_on(DoubleDevice(4)))
    mistake(monkeypatch)
    engine = open_on(DoubleDevice(4), graphs=True)
    try:
        assert not torch.equal(logits(engine), want)
    except NotFinite:
        return


def test_a_step_that_fails_while_it_is_noted(open_on, monkeypatch):
    """A read that fails, or a device without memory, leaves nothing half noted: the next token is right."""
    want = logits(open_on(DoubleDevice(5)))
    device = DoubleDevice(5)
    engine = open_on(device, 4, 16, graphs=True)
    sequence = engine.new_sequence()
    rows = [engine.prefill(sequence, PROMPT), token(engine, sequence, DECODED[0])]
    with monkeypatch.context() as patch:

        def damaged(*_: object, passing: bool = False) -> None:
            raise ChecksumMismatch("an expert was wanted", "other bytes", "Convert again")

        patch.setattr(engine._source, "stream", damaged)
        with pytest.raises(ChecksumMismatch):
            token(engine, sequence, DECODED[1])
    engine._runner.kernel.refusals = 2
    with pytest.raises(DoesNotFit):
        token(engine, sequence, DECODED[1])
    assert engine._passes._graph._noted is None
    engine._runner.kernel.refusals = 1  # once is no error, and the step is noted the second time
    rows += [token(engine, sequence, number) for number in DECODED[1:]]
    assert torch.equal(torch.stack(rows), want)


def test_what_is_not_finite_is_found_layer_by_layer(open_on):
    """To name the layer the step is run once more, as ever."""
    engine = open_on(DoubleDevice(6), graphs=True)
    sequence = engine.new_sequence()
    engine.prefill(sequence, PROMPT)
    for number in DECODED[:3]:
        token(engine, sequence, number)
    engine._model.model.layers[1].self_attn.o_proj.weight.data.fill_(float("nan"))
    with pytest.raises(NotFinite, match="layer 1"):
        token(engine, sequence, 7)
    assert sequence.length == len(PROMPT) + 3


def test_an_error_ends_the_open_piece():
    """What was being noted is ended, so that what follows runs."""
    device = DoubleDevice()
    recorder = DoubleRecorder(device)

    def fail() -> None:
        with recorder.noting():
            recorder.begin()
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert torch.ones(2).sum() == 2
    assert device.pieces == 1


def test_graphs_are_planned_for_or_refused(tiny_store):
    """They take memory of the limit; without a device there are none, and the option is refused."""
    store, settings = in_planes(tiny_store, DoubleDevice()), RunSettings(levels=(4,))
    beside, without = (
        limited(store, some, 3, 0).workspace_bytes for some in (settings.with_(graphs=True), settings)
    )
    assert beside - without == GRAPH_BYTES
    with pytest.raises(UserError, match="--graphs was wanted: the model is computed on the CPU"):
        limited(in_planes(tiny_store, None), settings.with_(graphs=True), 3, 0)
