"""Precision by hotness on a device that works late and out of order: the answers and the hot sets of RAM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from device_double import DoubleDevice
from engine_rig import DECODED, PROMPT, engines_on, in_planes
from integrity import check_integrity

from edgemoe.engine.engine import Engine
from edgemoe.errors import DoesNotFit, UserError
from edgemoe.kv.step import Segment, Step
from edgemoe.models.options.run_settings import run_settings
from edgemoe.models.plans.division import HOT_SEQUENCES, Division, plan_levels
from edgemoe.policy.hotness import Hotness
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.base import ExpertKey

SETTLED = Hotness(interval=2, warmup=2, half_life=8, margin=0, experts=2, settled=True)
SOON = Hotness(interval=1, warmup=1, half_life=8, margin=0)
HOT = {"levels": (4, 2), "exact": False}
ROUTED = (0, 2)
"""The layers with experts; layer 1 is dense."""

EVERY = {ExpertKey(layer, expert) for layer in ROUTED for expert in range(8)}


@pytest.fixture
def open_on(tiny_store, monkeypatch) -> Iterator[Callable[..., Engine]]:
    """Opens engines on a double, or in RAM (engine_rig.engines_on)."""
    for open_one in engines_on(tiny_store, monkeypatch):
        yield partial(open_one, **HOT)


def answer(engine: Engine) -> torch.Tensor:
    """Logits after a prompt and after each token, [9, vocab]; the sequence ends."""
    sequence = engine.sequences.new()
    rows = [engine.prefill(sequence, PROMPT)]
    rows += [engine.step(Step((Segment(sequence, (token,)),)))[0] for token in DECODED]
    engine.sequences.end(sequence)
    return torch.stack(rows)


def hot(engine: Engine) -> set[ExpertKey]:
    return {key for key, level in engine.vram.resident().items() if level == 4}


@pytest.mark.e2e
@pytest.mark.parametrize("dram", [0, 16])
def test_a_device_answers_as_ram_does(open_on, dram):
    """Settled hot sets, levels and logits are equal bit for bit, from staging buffers and from a tier in DRAM."""
    in_ram = open_on(None, 14, hotness=SETTLED)
    device = DoubleDevice(dram, haste=0.2)
    on_device = open_on(device, 6, dram, hotness=SETTLED)
    for engine in (in_ram, on_device):
        assert engine.plan.vram_blocks == {"base": 16, "d4": 4}
        engine.fill()
    for _ in range(2):
        assert torch.equal(answer(on_device), answer(in_ram))
        assert on_device.take_use() == in_ram.take_use()
        assert hot(on_device) == hot(in_ram) != set()


def test_no_token_waits_once_all_experts_are_there(open_on):
    """Every request is a hit without a copy under way, whatever moves; memory stays within the plan."""
    device = DoubleDevice(3, haste=0.1)
    engine = open_on(device, 2, 16, hotness=SOON)
    assert engine.plan.vram_blocks == {"base": 16, "d4": 2}
    engine.fill()
    allocated = device.allocated
    sequence, waited, hits = engine.sequences.new(), [], 0
    engine.prefill(sequence, PROMPT)
    await_copies = device.await_copies
    device.await_copies = lambda events: (waited.extend(events := list(events)), await_copies(events))
    engine.take_counts()
    for token in DECODED * 4:
        engine.step(Step((Segment(sequence, (token,)),)))
        check_integrity(engine.vram)
        counts = engine.take_counts()
        assert counts.requests == counts.vram_hits > 0
        hits += counts.promoted
    assert hits > 2
    assert waited == []
    assert engine.vram.resident().keys() == EVERY
    assert len(hot(engine)) <= engine.plan.hot_experts
    assert device.allocated == allocated


def test_a_prompt_begins_while_experts_move(open_on):
    """The prompt computes from what is published; the moves are published once their copies are made."""
    device = DoubleDevice(4, haste=0)
    engine = open_on(device, 4, 16, hotness=SOON)
    engine.fill()
    cold = dict.fromkeys(EVERY, 2)
    for key in hot(engine):
        engine.vram.drop(key, 2)
    sequence = engine.sequences.new()
    engine.prefill(sequence, PROMPT[:4])
    while not engine.source._transitions._flying:
        engine.step(Step((Segment(sequence, (7,)),)))
    before = engine.vram.resident()
    assert before == cold
    engine.sequences.end(sequence)
    sequence = engine.sequences.new()
    engine.take_use()
    got = engine.prefill(sequence, PROMPT)
    assert engine.take_use().experts.keys() <= {2, 4}
    assert torch.isfinite(got).all()
    engine.source.release_pins()
    assert hot(engine)
    check_integrity(engine.vram)


def test_experts_that_are_absent_come_in_the_background(open_on):
    """Without a fill every expert is there after some tokens, at the lower level at least."""
    engine = open_on(DoubleDevice(5, haste=0.5), 2, hotness=SOON)
    sequence = engine.sequences.new()
    engine.prefill(sequence, [5])
    for _ in range(20):
        engine.step(Step((Segment(sequence, (7,)),)))
    engine.source.release_pins()
    assert engine.vram.resident().keys() == EVERY


def test_the_smallest_limit_holds_every_expert(tiny_store):
    """A limit below it is refused before anything is loaded, and says what it holds; without hot experts it is less."""
    store = in_planes(tiny_store, DoubleDevice())
    sizes = {"context": 64, "settings": RunSettings(levels=(4, 2), hotness=Hotness())}
    low, high = (store.form.bytes_at(level) for level in (2, 4))
    with pytest.raises(DoesNotFit, match="all 16 experts at level 2 and one per layer at level 4") as refused:
        store.plan(vram_limit=1 << 20, **sizes)
    least = store.plan(vram_limit=refused.value.minimum, **sizes)
    assert least.vram_blocks == {"base": 16, "d4": 2}
    assert least.plane_bytes == 16 * low + 2 * (high - low)
    none = {**sizes, "settings": RunSettings(levels=(4, 2), hotness=Hotness(experts=0))}
    assert least.minimum_vram_bytes - store.plan(vram_limit=None, **none).minimum_vram_bytes == 2 * (
        high - low
    )
    # Without a device experts may be absent.
    in_ram = in_planes(tiny_store, None).plan(vram_limit=None, **sizes)
    assert in_ram.minimum_vram_bytes < least.minimum_vram_bytes - low


def test_memory_of_other_levels_is_refused(open_on):
    """A device whose memory was divided for other levels does not take hotness up later."""
    engine = open_on(DoubleDevice(), 5)
    with pytest.raises(UserError, match="room for all 16 experts at 2 bits, for --policy hotness"):
        engine.configure(engine.settings.with_(hotness=Hotness()))
    assert engine.settings.hotness is None


@pytest.mark.parametrize(("more", "sequences", "hot"), [(8, 8, True), (8, 7, False), (0, 8, False)])
def test_an_automatic_policy_is_hotness_where_it_is_in_ram(tiny_store, more, sequences, hot):
    """For so many sequences, where a tenth of the experts may be hot next to all others."""
    store, choose = in_planes(tiny_store, DoubleDevice()), partial(run_settings, policy="auto", levels="4/2")
    low = store.plan(vram_limit=None, settings=RunSettings(levels=(2,)), context=64, parallel=sequences)
    vram = low.vram_limit_bytes + more * 4096
    assert sequences != 8 or HOT_SEQUENCES == 8
    plan, settings = plan_levels(store, choose, Division(vram, context=64, parallel=sequences))
    assert (settings.hotness is not None) == hot == (plan.hot_experts is not None)
