"""Engines that compensate the likeliest experts of each token: which experts, the bits, the counts and the limits."""

from __future__ import annotations

import re
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from compensated_steps import DECODED, PROMPTS, RANKS, alone, together
from compensator_bytes import add_random
from counted_engine import CountedEngine
from pairwise import pairwise

import edgemoe
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.engine.kept_sequences import KeptSequences
from edgemoe.engine.parts import Wraps
from edgemoe.errors import DamagedData, DoesNotFit, UserError
from edgemoe.experts.step import ExpertProbe, Study
from edgemoe.experts.use import ExpertUse
from edgemoe.kernels.base import Part
from edgemoe.kv.step import Segment, Step
from edgemoe.memory.describe import plan_lines
from edgemoe.policy.compensation import Compensation
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.compensators.geometry import CompensatorGeometry

ONE, TWO = {"compensation": Compensation(1)}, {"compensation": Compensation(2)}


@pytest.fixture(scope="module")
def compensated(tiny_store, tmp_path_factory) -> Path:
    """The tiny store with compensators of random codes, of level 2."""
    store = Path(shutil.copytree(tiny_store, tmp_path_factory.mktemp("compensated") / "store"))
    add_random(store, lambda layer, expert: RANKS[expert % 3])
    return store


def test_off_keeps_every_bit(open_engine, tiny_store, compensated):
    """A store's compensators change nothing, take no memory and are not counted without the option."""
    engine = open_engine(compensated, level=2, parallel=4)
    plain = open_engine(tiny_store, level=2, parallel=4)
    assert torch.equal(alone(engine), alone(plain))
    assert torch.equal(together(engine), together(plain))
    assert engine.plan == plain.plan
    assert engine.plan.compensators_bytes == 0
    assert "compensator" not in " ".join(plan_lines(engine.plan, engine.settings))
    use = engine.take_use()
    assert use.compensation == {"pairs": 0, "experts": 0}
    assert use.bits_scheduled == 2.5


@pytest.mark.e2e
@pairwise(
    alone=["settings", "limits"],
    settings=[{"level": 2, **ONE}, {"level": 2, **TWO}, {"levels": (4, 2), "retention": 0.5, **TWO}],
    limits=[{"experts": 3}, {"experts": 5, "dram_experts": 4, "speculate": "full"}],
)
def test_limits_and_other_sequences_change_no_bit(open_engine, compensated, settings, limits):
    """The kernel's own way through the layers, the way over requests, and steps of several sequences agree."""
    how = {"parallel": 4, "exact": True, **settings}
    engine = open_engine(compensated, **how)
    want = alone(engine)
    assert torch.equal(together(engine), want)
    limited = open_engine(compensated, **how, **limits)
    assert torch.equal(alone(limited), want)
    assert torch.equal(together(limited), want)
    off = open_engine(compensated, **how | {"compensation": None})
    assert not torch.equal(alone(off), want)


def test_modules_compensate_as_the_kernel_does(open_engine, compensated):
    """Through modules new tokens have equal logits to rounding, which differ from logits without compensators."""
    engine = open_engine(compensated, level=2, **ONE)
    fused = alone(engine)
    through = alone(engine.by_modules())
    engine.configure(engine.settings.with_(compensation=None))
    off = alone(engine)
    assert (through - fused).norm() < 0.03 * fused.norm()
    assert (off - fused).norm() > 0.1 * fused.norm()


def chosen_of(engine: Engine) -> list[tuple[int, list[list[int]]]]:
    """Records the routers' later choices: (layer, experts of each token)."""
    seen: list[tuple[int, list[list[int]]]] = []
    engine.watch(lambda layer, chosen: seen.append((layer, chosen.tolist())))
    return seen


def bits_of(engine: Engine, expert: int) -> float:
    """Bits a weight of an expert's compensator, by its bytes."""
    geometry = CompensatorGeometry.of(engine.store.manifest.geometry, RANKS[expert % 3])
    return 8 * geometry.used / engine.store.manifest.geometry.weights


@pytest.mark.e2e
@pytest.mark.parametrize("experts", [None, 3], ids=["resident", "limited"])
@pytest.mark.parametrize(
    ("compensation", "places"), [(ONE, [0]), (TWO, [0, 1]), ({"compensation": Compensation(1, 1)}, [1])]
)
def test_the_likeliest_are_counted(open_engine, compensated, experts, compensation, places):
    """Pairs and bits count the places in the routers' order, of experts that have a compensator."""
    engine = open_engine(compensated, level=2, experts=experts, **compensation)
    alone(engine)
    engine.take_use()
    seen = chosen_of(engine)
    sequence = engine.sequences.new()
    engine.step(Step((Segment(sequence, (9,)),)))
    engine.step(Step((Segment(sequence, (200,)),)))
    use = engine.take_use()
    assert sorted(layer for layer, _ in seen) == [0, 0, 2, 2]
    used = [row[place] for _, rows in seen for row in rows for place in places]
    extra = [bits_of(engine, expert) for expert in used if expert % 3 != 1]
    assert use.compensation == {"pairs": len(extra), "experts": len(extra)}
    assert use.bits_scheduled == pytest.approx(2.5 + sum(extra) / (2 * 2 * 2))
    assert use.bits_computed == use.bits_scheduled


class SeenParts:
    """A kernel that notes the parts of each call."""

    def __init__(self, wrapped) -> None:
        self.wrapped, self.calls = wrapped, []

    def forward(self, x, parts: list[Part], activation, out) -> None:
        self.calls.append(list(parts))
        self.wrapped.forward(x, parts, activation, out)


def test_sequences_of_a_step_share_an_expert(open_engine, compensated):
    """An expert that is the likeliest of one token and not of another is one part, and counted alike on both ways."""
    resident = open_engine(compensated, parallel=4, level=2, **ONE)
    limited = open_engine(compensated, parallel=4, level=2, experts=2, **ONE)
    runtime = limited.runner._runtime
    kernel = SeenParts(runtime.kernel)
    object.__setattr__(runtime, "kernel", kernel)
    both = []
    for engine in (resident, limited):
        sequences = [engine.sequences.new() for _ in PROMPTS]
        for sequence, prompt in zip(sequences, PROMPTS, strict=True):
            engine.prefill(sequence, prompt)
        engine.take_use()
        kernel.calls.clear()
        for tokens in zip(*DECODED, strict=True):
            engine.step(Step(tuple(Segment(s, (t,)) for s, t in zip(sequences, tokens, strict=True))))
        both.append(engine.take_use())
    parts = [part for call in kernel.calls for part in call]
    assert any(0 < part.compensated < part.rows for part in parts)
    # Two layers and three steps, in each of which an expert is computed once.
    assert len(parts) == both[0].experts[2] <= 2 * 3 * 8
    one, other = (asdict(use) for use in both)
    assert [one.pop(name) for name in ("experts", "scheduled")] == [
        other.pop(name) for name in ("experts", "scheduled")
    ]
    assert one == pytest.approx(other)
    assert 0 < one["compensated_experts"] < one["compensated"] < 2 * 3 * 8


@pytest.mark.parametrize("count", [1, 2])
def test_a_prompt_compensates_its_most_important_experts(compensated, count):
    """A layer compensates as large a share of its experts as `count` is of a token's, by sums of gate weights."""
    settings = RunSettings.uniform(2, compensation=Compensation(count))
    store = StoreModel.open(compensated)
    kernels: list[SeenParts] = []

    def wrap(kernel):
        kernels.append(SeenParts(kernel))
        return kernels[-1]

    prompt = [7, 7, 120, 33, 2, 90, 14, 201, 8]
    with CountedEngine(
        store, store.plan(vram_limit=None, settings=settings, context=64), settings, Wraps(kernel=wrap)
    ) as engine:
        gates: dict[int, torch.Tensor] = {}

        class Probe(ExpertProbe):
            def routed(self, layer, routed, out) -> None:
                sums = torch.zeros(8).index_add_(0, routed.choice.flatten(), routed.gates.flatten().float())
                gates[layer] = sums

        with engine.studied(Study(probe=Probe())):
            engine.prefill(engine.sequences.new(), prompt)
        compensators = engine.compensators
        used: dict[int, set[int]] = {}
        for part in (part for call in kernels[0].calls for part in call if part.compensator):
            key = next(k for k, found in compensators._experts.items() if found is part.compensator)
            used.setdefault(key.layer, set()).add(key.expert)
        for layer, sums in gates.items():
            active = int((sums > 0).sum())
            most = sums.argsort(descending=True)[: -(-active * count // 2)].tolist()
            assert used.get(layer, set()) == {expert for expert in most if expert % 3 != 1}


def test_experts_at_more_bits_go_without(open_engine, compensated):
    """An expert that is computed at resident 4 bits has no compensator of level 2; one at level 2 has."""
    how = {"levels": (4, 2), "retention": 0.5, "exact": False}
    engine = open_engine(compensated, **how, **TWO)
    alone(engine, decoded=False)
    use = engine.take_use()
    assert use.reused > 0
    assert use.scheduled[2] > 0
    assert use.compensated <= use.experts.get(2, 0) < use.scheduled[2]
    exact = open_engine(compensated, **how | {"exact": True}, **TWO)
    alone(exact, decoded=False)
    use = exact.take_use()
    assert 0 < use.compensated < use.scheduled[2]


@pytest.mark.e2e
def test_settings_can_turn_it_on_and_off(open_engine, compensated, tiny_store):
    engine = open_engine(compensated, level=2, **ONE)
    on, settings = alone(engine), engine.settings
    engine.configure(settings.with_(compensation=None))
    off = alone(engine)
    assert torch.equal(off, alone(open_engine(tiny_store, level=2)))
    engine.configure(settings)
    assert torch.equal(alone(engine), on)
    never = open_engine(compensated, level=2)
    with pytest.raises(UserError, match="start again with --compensate 1"):
        never.configure(settings)
    assert torch.equal(alone(never), off)


def test_levels_without_the_compensators_own_are_refused_at_run_time(open_engine, compensated):
    """Otherwise an answer would say that experts are compensated, and none were."""
    engine = open_engine(compensated, level=4, **ONE | {"levels": (4, 2)})
    with pytest.raises(UserError, match="levels with 2"):
        engine.configure(engine.settings.with_(levels=(4,)))
    assert engine.settings.levels == (4, 2)


def test_kept_kv_is_of_the_same_compensation(open_engine, compensated):
    """A prompt's KV depends on it, so a prompt takes none of another setting."""
    engine = open_engine(compensated, level=2, **ONE)
    kept = KeptSequences(engine)
    first = kept.roots.of(20)
    engine.configure(engine.settings.with_(compensation=Compensation(2)))
    assert kept.roots.of(20) != first


def plan(store: Path, limit: int | None = None, **settings):
    opened = StoreModel.open(store)
    return opened.plan(vram_limit=limit, settings=RunSettings(**{"levels": (2,)} | settings), context=64)


def test_the_plan_has_their_bytes(compensated):
    """The line names them, the limits hold them, and the smallest limit that works is larger by them."""
    found, off = plan(compensated, **ONE), plan(compensated)
    index = StoreModel.open(compensated).manifest.compensators
    assert found.compensators_bytes > index.nbytes > 0
    assert found.compensators_resident_bytes == found.compensators_total_bytes == index.nbytes
    # Some of them work too: two of the largest are the fewest.
    more = found.compensators_bytes - index.nbytes + 2 * index.largest
    assert found.minimum_vram_bytes == off.minimum_vram_bytes + more
    assert re.search("compensators +[0-9.]+ KB\n", "\n".join(plan_lines(found, RunSettings())))
    parts = ("dense", "kv", "workspace", "long_step", "compensators", "plane")
    assert sum(getattr(found, f"{part}_bytes") for part in parts) == found.vram_limit_bytes
    with pytest.raises(DoesNotFit, match="compensators") as error:
        plan(compensated, found.minimum_vram_bytes - 1, **ONE)
    assert error.value.minimum == found.minimum_vram_bytes
    plan(compensated, found.minimum_vram_bytes, **ONE)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"levels": (8,)}, "give --levels 4/2"),
        ({"levels": (8, 4)}, "give --levels 4/2"),
        ({"compensation": Compensation(3)}, "at most 2 experts"),
    ],
)
def test_settings_without_effect_are_refused(compensated, settings, words):
    with pytest.raises(UserError, match=words):
        plan(compensated, **ONE | settings)


def test_a_store_without_them_names_the_command(tiny_store):
    with pytest.raises(UserError, match="edgemoe compensate STORE --reference CHECKPOINT"):
        plan(tiny_store, **ONE)
    with pytest.raises(UserError, match="edgemoe compensate"):
        edgemoe.load(tiny_store, compensate=1, levels="4/2")


@pytest.mark.parametrize(
    ("options", "words"), [({}, 'give levels="4/2"'), ({"levels": "2", "compensate": 0}, "1 or more")]
)
def test_options_that_contradict_each_other(compensated, options, words):
    with pytest.raises(UserError, match=words):
        edgemoe.load(compensated, **{"compensate": 1} | options)


def test_a_damaged_compensator_is_named(open_engine, compensated, tmp_path):
    """The engine does not open, and its memory is free again."""
    store = Path(shutil.copytree(compensated, tmp_path / "store"))
    path = next(store.glob("**/random-2.bin"))
    entry = StoreModel.open(store).manifest.compensators.layers[2].entries[5]
    raw = np.fromfile(path, np.uint8)
    raw[entry.offset + 20] ^= 1
    raw.tofile(path)
    with pytest.raises(DamagedData, match="layer 2, expert 5"):
        open_engine(store, level=2, **ONE)
    open_engine(store, level=2)


@pytest.mark.e2e
def test_an_answer_counts_them(compensated):
    """Pairs of prompt and answer, and bits that decode scheduled."""
    with edgemoe.load(compensated, exact=2, compensate=1) as model:
        answer = model.generate("fox", max_new_tokens=6, temperature=0)
        status = model.status()
    assert answer.compensated
    assert 0 < answer.compensated["experts"] <= answer.compensated["pairs"]
    assert answer.bits > 2.5
    assert answer.peak_vram_bytes <= answer.limit_bytes
    assert status.use.compensated >= answer.compensated["pairs"]
    with edgemoe.load(compensated, exact=2) as model:
        answer = model.generate("fox", max_new_tokens=6, temperature=0)
    assert (answer.compensated, answer.bits) == (None, 2.5)


def test_counts_add_up():
    first, second = ExpertUse(), ExpertUse()
    first.add([(2, 2, 3)])
    first.add_compensated(0.5, 3)
    second.add([(2, 2, 1)])
    both = first + second
    assert both.compensation == {"pairs": 3, "experts": 1}
    assert both.bits_scheduled == pytest.approx(2.5 + 1.5 / 4)
    assert both.bits_computed == pytest.approx(2.5 + 0.5 / 2)
