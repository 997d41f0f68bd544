"""Experts that are held for good where everything fits: computed without a stream, to the same bits and counts."""

from __future__ import annotations

import pytest
import torch
from fetch_rig import Rig, rigs
from toys import SLICED, contents, expected

from cache.base import Lease
from edgemoe.experts.token import TokenExperts
from edgemoe.kernels.native import library as native
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.step import Segment, Step
from edgemoe.policy.settings import RunSettings
from prefetch.fetcher import Fetcher
from storage.base import ExpertKey
from storage.errors import NotFinite

A, B = ExpertKey(0, 0), ExpertKey(0, 1)
TOKENS = torch.randint(3, 300, (40,), generator=torch.Generator().manual_seed(5)).tolist()

rig = pytest.fixture(rigs)
needs_native = pytest.mark.skipif(
    not native.available(), reason="only edgemoe's own kernel takes single tokens"
)


def decoded(engine, tokens):
    """Logits after every token, each a step of one row."""
    sequence = SequenceKV(engine.shape.kv, engine.plan.context)
    return torch.stack([engine.step(Step((Segment(sequence, (token,)),)))[0] for token in tokens])


def test_only_what_is_resident_and_never_in_the_way_is_held(rig: type[Rig]) -> None:
    """A miss, a level too low and a tier that may need the room give nothing; what is held shows the right bytes."""
    cramped = rig(SLICED, 2)
    cramped.fetch({A: 4})
    assert cramped.fetcher.hold(A, 4) is None
    r = rig(SLICED, 2, roomy=True)
    r.fetch({A: 4})
    assert r.fetcher.hold(B, 2) is None
    assert r.fetcher.hold(A, 8) is None
    r.whole()
    held = r.fetcher.hold(A, 2)
    assert isinstance(held, Lease)
    assert contents(held.blocks) == expected(SLICED, A, 4)


def test_what_is_held_ends_with_settle(rig: type[Rig]) -> None:
    """Whoever changes the tiers finds no lease in them, and whoever held one is told."""
    r = rig(SLICED, 2, roomy=True)
    r.fetch({A: 4})
    before = r.fetcher.holds
    r.fetcher.hold(A, 4)
    assert r.fetcher.holds == before
    assert r.vram._leases
    r.fetcher.settle()
    assert r.fetcher.holds != before
    r.whole()


def test_held_experts_count_as_hits(rig: type[Rig]) -> None:
    """Nobody sees in the counts which way an expert was found."""
    r = rig(SLICED, 2, roomy=True)
    r.fetch({A: 4, B: 4})
    r.fetcher.take_counts()
    r.fetch({A: 4, B: 2})
    streamed = r.fetcher.take_counts()
    r.fetcher.count_held([4, 2])
    assert r.fetcher.take_counts() == streamed


@needs_native
@pytest.mark.parametrize("settings", [{"level": 8}, {"levels": (4, 2), "exact": True, "retention": 0.5}])
def test_held_or_streamed_a_token_is_the_same(open_engine, tiny_store, monkeypatch, settings):
    """With everything resident no stream is opened once all are held, and neither a bit nor a count differs."""
    roomy, cramped = open_engine(tiny_store, **settings), open_engine(tiny_store, experts=3, **settings)
    assert torch.equal(decoded(roomy, TOKENS), decoded(cramped, TOKENS))
    roomy.take_counts()
    roomy.take_use()
    cramped.take_use()
    want = decoded(cramped, TOKENS)

    def opened(fetcher, wanted, passing=False):
        raise AssertionError(f"a stream of {wanted}")

    with monkeypatch.context() as patch:
        patch.setattr(Fetcher, "stream", opened)
        assert torch.equal(decoded(roomy, TOKENS), want)
    counts = roomy.take_counts()
    assert counts.vram_hits == counts.requests == sum(counts.levels.values()) > 0
    assert roomy.take_use() == cramped.take_use()


@needs_native
def test_held_experts_are_passed_in_one_call(open_engine, tiny_store, monkeypatch):
    """Once all are held no layer is stopped at; the counts say what was computed."""
    engine = open_engine(tiny_store)
    want = decoded(engine, TOKENS)
    engine.take_use()

    def stopped(experts, *args):
        raise AssertionError("a layer's experts were asked for by themselves")

    monkeypatch.setattr(TokenExperts, "__call__", stopped)
    assert torch.equal(decoded(engine, TOKENS), want)
    shape = engine.shape
    asked = len(TOKENS) * shape.top_k * (shape.experts // shape.experts_per_layer)
    assert engine.take_use().experts == {8: asked}


@needs_native
def test_whoever_watches_is_told_of_held_experts_too(open_engine, tiny_store):
    """Every layer's choice, layer by layer, and the same answer."""
    engine, told = open_engine(tiny_store), []
    want = decoded(engine, TOKENS)
    engine.watch(lambda layer, chosen: told.append((layer, chosen.tolist())))
    assert torch.equal(decoded(engine, TOKENS), want)
    first, told = told, []
    engine.watch(lambda layer, chosen: told.append((layer, chosen.tolist())))
    assert torch.equal(decoded(engine, TOKENS), want)
    sparse = sorted({layer for layer, _ in told})
    assert len(sparse) == engine.shape.experts // engine.shape.experts_per_layer
    assert [layer for layer, _ in told] == sparse * len(TOKENS)
    assert told == first


@needs_native
def test_a_layer_that_is_not_finite_is_found_among_held_ones(open_engine, tiny_store):
    """Though one call takes a token through all layers, the first that went wrong is named."""
    engine = open_engine(tiny_store)
    want = decoded(engine, TOKENS)
    weight = engine._model.model.layers[1].self_attn.module.o_proj.weight.data
    whole = weight.clone()
    weight.fill_(float("nan"))
    with pytest.raises(NotFinite, match="layer 1's output"):
        decoded(engine, TOKENS)
    weight.copy_(whole)
    assert torch.equal(decoded(engine, TOKENS), want)


@needs_native
def test_forgotten_experts_are_read_again(open_engine, tiny_store):
    """Emptying the tiers ends what is held: bytes come from disk again, and the same answer."""
    engine = open_engine(tiny_store)
    want = decoded(engine, TOKENS)
    engine.take_counts()
    engine.forget_experts()
    assert engine.vram.resident() == {}
    assert torch.equal(decoded(engine, TOKENS), want)
    assert engine.take_counts().ssd_bytes > 0


@needs_native
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"levels": (8,)}, {"levels": (4,)}),
        ({"levels": (8, 4), "exact": False}, {"levels": (8, 4), "exact": True}),
        ({"levels": (8, 4), "exact": True}, {"levels": (8, 4), "exact": False}),
    ],
)
def test_a_change_of_settings_reaches_what_is_held(open_engine, tiny_store, first, then):
    """Experts held for other settings are computed as these have it: to the bit as if they had never been held."""
    common = {"exact": True, "readers": 4, "retention": 0.5}
    engine = open_engine(tiny_store, **common | first)
    decoded(engine, TOKENS)
    decoded(engine, TOKENS)
    engine.configure(RunSettings(**common | then))
    other = open_engine(tiny_store, **common | first)
    decoded(other, TOKENS)
    decoded(other, TOKENS)
    other._source._roomy = False
    other.configure(RunSettings(**common | then))
    assert torch.equal(decoded(engine, TOKENS), decoded(other, TOKENS))
    engine.take_use()
    other.take_use()
    assert torch.equal(decoded(engine, TOKENS), decoded(other, TOKENS))
    assert engine.take_use() == other.take_use()


@needs_native
def test_what_is_raised_meanwhile_is_used(open_engine, tiny_store):
    """Without exactness an expert first met at 4 bits and now resident at 8 is computed at 8, held or not."""
    settings = {"levels": (8, 4), "exact": False, "retention": 0.5}
    engine, streaming = open_engine(tiny_store, **settings), open_engine(tiny_store, **settings)
    streaming._source._roomy = False
    for _ in range(3):
        assert torch.equal(decoded(engine, TOKENS), decoded(streaming, TOKENS))
    assert engine.take_use() == streaming.take_use()


@needs_native
def test_where_experts_have_to_go_none_is_held(open_engine, tiny_store):
    """One block short of everything, every expert stays evictable."""
    engine = open_engine(tiny_store)
    short = open_engine(tiny_store, experts=engine.shape.experts - 1)
    decoded(short, TOKENS)
    assert short._source.hold(next(iter(short.vram.resident())), 8) is None
    decoded(engine, TOKENS)
    assert engine._source.hold(next(iter(engine.vram.resident())), 8)
