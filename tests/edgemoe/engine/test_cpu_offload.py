"""Experts computed on the CPU beside a device: the measured paces, the logits, and when there are none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from device_double import DoubleDevice
from device_rig import crowd
from engine_rig import DECODED, PROMPT, engines_on, in_planes, limited, logits
from host_reads import watched
from integrity import check_integrity
from toys import SLICED

from cache.lru import LRU
from cache.plane_tier import PlaneTier
from edgemoe.engine import cpu_offload as module
from edgemoe.engine.cpu_offload import Bench, CpuOffload, Pace, measure_pace
from edgemoe.engine.engine import Engine
from edgemoe.kernels.native.cuda_layout import SlabExpertKernel
from edgemoe.kernels.native.experts import NativeExpertKernel
from edgemoe.kernels.native.library import LAYOUT, available
from edgemoe.kernels.registry import beside_device
from edgemoe.kernels.torch_planes import PlaneExpertKernel
from edgemoe.kv.step import Segment, Step
from storage.device import Event
from storage.errors import UserError
from storage.layout import LAYOUTS

ROUNDING = 0.1
"""Largest relative difference of logits, as vectors, that a kernel with activations in few bits may make."""

EAGER = Pace(computed=1e-9, moved=1.0, moved_alone=1.0)
MOE_LAYERS = 2


class Machine:
    """A device and a CPU that compute nothing: a clock advances with each call and wait.

    Args:
        computed: seconds of the kernel's call; `busy` times as many while the device copies.
        moved: seconds of a copy; each call of the kernel delays those under way by one more.
    """

    def __init__(self, computed: float, moved: float, busy: float = 1.0) -> None:
        self.now = self.free = 0.0
        self.computed, self.moved, self.busy = computed, moved, busy
        self.copies = self.calls = 0

    def __call__(self) -> float:
        return self.now

    def copy(self, pairs: object, after: object) -> Event:
        self.copies += 1
        self.free = max(self.now, self.free) + self.moved
        return _Copied(self)

    def forward(self, x: torch.Tensor, parts: object, activation: object, out: torch.Tensor) -> None:
        self.calls += 1
        busy = self.free > self.now
        self.now += self.computed * (self.busy if busy else 1)
        self.free += busy


class _Copied(Event):
    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def done(self) -> bool:
        return self._machine.now >= self._machine.free

    def wait(self) -> None:
        self._machine.now = max(self._machine.now, self._machine.free)


def bench(machine: Machine, dram_experts: int = 3) -> Bench:
    vram, dram = (
        PlaneTier(SLICED, {kind.name: count for kind in SLICED.kinds}, LRU, device=name, name=name)
        for name, count in (("double", 1), ("cpu", dram_experts))
    )
    return Bench(machine, vram, dram, SLICED, machine, machine)


def test_both_speeds_are_measured_while_both_work():
    """16 copies of 1 s outlast 8 calls of 2 s, if nothing slows them down; the paces are the seconds of each then.

    At work together a call takes 4 s, and each delays the copies by 1: after 4, 8, 12, 16, 20 and 24 s of calls the
    copies are due at 17, 18, 19, 20, 21 and 22. So 6 calls in 24 s, beside 16 copies in 24.
    """
    machine = Machine(computed=2, moved=1, busy=2)
    given = bench(machine)
    assert measure_pace(given, 4, 64, top_k=8) == Pace(4.0, 1.5, 1.0)
    for tier in (given.vram, given.dram):
        check_integrity(tier)
        assert tier.resident() == {}
        tier.close()


def test_a_cpu_that_cannot_pay_is_measured_alone():
    """Where one expert takes as long as moving all of a layer's experts, the paces are those of each alone."""
    machine = Machine(computed=8, moved=1, busy=2)
    assert measure_pace(bench(machine), 4, 64, top_k=8) == Pace(8.0, 1.0, 1.0)
    assert (machine.copies, machine.calls) == (17, 2)


def test_copies_that_never_end_do_not_hang():
    """Copies that make no progress beside the CPU are waited for after a bounded number of calls."""
    machine = Machine(computed=1, moved=0.5)
    pace = measure_pace(bench(machine), 4, 64, top_k=8)
    assert machine.calls == 2 + 32
    assert pace.moved > pace.moved_alone == 0.5


def test_no_free_blocks_is_no_measurement():
    """The pace is None where a tier lacks blocks of a kind that the level needs."""
    given = bench(Machine(1, 1))
    object.__setattr__(given, "dram", PlaneTier(SLICED, {"base": 2}, LRU, device="cpu", name="dram"))
    assert measure_pace(given, 4, 64, top_k=8) is None
    assert measure_pace(given, 2, 64, top_k=8) is not None


@pytest.mark.parametrize(("computed", "pays"), [(7.9, True), (8.0, False)])
def test_it_pays_for_a_whole_layer_or_never(computed, pays):
    """Offload pays only if at least one of a full layer of misses is better computed on the CPU."""
    experts = CpuOffload(PlaneExpertKernel, {4: Pace(computed, 1, 1), 2: Pace(9, 1, 1)})
    assert experts.pays_for(8) == pays


def test_the_kernel_reads_the_layout_in_dram():
    """A compiled kernel where one reads the device's layout, torch's operators elsewhere."""
    cuda, own = LAYOUTS["cuda"], available()
    assert beside_device(cuda) is (SlabExpertKernel if own else PlaneExpertKernel)
    assert beside_device(LAYOUT) is (NativeExpertKernel if own else PlaneExpertKernel)
    assert beside_device(LAYOUTS["cpu-avx512"]) is PlaneExpertKernel


def test_biases_stay_on_the_device():
    """Experts with biases are not computed on the CPU."""

    def model(**attributes) -> torch.nn.Module:
        experts = torch.nn.Module()
        vars(experts).update(attributes)
        return torch.nn.Sequential(experts)

    gate = SimpleNamespace()
    assert module._have_biases(model(_apply_gate=gate, has_bias=True))
    assert not module._have_biases(model(_apply_gate=gate, has_bias=False))
    assert not module._have_biases(model(has_bias=True))


@pytest.fixture
def open_on(tiny_store, monkeypatch) -> Iterator[Callable[..., Engine]]:
    """Opens engines on a double (engine_rig.engines_on)."""
    yield from engines_on(tiny_store, monkeypatch)


@pytest.fixture
def paced(monkeypatch) -> Callable[[Pace], None]:
    """Replaces the measured pace, and gives both sides one kernel: its bits do not depend on the side."""

    def say(pace: Pace) -> None:
        monkeypatch.setattr(module, "measure_pace", lambda *_: pace)
        monkeypatch.setattr(module, "beside_device", lambda layout: PlaneExpertKernel)

    return say


@pytest.mark.parametrize("level", [8, 4, 2])
def test_offloaded_experts_change_no_bit(open_on, paced, level):
    """With every DRAM hit computed on the CPU, logits equal those of all experts in RAM, bit for bit."""
    paced(EAGER)
    how = {"levels": (level,), "exact": False}
    want = logits(open_on(None, **how))
    for seed, (experts, dram, threaded, ahead) in enumerate([(2, 16, True, "off"), (3, 16, False, "full")]):
        device = DoubleDevice(seed, haste=0.2, threaded=threaded)
        engine = open_on(device, experts, dram, cpu_experts="auto", speculate=ahead, **how)
        assert torch.equal(logits(engine), want)
        counts, use = engine.take_counts(), engine.take_use()
        assert 0 < counts.left_below <= counts.dram_hits
        assert sum(use.experts.values()) == counts.requests


def test_skipped_experts_are_not_offloaded(open_on, paced):
    """A skipped expert is computed on neither side, and is no request."""
    paced(EAGER)
    want = logits(open_on(None, levels=(4, 0), exact=True))
    engine = open_on(DoubleDevice(1), 2, 16, levels=(4, 0), exact=False, cpu_experts="auto")
    assert torch.equal(logits(engine), want)
    counts, use = engine.take_counts(), engine.take_use()
    assert counts.left_below > 0
    assert use.experts[0] > 0
    assert use.experts[4] == counts.requests


def test_more_planes_in_dram_are_not_used(open_on, paced):
    """An expert in DRAM is computed at its scheduled level, the level that the split compared."""
    paced(EAGER)

    def at_four_after_a_prompt_at_eight(engine: Engine, *, exact: bool) -> torch.Tensor:
        sequence = engine.new_sequence()
        engine.prefill(sequence, PROMPT)
        engine._source.release_pins()
        for key in engine.vram.resident() if engine.dram else ():
            engine.vram.drop(key)
        engine.take_use()
        engine.configure(engine.settings.with_(levels=(4,), exact=exact))
        return engine.step(Step((Segment(sequence, (DECODED[0],)),)))

    engine = open_on(DoubleDevice(1), 2, 16, exact=False, cpu_experts="auto")
    got = at_four_after_a_prompt_at_eight(engine, exact=False)
    assert set(engine.dram.resident().values()) == {8}
    assert (engine.take_use().experts, engine.take_counts().left_below) == ({4: 4}, 4)
    assert torch.equal(got, at_four_after_a_prompt_at_eight(open_on(None), exact=True))


def test_never_where_levels_are_exact(open_on, paced):
    """An exact engine computes no expert on the CPU, at any pace."""
    paced(EAGER)
    want = logits(open_on(None))
    engine = open_on(DoubleDevice(2), 2, 16, cpu_experts="auto")
    assert torch.equal(logits(engine), want)
    assert engine.take_counts().left_below == 0


@pytest.mark.parametrize("computed", [2.0, 100.0])
def test_off_where_the_link_is_fast(open_on, paced, computed):
    """A layer of this model misses two: a CPU that takes as long for one as both copies take gets none."""
    paced(Pace(computed, 1.0, 1.0))
    engine = open_on(DoubleDevice(3), 2, 16, exact=False, cpu_experts="auto")
    assert torch.equal(logits(engine), logits(open_on(None, exact=False)))
    assert engine._runner._offload is None
    assert engine.take_counts().left_below == 0


@pytest.mark.parametrize("level", [8, 4, 2])
def test_another_kernel_makes_a_small_difference(open_on, monkeypatch, level):
    """With the kernel that is fastest on this processor, logits differ by its rounding alone."""
    monkeypatch.setattr(module, "measure_pace", lambda *_: EAGER)
    how = {"levels": (level,), "exact": False}
    engine, want = open_on(DoubleDevice(9), 2, 16, cpu_experts="auto", **how), logits(open_on(None, **how))
    assert (logits(engine) - want).norm() < ROUNDING * want.norm()
    assert engine.take_counts().left_below > 0


def test_every_level_is_measured(open_on, monkeypatch):
    """The double and the CPU are timed at every level up to the highest, and the tiers are empty afterwards."""
    measured, measure = [], module.measure_pace

    def noted(bench: Bench, level: int, hidden: int, top_k: int) -> Pace | None:
        measured.append((level, hidden, top_k, measure(bench, level, hidden, top_k)))
        return measured[-1][3]

    monkeypatch.setattr(module, "measure_pace", noted)
    engine = open_on(DoubleDevice(4, haste=0.9), 3, 16, levels=(4,), exact=False, cpu_experts="auto")
    assert [found[:3] for found in measured] == [(4, 64, 2), (2, 64, 2)]
    assert all(min(vars(pace).values()) > 0 for *_, pace in measured)
    for tier in (engine.vram, engine.dram):
        check_integrity(tier)
        assert tier.resident() == {}


def test_a_prompts_experts_are_moved(open_on, paced):
    """No expert of a prompt is left in DRAM: many tokens share its copy."""
    paced(EAGER)
    engine = open_on(DoubleDevice(5), 2, 16, exact=False, cpu_experts="auto")
    sequence = engine.new_sequence()
    engine.prefill(sequence, PROMPT)
    engine.prefill(sequence, PROMPT)
    assert engine.take_counts().left_below == 0
    engine.step(Step((Segment(sequence, (7,)),)))
    assert engine.take_counts().left_below > 0


def test_victims_wait_for_the_cpu(open_on, paced):
    """Reservations of all of DRAM while an expert is computed from it change no bit."""
    paced(EAGER)
    want = logits(open_on(None, exact=False))
    engine = open_on(DoubleDevice(6), 2, 6, exact=False, cpu_experts="auto")
    kernel, crowded = engine._runner._offload.kernel, []

    def forward(*arguments):
        crowded.append(crowd(engine.dram, 8))
        return kernel.forward(*arguments)

    object.__setattr__(engine._runner._offload, "kernel", SimpleNamespace(forward=forward))
    assert torch.equal(logits(engine), want)
    assert max(crowded, default=0) > 0


@pytest.mark.parametrize(
    "how", [{}, {"speculate": "full"}, {"levels": (4, 2), "importance": "heavy-hitters"}]
)
def test_the_host_waits_once_a_layer(open_on, paced, monkeypatch, how):
    """One wait a layer, for the router's choice and all else that the host needs, and one for the logits."""
    paced(EAGER)
    device = DoubleDevice(7)
    engine = open_on(device, 3, 16, exact=False, cpu_experts="auto", **how)
    sequence = engine.new_sequence()
    there = [*engine._model.parameters(), *engine._model.buffers(), sequence.keys, sequence.values]
    with watched(device, monkeypatch, there):
        engine.prefill(sequence, PROMPT)
        assert device.waits == MOE_LAYERS + 1
        for token in DECODED:
            engine.step(Step((Segment(sequence, (token,)),)))
    assert device.broken == []
    assert device.waits == (MOE_LAYERS + 1) * (1 + len(DECODED))
    assert engine.take_counts().left_below > 0


def test_a_read_past_to_host_is_noticed(open_on, monkeypatch):
    """The watch of the test above notes a number that is read past to_host."""
    device = DoubleDevice(8)
    engine = open_on(device, 3, ends=False)
    weight = engine._model.lm_head.weight
    with watched(device, monkeypatch, [weight]):
        (weight[0] * 2).sum().tolist()
        weight[torch.tensor([1])]
    assert device.broken == [
        "tolist of a device's tensor",
        "rows chosen by indices in other memory, or by a mask",
    ]


def test_offload_is_fixed_at_the_start(open_on, paced):
    """A setting cannot change the measured and planned offload of an open engine."""
    paced(EAGER)
    engine = open_on(DoubleDevice(10), 2, 16, exact=False, cpu_experts="auto")
    with pytest.raises(UserError, match="start again"):
        engine.configure(engine.settings.with_(cpu_experts="off"))


def test_the_kernels_scratch_is_planned_for(tiny_store):
    """It lies in RAM beside both limits, where there is a DRAM tier and offload is on."""
    store = in_planes(tiny_store, DoubleDevice())
    settings = module.RunSettings(levels=(4,), cpu_experts="auto")
    beside, without = (
        limited(store, some, 3, 4).staging_bytes for some in (settings, settings.with_(cpu_experts="off"))
    )
    kernel = beside_device(store.compute.layout)
    assert beside - without == kernel.scratch_bytes(store.manifest.geometry)
    assert limited(store, settings, 3, 0).staging_bytes == without
