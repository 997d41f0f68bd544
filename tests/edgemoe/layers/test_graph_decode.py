"""layers.graph.decode against transformers' modules, on a device that works late and out of order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from graph_rig import graph_engines, graph_store, logits
from pairwise import few
from recorded_launches import at_each_launch

from edgemoe.engine.engine import Engine
from edgemoe.kernels.triton import experts as triton_experts
from edgemoe.kv import blocks, window_rows, windows
from edgemoe.kv.formats import KVFormat
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.step import Segment, Step
from edgemoe.layers.graph import groups as graph_groups
from edgemoe.layers.graph.decode import GraphDecode
from edgemoe.prefetch.step import FetcherStep

pytestmark = [
    pytest.mark.triton,
    pytest.mark.e2e,
    pytest.mark.skipif(
        not triton_experts.INTERPRETED, reason="only Triton's interpreter reads experts in RAM"
    ),
]


MODELS = {
    "qwen3_moe": {},  # three experts per token, which fill no tile
    "mixtral": {"sliding_window": 2, "num_experts_per_tok": 2},  # in every layer
    "olmoe": {"clip_qkv": None, "num_experts_per_tok": 2},  # norms over all heads together
    # biases, and dense weights at 8 bits per weight
    "qwen3_moe, 8 bits": {"attention_bias": True, "num_experts_per_tok": 2},
    # one layer, whose projections have 4 to 6 bits in groups
    **{
        f"qwen3_moe, {bits} bits": {
            "num_hidden_layers": 1,
            "num_experts_per_tok": 2,
            "attention_bias": bits == 5,
        }
        for bits in (4, 5, 6)
    },
    "qwen3_moe, small": {"num_attention_heads": 1, "num_key_value_heads": 1, "num_experts_per_tok": 2},
    "qwen3_moe, yarn": {
        "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}
"""Model -> its config in addition to family_models.SMALL."""

SETTINGS = {
    "exact 8": {},
    "exact 2": {"levels": (2,)},
    "4/2": {"levels": (4, 2), "retention": 0.75},
    "8/4/2/0": {"levels": (8, 4, 2, 0), "retention": 0.75, "exact": False},
    "8/4/2/0 by the paper": {"levels": (8, 4, 2, 0), "rule": "paper", "retention": 0.75},
    "4/0, renormalised": {"levels": (4, 0), "retention": 0.6, "renormalise": True},
}


@pytest.fixture(scope="module")
def store(request, tmp_path_factory) -> Path:
    """A random model of a family, converted."""
    name = getattr(request, "param", "qwen3_moe, small")
    family, _, rest = name.partition(", ")
    bits = int(rest[0]) if rest.endswith("bits") else 16
    return graph_store(tmp_path_factory.mktemp("graph"), family, bits=bits, **MODELS[name])


@pytest.fixture
def open_on(store, monkeypatch) -> Iterator[Callable[..., Engine]]:
    """Opens engines on a double (graph_engines)."""
    yield from graph_engines(store, monkeypatch)


def require_equal_answers(open_on: Callable[..., Engine], monkeypatch, **how) -> None:
    """Compares an engine's logits and counts with transformers' modules, which differ by rounding."""
    engine = open_on(**how)
    assert isinstance(engine.runner.fused, GraphDecode)
    got, counts, use = logits(engine), engine.take_counts(), engine.take_use()
    monkeypatch.setattr(GraphDecode, "try_from", lambda *_: None)
    plain = open_on(**how).by_modules()
    want, their_counts, their_use = logits(plain), plain.take_counts(), plain.take_use()
    assert (got - want).norm() < 0.03 * want.norm()
    assert (counts.requests, counts.levels) == (their_counts.requests, their_counts.levels)
    assert use.damage == pytest.approx(their_use.damage, rel=1e-5)  # summed by layers or by groups of them
    assert replace(use, damage=0) == replace(their_use, damage=0)


@pytest.mark.parametrize(
    ("store", "name", "limits"),
    [
        ("qwen3_moe", "8/4/2/0", {}),
        ("mixtral", "4/2", {"experts": 5, "dram_experts": 4}),
        pytest.param(
            *("olmoe", "4/0, renormalised", {"experts": 5, "dram_experts": 4}), marks=pytest.mark.folders
        ),
        pytest.param(
            *("qwen3_moe, 8 bits", "exact 2", {"experts": 5, "dram_experts": 4}), marks=pytest.mark.folders
        ),
        ("qwen3_moe, 6 bits", "exact 8", {}),
        *(
            pytest.param(f"qwen3_moe, {bits} bits", "exact 8", {}, marks=pytest.mark.folders)
            for bits in (4, 5)
        ),
    ],
    indirect=["store"],
)
def test_a_new_token_is_computed_as_by_modules(open_on, monkeypatch, name, limits):
    """Logits equal transformers' modules but for rounding; equal experts are requested and counted.

    Each family and each kind of rule once, as Triton's interpreter takes long: norms over all heads, windows, biases
    and dense weights of 4 to 8 bits, with misses of every kind.
    """
    require_equal_answers(open_on, monkeypatch, **SETTINGS[name], **limits)


@pytest.mark.parametrize("store", ["qwen3_moe, yarn"], indirect=True)
@pytest.mark.parametrize("kinds", few([("q8_0", "q8_0"), ("q4_0", "q4_0")], [("q8_0", "q8_0")]))
def test_coded_keys_and_values_are_read_and_written(open_on, monkeypatch, kinds):
    """The kernels read the codes that a prompt's modules wrote, and write their own."""
    require_equal_answers(open_on, monkeypatch, kv=KVFormat(*kinds))


@pytest.mark.parametrize("store", ["qwen3_moe, yarn"], indirect=True)
def test_a_token_begins_as_by_modules(open_on):
    """Embedding and rotation have the bits of transformers' modules, factors on cosine and sine included."""
    engine = open_on()
    fused, model = engine.runner.fused, engine._parts.model.model
    memory = fused._memory
    assert model.rotary_emb.attention_scaling != 1
    with torch.inference_mode():
        for position, token in ((0, 5), (1, 250), (4097, 11)):
            memory.position.fill_(position)
            memory.token.fill_(token)
            fused._launches.begin()
            cosine, sine = model.rotary_emb(memory.hidden[None, None], torch.tensor([[position]]))
            assert torch.equal(memory.hidden, model.embed_tokens(torch.tensor(token)))
            assert torch.equal(memory.cosine, cosine.flatten())
            assert torch.equal(memory.sine, sine.flatten())


def test_limits_do_not_change_a_bit(open_on):
    """Logits are as with all experts resident, for any limits, look-ahead and order of copies."""
    want = logits(open_on())
    for seed, (experts, dram, readers, speculate) in enumerate([(2, 3, 4, "full"), (7, 0, 1, "auto")]):
        engine = open_on(experts, dram, seed=seed, readers=readers, speculate=speculate)
        assert torch.equal(logits(engine), want), (experts, dram)
        assert engine.take_counts().ssd_bytes > 0


def test_experts_are_read_where_they_lie(open_on, monkeypatch):
    """With few experts on the device and the others in DRAM, bits are as with copies, and some experts move."""
    monkeypatch.setattr(graph_groups, "GROUP", 1)
    how = SETTINGS["8/4/2/0"] | {"exact": True}
    three = 11, 250, 11
    want = logits(open_on(4, 64, in_place="off", **how), three)
    engine = open_on(4, 64, seed=1, **how)
    assert torch.equal(logits(engine, three), want)  # groups stop where an expert is read from disk
    engine.take_counts()
    moved, promote = [], engine.source.promote
    monkeypatch.setattr(
        engine.source, "promote", lambda wanted, counts: (moved.append(wanted), promote(wanted, counts))
    )
    tried = []
    run_layers = GraphDecode._run_layers
    monkeypatch.setattr(GraphDecode, "_run_layers", lambda *parts: (tried.append(1), run_layers(*parts))[1])
    assert torch.equal(logits(engine, three), want)
    counts = engine.take_counts()
    assert counts.ssd_bytes == 0
    assert counts.dram_hits > 0
    assert moved
    assert len(tried) < 6  # of six groups; groups that stopped three times before rest at first


def test_a_resting_group_is_tried_again(open_on, monkeypatch):
    """A group that rests is tried again after that many tokens, also where it follows one that runs."""
    monkeypatch.setattr(graph_groups, "GROUP", 1)
    engine = open_on(4, 64, levels=(4,))
    engine.fill()
    groups = engine.runner.fused._groups
    monkeypatch.setattr(groups, "everywhere", lambda step: False)  # each layer stays a group
    groups._division.rest[1] = 2
    rests = []
    run = GraphDecode._append
    monkeypatch.setattr(
        GraphDecode,
        "_append",
        lambda *parts, **how: (run(*parts, **how), rests.append(list(groups._division.rest)))[0],
    )
    logits(engine, (11, 250, 11))
    assert rests == [[0, 1], [0, 0], [0, 0]]


def test_layers_are_one_launch_once_every_expert_is_in_a_memory(open_on, monkeypatch):
    """Two launches of a group, captured and run, for each layer while experts are missing; then two for all layers.

    Where the one launch stops, the layers are tried in groups of their own: the same bits.
    """
    monkeypatch.setattr(graph_groups, "GROUP", 1)
    want = logits(open_on(4, 64, in_place="off", levels=(4,)))
    engine = open_on(4, 64, levels=(4,))
    groups, whole, launched = engine.runner.fused._groups, engine.runner.fused._whole, []
    launch = groups.launch
    monkeypatch.setattr(
        groups,
        "launch",
        lambda layers, saved: (at_each_launch(lambda: launched.append(layers)), launch(layers, saved)),
    )
    assert torch.equal(logits(engine), want)
    assert {len(layers) for layers in launched} == {1}
    engine.fill()
    launched.clear()
    assert torch.equal(logits(engine), want)
    assert {len(layers) for layers in launched} == {2}
    launched.clear()
    landed, vocab = whole._landed, engine.shape.vocab
    monkeypatch.setattr(
        whole,
        "_landed",
        lambda step, flight: (flight.outcome[vocab:].fill_(1), landed(step, flight))[1],
    )
    assert torch.equal(logits(engine, (11,)), want[:1])
    assert [len(layers) for layers in launched] == [2, 1, 1]


def test_a_batch_has_the_bits_of_its_tokens_alone(open_on):
    """Two sequences in a step have the logits that each has alone, and the record counts the experts of both."""
    how = {"experts": 4, "dram_experts": 64, "levels": (4,)}
    alone, prompts = [], ([5], [9, 7])
    for prompt in prompts:
        engine = open_on(**how)
        sequence = engine.sequences.new()
        engine.prefill(sequence, prompt)
        alone.append(engine.step(Step((Segment(sequence, (11,)),)))[0])
    engine = open_on(**how, parallel=2)
    both = [engine.sequences.new() for _ in prompts]
    for sequence, prompt in zip(both, prompts, strict=True):
        engine.prefill(sequence, prompt)
    with engine.recorded() as records:
        got = engine.step(Step(tuple(Segment(sequence, (11,)) for sequence in both)))
    assert torch.equal(got, torch.stack(alone))
    assert [sequence.length for sequence in both] == [2, 3]
    assert all(2 <= experts <= 4 for experts in records[0].active.values())


def test_layers_without_a_miss_send_no_request(open_on, monkeypatch):
    """With every expert resident a new token's hits are counted, and their source gets no request."""
    engine = open_on(levels=(4,))
    sequence = engine.sequences.new()
    engine.prefill(sequence, [5])
    engine.fill()
    monkeypatch.setattr(FetcherStep, "request", None)
    engine.take_counts()
    engine.step(Step((Segment(sequence, (7,)),)))
    counts = engine.take_counts()
    assert counts.vram_hits == counts.requests == engine.shape.layers * engine.shape.top_k


@pytest.mark.parametrize("store", ["mixtral"], indirect=True)
def test_rows_that_move_have_the_bits_of_rows_that_stay(open_on, monkeypatch):
    """Layers with a window keep their window on a device, in memory for fewer tokens than the context."""
    for module, name, rows in (
        *((blocks, "BLOCK", 4), (blocks, "BLOCK_ROWS", 4)),
        *((windows, "SLACK", 2), (window_rows, "TILE", 4)),
    ):
        monkeypatch.setattr(module, name, rows)
    engine, prompt = open_on(levels=(2,)), [5 + i for i in range(18)]
    moving, found = engine.sequences.new(), []
    for sequence in (moving, SequenceKV(engine.shape.kv.without_windows(), 64)):
        engine.prefill(sequence, prompt)
        found += [engine.step(Step((Segment(sequence, (token,)),))) for token in (11, 250, 11, 7)]
    assert len(found) == 8
    assert all(map(torch.equal, found[:4], found[4:]))
    assert {rows.moved for rows in moving.window_rows.values()} == {16}
    assert moving.keys.shape[2] < 64
