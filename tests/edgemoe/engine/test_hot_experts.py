"""Engines whose precision follows how hot experts are: counts, moves, and the dependence of answers on them."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from counted_engine import CountedEngine
from fetch_rig import broken
from greedy import run
from integrity import check_integrity
from steps import decoded_together

from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.engine.scheduler import Scheduler
from edgemoe.errors import NotFinite, UserError
from edgemoe.experts.use import ChoiceCounts
from edgemoe.kernels.registry import kernels_for
from edgemoe.kv.step import Segment, Step, StepCancelled
from edgemoe.memory.describe import experts_held
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.policy.hotness import Hotness, Trend
from edgemoe.policy.importance import PromptAttention
from edgemoe.policy.settings import RunSettings
from edgemoe.prefetch.counts import TransferCounts
from edgemoe.storage.base import ExpertKey, Plane
from edgemoe.storage.record.forms import MergedForm
from edgemoe.storage.store.calibration import CALIBRATION_NAME
from edgemoe.storage.store.reader import RecordReader

PROMPTS = [[5, 9, 200, 17], [17, 3, 88, 41, 250], [60]]
DECODED = [[11, 250, 42, 7, 7, 96], [99, 7, 180, 1, 20, 8], [64, 12, 5, 5, 130, 77]]
SOON = Hotness(interval=2, warmup=2, half_life=8)
STILL = Hotness(warmup=1000, experts=0)
"""Nothing moves, so that the same steps have the same bits."""

ROUTED = (0, 2)
"""The layers with experts; layer 1 is dense."""


@pytest.fixture
def open_hot(open_engine, tiny_store) -> Callable[..., Engine]:
    """Opens engines of the tiny store at 4/2 by hotness."""

    def open_one(hotness: Hotness | None = SOON, **options) -> Engine:
        return open_engine(
            options.pop("store", tiny_store),
            **{"levels": (4, 2), "exact": False, "hotness": hotness, "parallel": 3} | options,
        )

    return open_one


def together(engine: Engine) -> torch.Tensor:
    """Logits of the prompts' next tokens, one of each in a step."""
    return decoded_together(engine, PROMPTS, DECODED)


def hot_of(engine: Engine) -> dict[int, set[int]]:
    """Layer -> its experts at the higher level."""
    resident = engine.vram.resident()
    return {
        layer: {e for (at, e), level in resident.items() if (at, level) == (layer, 4)} for layer in ROUTED
    }


def counted(engine: Engine) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Counts and mass [layers, experts] of all steps of `together`, and counts of the choices that a watcher saw."""
    total, seen = ChoiceCounts(3, 8), torch.zeros(3, 8, dtype=torch.float64)
    engine.watch(lambda layer, chosen: seen[layer].add_(torch.bincount(chosen.flatten(), minlength=8)))
    with engine.recorded() as records:
        together(engine)
    for record in records:
        total.merge(record.choices)
    return torch.from_numpy(total.counts), torch.from_numpy(total.mass), seen


@pytest.mark.e2e
@pytest.mark.parametrize(
    "limits", [{}, {"experts": 5}, {"experts": 5, "dram_experts": 4, "speculate": "full"}]
)
def test_the_kernel_counts_as_the_modules_do(open_hot, limits):
    """Every choice of prompts and tokens counts once, also where the kernel stops for an expert that is missing."""
    fused, by_modules = open_hot(STILL, **limits), open_hot(STILL, **limits).by_modules()
    assert fused.runner.fused is not None
    counts, mass, seen = counted(fused)
    assert torch.equal(counts, seen)
    other, other_mass, also_seen = counted(by_modules)
    assert torch.equal(other, also_seen)
    assert torch.equal(counts, other)
    torch.testing.assert_close(mass, other_mass, rtol=0.01, atol=0.01)
    tokens = sum(map(len, PROMPTS)) + sum(map(len, DECODED))
    assert counts.sum(1).tolist() == [2 * tokens, 0, 2 * tokens]
    assert mass.sum(1).tolist() == pytest.approx([tokens, 0, tokens], rel=0.01)


def test_scores_are_those_of_the_steps(open_hot):
    """A prompt of 5 tokens and a step of 3 rows weigh as many tokens, or the prompt's fewer with a weight."""
    for weight in (1.0, 0.25):
        engine = open_hot(Hotness(half_life=4, warmup=1000, prompt_weight=weight))
        seen = []
        engine.rules.hot.scores.observe = lambda counts, mass, tokens, seen=seen: seen.append(
            (counts.sum(), tokens)
        )
        together(engine)
        want = [(2 * 2 * weight * len(prompt), weight * len(prompt)) for prompt in PROMPTS]
        assert seen == want + [(2 * 2 * 3.0, 3.0)] * len(DECODED[0])


@pytest.mark.e2e
def test_without_hot_experts_it_is_the_lower_level_and_with_all_the_higher(open_hot):
    """Bit for bit: no expert at 4 computes as 2 for all, every expert at 4 as 4 for all."""
    none, every = (
        open_hot(Hotness(experts=0)),
        open_hot(Hotness(interval=1, warmup=0, settled=True, half_life=1e6)),
    )
    assert torch.equal(together(none), together(open_hot(None, levels=(2,))))
    assert none.take_use().experts.keys() == {2}
    every.rules.hot.fix({layer: set(range(8)) for layer in ROUTED})
    assert torch.equal(together(every), together(open_hot(None, levels=(4,))))
    assert every.take_use().experts.keys() == {4}


def test_off_counts_nothing_and_has_the_bits_of_before(open_hot):
    """Turned on and off again at run time, hotness leaves equal logits, and no array that any step adds to."""
    engine, plain = open_hot(None, levels=(4,)), open_hot(None, levels=(4,))
    off = engine.settings
    engine.configure(off.with_(levels=(4, 2), hotness=SOON))
    together(engine)
    engine.configure(off)
    assert engine.rules.hot is None
    with engine.recorded() as records:
        assert torch.equal(together(engine), together(plain))
    assert [record.choices for record in records] == [None] * len(records)
    assert {layer.chosen_by for layer in engine.runner.fused._native._structures} == {None}
    assert engine.source._transitions.idle


def test_no_step_waits_once_all_experts_are_there(open_hot):
    """With all experts in memory at 2 every request is a hit, whatever moves; hot sets keep to their size."""
    engine = open_hot(experts=12)
    assert engine.plan.vram_blocks == {"base": 16, "d4": 4}
    engine.fill()
    assert engine.vram.resident() == {ExpertKey(layer, e): 2 for layer in ROUTED for e in range(8)}
    used = set()
    for _ in range(100):
        together(engine)
        check_integrity(engine.vram)
        used |= engine.take_use().experts.keys()
        if 4 in used:  # an expert that is hot after the last step has not been used yet
            break
    counts = engine.take_counts()
    assert counts.requests == counts.vram_hits > 0
    assert counts.ssd_bytes == counts.moved_bytes == counts.promoted * engine.store.form.kinds[1].size > 0
    engine.source.release_pins()
    assert max(map(len, hot_of(engine).values())) <= 2
    assert engine.rules.hot.size == sum(map(len, hot_of(engine).values()))
    assert used == {2, 4}


def test_the_hottest_experts_of_a_layer_are_the_hot_ones(open_hot):
    """After settled steps the hot set of each layer is the best of its scores, as far as the margin lets it be."""
    engine = open_hot(Hotness(interval=1, warmup=0, margin=0, settled=True), experts=12)
    engine.fill()
    together(engine)
    for layer, hot in hot_of(engine).items():
        scores = engine.rules.hot.scores.values[layer]
        assert len(hot) == engine.rules.hot.capacity[layer] == 2
        assert min(scores[e] for e in hot) >= max(scores[e] for e in range(8) if e not in hot)


def test_a_trend_makes_experts_hot_whose_scores_rise(open_hot, monkeypatch):
    """The hot set is the best of the scores three intervals ahead, by the change between the last two intervals."""
    ends, close = [], Trend.close_interval
    monkeypatch.setattr(
        Trend, "close_interval", lambda trend, scores: (ends.append(scores.copy()), close(trend, scores))
    )
    engine = open_hot(Hotness(interval=1, warmup=0, margin=0, trend=3, settled=True), experts=12)
    engine.fill()
    together(engine)
    expected = 4 * ends[-1] - 3 * ends[-2]
    for layer, hot in hot_of(engine).items():
        assert hot == set(expected[layer].argsort()[-2:].tolist())
        assert len(hot) == 2
    assert any(hot != set(ends[-1][layer].argsort()[-2:].tolist()) for layer, hot in hot_of(engine).items())


@pytest.mark.e2e
@pytest.mark.parametrize("signal", ["mass", "count"])
def test_settled_answers_are_the_same_at_any_speed(open_hot, monkeypatch, signal):
    """A second run, and a disk that takes 3 ms longer, give equal bits and levels."""
    how = Hotness(signal=signal, interval=2, warmup=2, settled=True)
    first, again = open_hot(how, experts=12), open_hot(how, experts=12)
    want, use = together(first), first.take_use()
    assert use.experts[4] > 0
    assert torch.equal(together(again), want)
    read = RecordReader.read
    monkeypatch.setattr(RecordReader, "read", lambda *given: (time.sleep(0.003), read(*given))[1])
    slow = open_hot(how, experts=12)
    assert torch.equal(together(slow), want)
    assert slow.take_use() == use


def test_the_heat_of_earlier_runs_takes_the_place_of_a_warm_up(open_hot):
    """The first new token moves the experts that were hot before; a new run's heat is its own."""
    heat = {ExpertKey(layer, e): 1.0 if e in (3, 6) else 0.1 for layer in ROUTED for e in range(8)}
    engine = open_hot(Hotness(warmup=1000, interval=1000), experts=12)
    engine.fill()
    engine.fill_first(heat)
    sequence = engine.sequences.new()
    engine.prefill(sequence, PROMPTS[0])
    assert hot_of(engine) == {0: set(), 2: set()}
    for token in DECODED[0]:
        engine.step(Step((Segment(sequence, (token,)),)))
        engine.source.advance_changes(TransferCounts(), settle=True)
    assert hot_of(engine) == {0: {3, 6}, 2: {3, 6}}
    now = engine.heat()
    assert {key.layer for key in now} == {*ROUTED}
    assert all(0 < value <= 1 for value in now.values())
    assert [max(v for key, v in now.items() if key.layer == layer) for layer in ROUTED] == [1, 1]
    engine.forget_experts()
    assert engine.vram.resident() == {}
    assert engine.heat() == pytest.approx(heat)


def test_filled_from_heat_the_hottest_are_hot(open_hot):
    """A fill with heat brings the hottest experts at the higher level, and all others at the lower one."""
    heat = {ExpertKey(layer, e): 1.0 if e in (3, 6) else 0.1 for layer in ROUTED for e in range(8)}
    engine = open_hot(experts=12)
    engine.fill_first(heat)
    engine.fill()
    assert hot_of(engine) == {0: {3, 6}, 2: {3, 6}}
    assert len(engine.vram.resident()) == 16


@pytest.mark.parametrize("limits", [{"experts": 4}, {"experts": 7, "dram_experts": 4, "speculate": "full"}])
def test_fewer_blocks_than_experts(open_hot, limits):
    """Hot, cold and absent experts: requests bring what is absent, and hot ones are at most what the plan says."""
    engine = open_hot(**limits)
    assert engine.plan.vram_blocks["base"] < 16
    for _ in range(3):
        assert bool(together(engine).isfinite().all())
        for tier in (engine.vram, engine.dram):
            if tier:
                check_integrity(tier)
    counts = engine.take_counts()
    assert 0 < counts.vram_hits < counts.requests
    assert counts.promoted > 0
    assert engine.rules.hot.size <= engine.plan.hot_experts
    engine.forget_experts()
    assert not engine.vram.resident()


def test_a_step_that_fails_leaves_no_counts(open_hot):
    """After NaN in the last layer or in a router, the scores of later steps are finite, and a sound engine's."""
    engine, other = open_hot(STILL), open_hot(STILL)
    sequences = [each.sequences.new() for each in (engine, other)]
    for each, sequence in zip((engine, other), sequences, strict=True):
        each.prefill(sequence, PROMPTS[0])
    inner = engine.model.model
    for weights in (inner.norm.weight.data, inner.layers[0].mlp.gate.weight.data):
        before = weights.clone()
        weights.fill_(torch.nan)
        with pytest.raises(NotFinite):
            engine.step(Step((Segment(sequences[0], (42,)),)))
        with pytest.raises(NotFinite):
            engine.prefill(sequences[0], PROMPTS[1])
        weights.copy_(before)
    for token in DECODED[0]:
        for each, sequence in zip((engine, other), sequences, strict=True):
            each.step(Step((Segment(sequence, (token,)),)))
    assert (engine.rules.hot.scores.values == other.rules.hot.scores.values).all()
    assert engine.rules.hot.scores.values.any()


def test_a_cancelled_prompt_leaves_no_counts(open_hot):
    """StepCancelled within a prompt: the next step's choices alone are counted."""
    engine, other = open_hot(STILL), open_hot(STILL)
    sequence, ended = engine.sequences.new(), iter([False, True])
    step = Step((Segment(sequence, tuple(PROMPTS[1]), PromptAttention()),), cancelled=lambda: next(ended))
    with pytest.raises(StepCancelled):
        engine.step(step)
    engine.sequences.end(sequence)
    together(engine)
    together(other)
    assert (engine.rules.hot.scores.values == other.rules.hot.scores.values).all()


def test_a_damaged_plane_fails_no_step(open_hot, monkeypatch):
    """An upper plane with other bytes is never published: its expert stays at 2, and steps compute from that."""
    read = RecordReader.read

    def damaged(reader: RecordReader, key: ExpertKey, first: Plane, *rest) -> int:
        if first is Plane.D4:
            raise broken(key)
        return read(reader, key, first, *rest)

    monkeypatch.setattr(RecordReader, "read", damaged)
    engine = open_hot(experts=12)
    engine.fill()
    assert torch.equal(together(engine), together(open_hot(None, levels=(2,))))
    engine.source.release_pins()
    assert engine.rules.hot.size == engine.take_counts().promoted == 0


def test_levels_change_at_run_time(open_hot):
    """From 8/4 to 8/2 and to 4/2: experts between two levels leave the blocks that hot ones need."""
    engine = open_hot(levels=(8, 4), experts=12)
    together(engine)
    engine.configure(engine.settings.with_(levels=(8, 2)))
    assert {*engine.vram.resident().values()} <= {4, 8}
    for _ in range(3):
        together(engine)
        engine.source.release_pins()
    assert {*engine.vram.resident().values()} == {2, 8}
    engine.configure(engine.settings.with_(levels=(4, 2)))
    for _ in range(3):
        together(engine)
    assert engine.take_use().experts.keys() >= {2, 4}
    check_integrity(engine.vram)


def test_from_hotness_to_levels_by_damage(open_hot, damageable):
    """Damage that must be measured first is measured without hotness; and back again."""
    (damageable / CALIBRATION_NAME).unlink(missing_ok=True)
    engine = open_hot(store=damageable, levels=(8, 4))
    hot = engine.settings
    engine.configure(hot.with_(levels=(8, 4, 2, 0), hotness=None, bits=3.0))
    assert engine.rules.damage is not None
    assert engine.rules.hot is None
    engine.configure(hot)
    together(engine)
    assert engine.rules.hot.settings == SOON


def test_a_limit_of_hot_experts(open_hot, tiny_store):
    """The plan has no block for more, and says how many there are; 0 leaves all at the lower level."""
    plans = [open_hot(Hotness(experts=n), experts=14).plan for n in (0, 1, 8)]
    assert [plan.hot_experts for plan in plans] == [0, 2, 10]
    assert [plan.vram_blocks for plan in plans] == [{"base": 16, "d4": n} for n in (0, 2, 10)]
    assert experts_held(plans[1]) == "room for all 16 experts at 2 bits, the 2 that are used most at 4"
    few = open_hot(Hotness(experts=1), experts=6).plan
    text = f"room for {few.vram_experts} of 16 experts at 2 bits, the 2 that are used most at 4; the others are read"
    assert experts_held(few).startswith(text)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"exact": True}, "--exact"),
        ({"bits": 3.0}, "--bits"),
        ({"tpot_target": 0.05}, "--tpot-target"),
        ({"levels": (4,)}, "levels 4"),
        ({"levels": (4, 0)}, "levels 4/0"),
        ({"levels": (8, 4, 2)}, "levels 8/4/2"),
        ({"promotion": "whole"}, "--promotion whole"),
        ({"eviction": "lru-pool"}, "--eviction lru-pool"),
        ({"cache": False}, "a cache of planes"),
    ],
)
def test_settings_that_contradict_hotness_are_refused(changes, words):
    with pytest.raises(UserError, match="--policy hotness") as refused:
        RunSettings(**{"levels": (4, 2), "hotness": Hotness()} | changes)
    assert words in str(refused.value)


@pytest.mark.e2e
def test_a_kernel_whose_levels_have_one_size_is_refused(checkpoint, tmp_path, monkeypatch):
    """torch's kernel has 4 and 2 bits in the same block: refused by the plan, and at run time; 8/4 works."""
    torch_kernel = kernels_for("cpu")[-1]
    assert torch_kernel.form is MergedForm
    monkeypatch.setattr("edgemoe.models.store_model.compute", lambda device="cpu": torch_kernel)
    convert_checkpoint(
        checkpoint, tmp_path / "store", max_level=8, layout=torch_kernel.layout.name, dense_bits=16
    )
    store = StoreModel.open(tmp_path / "store")
    assert store.compute is torch_kernel
    limits = {"vram_limit": None, "context": 64}
    with pytest.raises(UserError, match="which take the same blocks"):
        store.plan(settings=RunSettings(levels=(4, 2), hotness=SOON), **limits)
    settings = RunSettings(levels=(8, 4), hotness=SOON)
    plan = store.plan(settings=settings, **limits, parallel=3)
    with CountedEngine(store, plan, settings) as engine:
        with pytest.raises(UserError, match="which take the same blocks"):
            engine.configure(settings.with_(levels=(4, 2)))
        together(engine)
        together(engine)
        assert engine.take_use().experts.keys() == {4, 8}


def test_kept_sequences_go_on_under_the_same_levels(open_hot):
    """The next turn computes its new tokens only; levels token by token begin anew."""
    engine = open_hot(parallel=1)
    scheduler, stem = Scheduler(engine, keep=True), list(range(40, 70))
    first = run(scheduler, stem)
    assert run(scheduler, [*first.tokens, 7]).cached == len(stem) + 3
    by_token = engine.settings.with_(hotness=None)  # levels 4/2 too
    assert by_token.levels_by != engine.settings.levels_by
    engine.configure(by_token)
    assert run(scheduler, [*first.tokens, 7]).cached == 0
