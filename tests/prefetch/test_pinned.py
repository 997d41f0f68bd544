"""ExpertSource.pinned: resident experts are computed without a request, and counted as a request would count them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from counted_engine import CountedEngine
from engine_rig import limited
from fetch_rig import Rig, rigs
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import pairwise
from small_tokenizer import a_tokenizer
from toys import MERGED, SLICED, ToyForm, contents, expected, put
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from edgemoe.bench.timed_source import TimedSource
from edgemoe.bench.timeline import Timeline
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.engine.parts import Wraps
from edgemoe.errors import NotFinite
from edgemoe.experts.layer import ExpertLayer
from edgemoe.kernels.native import library as native
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.step import Segment, Step
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.policy.settings import RunSettings
from edgemoe.prefetch.base import ExpertSource
from edgemoe.prefetch.lookahead import LookaheadGate
from edgemoe.prefetch.step import FetcherStep
from edgemoe.storage.base import Blocks, ExpertKey

A, B, C, D = (ExpertKey(0, expert) for expert in range(4))
X, Y, Z = (ExpertKey(1, expert) for expert in range(3))

rig = pytest.fixture(rigs)

TOKENS = torch.randint(3, 300, (24,), generator=torch.Generator().manual_seed(5)).tolist()
MOE_LAYERS = 2
"""Number of MoE layers of the tiny store, whose middle layer is dense."""

needs_native = pytest.mark.skipif(
    not native.available(), reason="only the compiled kernel computes experts without a request"
)

MIXED = {"levels": (4, 2), "retention": 0.5, "depth": "equal"}
SKIPPED = {"levels": (8, 4, 0), "retention": 0.5, "renormalise": True}

KEYS = st.builds(ExpertKey, st.integers(0, 1), st.integers(0, 4))
LEVELS = st.dictionaries(KEYS, st.sampled_from([2, 4, 8]), max_size=4)
ACTIONS = st.tuples(st.sampled_from(["request", "scan", "predict", "fill", "drop", "release"]), LEVELS)


class Mirror:
    """The resident experts of a source as its observer sees them."""

    def __init__(self, r: Rig) -> None:
        self._rig = r
        self.blocks: dict[ExpertKey, tuple[int, Blocks]] = {}
        r.fetcher.pinned.observe(self._changed)

    def _changed(self, key: ExpertKey, level: int, blocks: Blocks) -> None:
        if level:
            self.blocks[key] = level, blocks
        else:
            assert not blocks
            del self.blocks[key]

    def check(self) -> None:
        """Asserts that the mirror has exactly the residents, each with its level and its own bytes."""
        assert {key: level for key, (level, _) in self.blocks.items()} == self._rig.vram.resident()
        for key, (level, blocks) in self.blocks.items():
            assert contents(blocks) == expected(self._rig.form, key, level)


def act(r: Rig, action: str, levels: Mapping[ExpertKey, int], check: Callable[[], None]) -> None:
    """Calls a rig's source once, or changes its tier between two calls; checks within requests as well."""
    if action in ("request", "scan", "predict"):
        with r.fetcher.request({} if action == "predict" else levels, scan=action == "scan") as request:
            check()
            if action == "predict":
                r.fetcher.read_ahead(levels)
            for _ in request:
                check()
    elif action == "fill":
        r.fetcher.fill(list(levels), [4, 2], lambda: True)
    else:
        r.fetcher.release_pins()
        for key in levels if action == "drop" else ():
            r.vram.drop(key, 8 - levels[key])


@pytest.mark.e2e
@settings(max_examples=40)
@given(
    form=st.sampled_from([MERGED, SLICED]),
    vram=st.integers(1, 6),
    dram=st.none() | st.integers(1, 3),
    actions=st.lists(ACTIONS, max_size=12),
)
def test_an_observer_mirrors_the_residents(
    form: ToyForm, vram: int, dram: int | None, actions: list[tuple[str, dict[ExpertKey, int]]]
) -> None:
    """Through arrivals, promotions, demotions, evictions and drops; an observer of any later time does, too."""
    r = Rig(form, vram, dram, look_ahead="full")
    try:
        mirrors = [Mirror(r)]

        def check() -> None:
            for mirror in mirrors:
                mirror.check()

        for number, (action, levels) in enumerate(actions):
            act(r, action, levels, check)
            if number % 4 == 1:
                mirrors.append(Mirror(r))
            check()
    finally:
        r.fetcher.close()


def test_residents_can_be_computed_from_while_reads_are_under_way(rig: type[Rig]) -> None:
    """Between two calls a speculative read changes no block of a resident expert, the victim's place included."""
    r = rig(SLICED, 2, look_ahead="full")
    mirror = Mirror(r)
    r.fetch({A: 4})
    r.fetch({B: 4})
    begun, go = r.reader.delay(X)
    r.predict({X: 4})
    assert begun.wait(30)
    assert mirror.blocks.keys() == {B}
    mirror.check()
    go.set()
    r.landed(X)
    mirror.check()
    r.fetch({X: 4})
    assert mirror.blocks.keys() == {B, X}
    mirror.check()


Layer = list[tuple[ExpertKey, int]]
"""(key, level) of experts in the order of their gate weights."""


def count(r: Rig, layers: Sequence[Layer], *, requests: bool) -> None:
    """Computes layers of resident experts, through a request each or without one."""
    if not requests:
        r.fetcher.pinned.count_hits(layers)
        return
    for layer in layers:
        with r.fetcher.request(dict(layer)) as request:
            assert {lease.key for leases in request for lease in leases} == {key for key, _ in layer}


def state(r: Rig) -> tuple[object, ...]:
    """All that decides the next evictions and predictions, and the counters."""
    policies = {kind: list(policy.candidates()) for kind, policy in r.vram.eviction.policies.items()}
    gate = dict(vars(r.fetcher._lookahead.gate))
    look_ahead = r.fetcher.looks_ahead, r.fetcher.predicting, gate | {"_recent": list(gate["_recent"])}
    return r.vram.resident(), policies, list(r.vram.eviction.first), look_ahead, r.fetcher.take_counts()


@st.composite
def hits(draw: st.DrawFn, residents: Mapping[ExpertKey, int]) -> list[Layer]:
    """Layers of resident experts, each at its level or below it."""
    layers = []
    for _ in range(draw(st.integers(1, 4))):
        keys = draw(st.lists(st.sampled_from(sorted(residents)), unique=True, max_size=3))
        layers.append(
            [(key, draw(st.sampled_from([2, 4, 8][: 1 + (2, 4, 8).index(residents[key])]))) for key in keys]
        )
    return layers


@pytest.mark.e2e
@settings(max_examples=40)
@given(
    mode=st.sampled_from(["off", "full", "auto"]),
    rounds=st.lists(st.tuples(LEVELS.filter(bool), LEVELS, st.booleans()), min_size=1, max_size=8),
    data=st.data(),
)
def test_count_hits_counts_as_requests_do(
    mode: str, rounds: list[tuple[dict[ExpertKey, int], dict[ExpertKey, int], bool]], data: st.DataObject
) -> None:
    """Counters, order of eviction, evict-first marks and the gate are as after one request per layer."""
    both = [Rig(MERGED, 6, None, 1, mode, LookaheadGate(window=3, rest=2, longest_rest=8)) for _ in range(2)]
    try:
        for wanted, predicted, scan in rounds:
            for r in both:
                r.fetch(wanted, scan=scan)
                r.predict(predicted)
                r.landed(*predicted)
            layers = data.draw(hits(both[0].vram.resident()))
            for r, requests in zip(both, (False, True), strict=True):
                count(r, layers, requests=requests)
            assert state(both[0]) == state(both[1])
    finally:
        for r in both:
            r.fetcher.close()


def test_hits_are_no_victims_of_what_follows(rig: type[Rig]) -> None:
    """An expert that was computed without a request counts as used: B, the older one now, is evicted."""
    r = rig(SLICED, 2)
    r.fetch({A: 4})
    r.fetch({B: 4})
    r.fetcher.pinned.count_hits([[(A, 4)]])
    r.fetch({C: 4})
    assert r.vram.resident() == {A: 4, C: 4}


def test_hits_end_the_marks_of_a_scan(rig: type[Rig]) -> None:
    """Hits end the marks, as a request that is no scan does: A, the oldest, is evicted and not the scan's expert."""
    r = rig(SLICED, 3)
    for key in (A, B):
        r.fetch({key: 4})
    with r.fetcher.request({C: 4}, scan=True) as request:
        list(request)
    r.fetcher.pinned.count_hits([[(B, 4)]])
    put(r.vram, SLICED, D, 4)
    assert r.vram.resident().keys() == {B, C, D}


def test_hits_resolve_a_prediction(rig: type[Rig]) -> None:
    """The first layer confirms X, which arrived, and refutes Y; no lease of the prediction is left."""
    r = rig(SLICED, 6, look_ahead="full")
    r.predict({X: 4, Y: 4})
    r.landed(X, Y)
    r.fetcher.pinned.count_hits([[(X, 4)]])
    assert r.fetcher.predicting is False
    r.whole()
    counts = r.fetcher.take_counts()
    layer = counts.lookahead[1]
    assert (layer.predicted, layer.wanted, layer.right, counts.speculated_used) == (2, 1, 1, 1)
    assert layer.hidden_bytes == layer.wasted_bytes > 0


def test_predictions_without_reads_are_counted(rig: type[Rig]) -> None:
    """Recall, precision and the gate are as after a prediction of residents and a request."""
    both = [rig(SLICED, 6, look_ahead="auto", gate=LookaheadGate(window=4, rest=2)) for _ in range(2)]
    for r in both:
        for key in (A, X, Y, Z):
            put(r.vram, SLICED, key, 4)
    pinned, requested = both
    for _ in range(2):
        pinned.fetcher.pinned.count_hits([[(A, 4)], [(X, 4), (Z, 4)]])
        pinned.fetcher.pinned.count_predictions([(1, [0, 1], [0, 2])])
        requested.predict({X: 4, Y: 4}, during={A: 4})
        requested.fetch({X: 4, Z: 4})
    assert pinned.fetcher.looks_ahead == requested.fetcher.looks_ahead
    layer, counts = pinned.fetcher.take_counts(), requested.fetcher.take_counts()
    assert layer.lookahead == counts.lookahead
    assert (layer.vram_hits, layer.levels) == (counts.vram_hits, counts.levels)
    assert (layer.lookahead[1].recall, layer.lookahead[1].precision) == (0.5, 0.5)


@pytest.fixture(scope="module")
def sparse_store(tiny_model: Qwen3MoeForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like the tiny store, with experts in all three layers."""
    config = Qwen3MoeConfig(**tiny_model.config.to_dict() | {"mlp_only_layers": []})
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    directory = tmp_path_factory.mktemp("sparse")
    model.save_pretrained(directory / "model")
    a_tokenizer().save_pretrained(directory / "model")
    convert_checkpoint(directory / "model", directory / "store", max_level=8, layout="auto", dense_bits=16)
    store, settings = StoreModel.open(directory / "store"), RunSettings(**SKIPPED)
    # The first engine whose levels go by damage measures it, with its own experts.
    Engine(store, store.plan(vram_limit=None, settings=settings, context=64), settings).close()
    return store.directory


@pytest.fixture
def engines(tiny_store) -> Iterator[Callable[..., tuple[Engine, Engine]]]:
    """Opens two engines alike: one computes from pinned experts, one makes a request for every layer.

    One reader: experts arrive, and are evicted, in one order.
    """
    with ExitStack() as stack:

        def open_both(
            experts: int | None = None, directory: Path = tiny_store, **changes: object
        ) -> tuple[Engine, Engine]:
            chosen = RunSettings(**{"exact": True, "readers": 1} | changes)

            def opened(wrap: Callable[[ExpertSource], ExpertSource]) -> Engine:
                store = StoreModel.open(directory)
                plan = limited(store, chosen, experts, 0)
                return stack.enter_context(CountedEngine(store, plan, chosen, Wraps(source=wrap)))

            return opened(lambda source: source), opened(lambda source: TimedSource(source, Timeline()))

        yield open_both


def decoded(engine: Engine, tokens: Sequence[int] = TOKENS, prompt: Sequence[int] = ()) -> torch.Tensor:
    """Logits after every token, each a step of one row, of a sequence that begins with a prompt."""
    sequence = SequenceKV(engine.shape.kv, engine.plan.context)
    if prompt:
        engine.prefill(sequence, prompt)
    return torch.stack([engine.step(Step((Segment(sequence, (token,)),)))[0] for token in tokens])


@needs_native
@pairwise(
    dense=[True, False],
    experts=[None, 5],
    changes=[{}, MIXED, SKIPPED, MIXED | {"exact": False}],
    e2e=lambda case: not case["dense"] or case["experts"] is None,
)
def test_both_paths_give_the_same(engines, tiny_store, sparse_store, dense, experts, changes) -> None:
    """Logits to the bit, counts, use and residents, with every expert resident or few, at one level or several."""
    pinned, requested = engines(experts, tiny_store if dense else sparse_store, **changes)
    for _ in range(2):
        assert torch.equal(decoded(pinned), decoded(requested))
        counts = pinned.take_counts()
        assert counts == requested.take_counts()
        assert pinned.take_use() == requested.take_use()
        assert pinned.vram.resident() == requested.vram.resident()
    assert experts is None or counts.ssd_bytes


@pytest.mark.e2e
@needs_native
@pytest.mark.parametrize(
    ("look_ahead", "experts"),
    [
        *(("full", 5), ("base", 5)),
        *(pytest.param(*how, marks=pytest.mark.folders) for how in (("full", None), ("auto", 5))),
    ],
)
def test_look_ahead_changes_no_logit(engines, sparse_store, experts, look_ahead) -> None:
    """Also after a prompt that evicts experts, with all of them resident in the end or few."""
    both = engines(experts, sparse_store, speculate=look_ahead, **MIXED)
    want = decoded(engines(experts, sparse_store, **MIXED)[1], prompt=TOKENS[:12])
    for _ in range(2):
        for engine in both:
            engine.take_use()
            assert torch.equal(decoded(engine, prompt=TOKENS[:12]), want)
        assert both[0].take_use() == both[1].take_use()


@pytest.mark.e2e
@needs_native
@pytest.mark.parametrize("look_ahead", ["full", "base", "auto"])
def test_predictions_of_residents_count_alike(engines, sparse_store, look_ahead) -> None:
    """Both paths count the same predictions, and mode auto rests in the same layers."""
    pinned, requested = engines(None, sparse_store, speculate=look_ahead, **MIXED)
    for engine in (pinned, requested):
        engine.fill()
        decoded(engine, prompt=TOKENS[:12])
        decoded(engine)
    counts = pinned.take_counts()
    assert counts == requested.take_counts()
    assert counts.lookahead[1].predicted == counts.lookahead[1].wanted > 0
    assert bool(counts.auto_resting) == (look_ahead == "auto")


@pytest.mark.e2e
@needs_native
def test_a_request_is_made_for_missing_experts_alone(engines, monkeypatch) -> None:
    """Under a limit every request of a decode step has an expert that is not resident at its level."""
    engine, _ = engines(6, **MIXED)
    decoded(engine)
    requests, request = [], FetcherStep.request

    def seen(step: FetcherStep, levels: Mapping[ExpertKey, int], **how):
        requests.append({key: engine.vram.level_of(key) for key in levels})
        assert any(requests[-1][key] < level for key, level in levels.items())
        return request(step, levels, **how)

    monkeypatch.setattr(FetcherStep, "request", seen)
    decoded(engine)
    assert 0 < len(requests) < MOE_LAYERS * len(TOKENS)


@pytest.mark.e2e
@needs_native
@pytest.mark.parametrize("changes", [{}, MIXED, SKIPPED], ids=str)
def test_resident_experts_are_computed_without_a_request(engines, monkeypatch, changes) -> None:
    """Once all are resident no layer is run by itself; the counts say what was computed."""
    engine, _ = engines(**changes)
    want = decoded(engine)
    engine.take_counts()
    first = engine.take_use()

    def run_alone(*arguments, **options):
        raise AssertionError("a layer's experts were computed by themselves")

    monkeypatch.setattr(ExpertLayer, "forward", run_alone)
    monkeypatch.setattr(FetcherStep, "request", run_alone)
    assert torch.equal(decoded(engine), want)
    counts, use = engine.take_counts(), engine.take_use()
    assert counts.vram_hits == counts.requests == sum(n for level, n in use.experts.items() if level)
    assert sum(use.experts.values()) == len(TOKENS) * engine.shape.top_k * MOE_LAYERS
    assert use == first


@pytest.mark.e2e
@needs_native
@pytest.mark.parametrize("experts", [None, 5])
def test_watch_sees_every_choice(engines, experts) -> None:
    """Layer by layer, on both paths alike, and the logits are the same."""
    choices = []
    for engine in engines(experts):
        seen: list[tuple[int, list[list[int]]]] = []
        want = decoded(engine)
        engine.watch(lambda layer, chosen, seen=seen: seen.append((layer, chosen.tolist())))
        assert torch.equal(decoded(engine), want)
        choices.append(seen)
    assert choices[0] == choices[1]
    assert [layer for layer, _ in choices[0]] == [0, 2] * len(TOKENS)


@needs_native
def test_a_layer_that_is_not_finite_is_named(engines) -> None:
    """Though one call takes a token through all layers, the error names the first layer that went wrong."""
    engine, _ = engines()
    want = decoded(engine)
    weight = engine.model.model.layers[1].self_attn.out.weight.data
    whole = weight.clone()
    weight.fill_(float("nan"))
    with pytest.raises(NotFinite, match="layer 1's output"):
        decoded(engine)
    weight.copy_(whole)
    assert torch.equal(decoded(engine), want)


@pytest.mark.e2e
@needs_native
@pytest.mark.parametrize("changes", [{}, {"speculate": "full"}], ids=str)
def test_forgotten_experts_are_read_again(engines, changes) -> None:
    """With empty tiers bytes come from disk again, and the logits are the same."""
    engine, _ = engines(**changes)
    want = decoded(engine)
    engine.take_counts()
    engine.forget_experts()
    assert engine.vram.resident() == {}
    assert torch.equal(decoded(engine), want)
    assert engine.take_counts().ssd_bytes > 0


@needs_native
def test_demoted_experts_are_not_computed_above_their_level(engines) -> None:
    """An expert that lost planes between two steps is read again, and one that lost all as well."""
    engine, _ = engines()
    want = decoded(engine)
    engine.source.release_pins()
    for number, key in enumerate(engine.vram.resident()):
        engine.vram.drop(key, (0, 2, 4, 8)[number % 4])
    assert torch.equal(decoded(engine), want)


@needs_native
@pytest.mark.parametrize("experts", [None, pytest.param(5, marks=pytest.mark.e2e)])
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"levels": (8,)}, {"levels": (4,)}),
        ({"levels": (8, 4), "exact": False}, {"levels": (8, 4), "exact": True}),
        ({"levels": (8, 4), "exact": True}, {"levels": (8, 4), "exact": False}),
        ({"levels": (8,)}, {"levels": (8, 4, 2, 0), "exact": True}),
    ],
)
def test_a_change_of_settings_reaches_pinned_experts(engines, first, then, experts) -> None:
    """Both paths apply levels, exactness and skipped experts from the next step on."""
    common = {"exact": True, "readers": 1, "retention": 0.5, "depth": "equal"}
    both = engines(experts, **common | first)
    for engine in both:
        decoded(engine)
        engine.configure(RunSettings(**common | then))
        engine.take_use()
    for _ in range(2):
        assert torch.equal(*map(decoded, both))
        assert both[0].take_use() == both[1].take_use()


@pytest.mark.e2e
@needs_native
def test_raised_experts_are_computed_at_their_level(engines) -> None:
    """Without `exact` an expert first wanted at 4 bits and now resident at 8 is computed at 8 on both paths."""
    both = engines(levels=(8, 4), exact=False, retention=0.5, depth="equal")
    for _ in range(3):
        assert torch.equal(*map(decoded, both))
    use = both[0].take_use()
    assert use == both[1].take_use()
    assert use.reused > 0
