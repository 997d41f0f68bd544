"""edgemoe.machine.cuda and an engine on it, on a real GPU. Skipped where there is none."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from counted_engine import CountedEngine
from device_rig import DeviceRig, turmoil
from family_models import random_model, save
from greedy import GREEDY
from integrity import check_integrity
from scripted import chatml_tokenizer

from edgemoe.cache.device_arena import PinnedArena, on_device
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.engine.request import Request
from edgemoe.engine.sampling import Sampler, Sampling
from edgemoe.engine.scheduler import Scheduler
from edgemoe.engine.thinking import Thinking
from edgemoe.errors import DoesNotFit
from edgemoe.grammar.lark import Reasoning
from edgemoe.kv.formats import KVFormat
from edgemoe.kv.rows import decode, encode, rotate
from edgemoe.kv.step import Segment, Step
from edgemoe.layers.graph.ahead import OneLaunch
from edgemoe.layers.graph.decode import GraphDecode
from edgemoe.memory.split import MINIMUM_EXPERTS
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.base import BLOCK

if TYPE_CHECKING:
    from edgemoe.machine.cuda import CudaDevice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
]

PROMPT = torch.randint(3, 300, (21,), generator=torch.Generator().manual_seed(2)).tolist()
DECODED = [11, 250, 11, 42, 99, 7, 180, 64]
LONG = 200_000_000
"""Cycles that a GPU sleeps for: about a tenth of a second."""

ROUNDING = 0.05
"""Largest relative difference of logits, as vectors, that other kernels' order of bf16 rounding may make."""


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    from edgemoe.machine.cuda import CudaDevice

    return CudaDevice()


@pytest.fixture
def arena(device) -> Iterator[PinnedArena]:
    """Four pinned blocks of 1 MiB, each full of its own number."""
    with closing(PinnedArena(4, 256 * BLOCK, device)) as arena:
        assert arena.pin_to(4)
        for index in range(4):
            np.frombuffer(arena.views[index], np.uint8)[:] = index + 1
        yield arena


def test_a_copy_arrives_by_its_event(device, arena):
    """Once the event is done, every byte of the batch is there."""
    targets = device.allocate(4 << 20).view(4, -1)
    event = device.copy([(arena.views[i], targets[i]) for i in range(4)], None)
    event.wait()
    assert event.done()
    assert targets.cpu().equal(torch.arange(1, 5, dtype=torch.uint8)[:, None].expand(4, 1 << 20))


def test_kernels_wait_for_awaited_copies(device, arena):
    """A kernel after await_copies sees the bytes of a copy that waits itself; the host waits for neither."""
    target, seen = device.allocate(1 << 20), device.allocate(1 << 20)
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        torch.cuda._sleep(LONG)
        late = device.computed()
    event = device.copy([(arena.views[2], target)], late)
    device.await_copies([event])
    seen.copy_(target)
    assert not event.done()
    assert seen.cpu().eq(3).all()


def test_a_copy_waits_for_the_kernels_before_it(device, arena):
    """A copy does not overwrite a block before the kernel that reads it has ended."""
    block, seen = device.allocate(1 << 20).fill_(9), device.allocate(1 << 20)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    seen.copy_(block)
    event = device.copy([(arena.views[0], block)], device.computed())
    assert not event.done()
    event.wait()
    assert seen.cpu().eq(9).all()
    assert block.cpu().eq(1).all()


def test_the_host_gets_the_results_of_kernels(device):
    """to_host returns the results of every kernel launched before it, with one wait."""
    numbers = torch.zeros(8, device=device.place)
    torch.cuda._sleep(LONG)
    numbers += 3
    found = device.to_host([numbers, numbers.to(torch.int64)])
    assert [tensor.tolist() for tensor in found] == [[3.0] * 8, [3] * 8]
    assert all(tensor.is_pinned() for tensor in found)


def test_a_refused_pin_leaves_no_error_behind(device):
    """Memory that is pinned already is refused, and the next kernel runs without an error."""
    with closing(PinnedArena(1, BLOCK, device)) as arena:
        assert arena.pin_to(1)
        assert not device.pin(arena.views[0])
        assert torch.ones(3, device=device.place).sum().item() == 3


def test_the_cap_holds(device):
    """The allocator refuses an allocation above the cap, and none below it."""
    device.cap(1 << 28)
    try:
        assert device.allocate(1 << 26).numel() == 1 << 26
        with pytest.raises(torch.OutOfMemoryError):
            device.allocate(1 << 29)
    finally:
        device.cap(device.available_bytes())


@pytest.mark.parametrize(("vram", "dram"), [(3, None), (2, 8), (4, 2)])
def test_experts_arrive_whole(device, monkeypatch, vram, dram):
    """Under random layers a kernel always reads the bytes of the requested expert."""

    def launch(blocks: dict[str, torch.Tensor]) -> dict[str, bytes]:
        copies = {kind: block.clone() for kind, block in blocks.items()}
        return {kind: block.cpu().numpy().tobytes() for kind, block in copies.items()}

    monkeypatch.setattr(device, "launch", launch, raising=False)
    for seed in range(3):
        rig = DeviceRig(device, vram, dram, arenas=on_device)
        turmoil(rig, seed)
        rig.fetcher.close()
        for tier in (rig.vram, rig.dram):
            if tier:
                check_integrity(tier)
                tier.close()


@pytest.fixture(scope="module")
def store(checkpoint, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("cuda") / "store"
    convert_checkpoint(checkpoint, directory, max_level=8, layout="cuda", dense_bits=16)
    return directory


@pytest.fixture(scope="module")
def experts_only(tmp_path_factory) -> Path:
    """A store of a model whose layers all have experts: a new token goes through captured launches."""
    place = tmp_path_factory.mktemp("captured")
    save(random_model("qwen3_moe", num_experts_per_tok=3), place / "source", fused=True)
    convert_checkpoint(place / "source", place / "store", max_level=8, layout="cuda", dense_bits=16)
    return place / "store"


@pytest.fixture
def open_on(device, store) -> Iterator[Callable[..., Engine]]:
    """Opens engines on the GPU with blocks for so many experts (None: all), and closes them after the test."""
    with ExitStack() as stack:

        def open_one(
            experts: int | None = None,
            dram_experts: int = 0,
            *,
            of: Path = store,
            kv: str = "bf16",
            **settings,
        ) -> Engine:
            chosen = RunSettings(**{"levels": (8,), "exact": True} | settings)
            model = StoreModel.open(of, device).with_kv(KVFormat(kv, kv))
            each, limit = model.form.bytes_at(chosen.levels[0]), None
            if experts is not None:
                least = model.plan(vram_limit=None, settings=chosen, context=64).minimum_vram_bytes
                limit = least + (experts - MINIMUM_EXPERTS) * each
            plan = model.plan(vram_limit=limit, dram_limit=dram_experts * each, settings=chosen, context=64)
            return stack.enter_context(CountedEngine(model, plan, chosen))

        yield open_one
    gc.collect()


def logits(engine: Engine) -> torch.Tensor:
    sequence = engine.sequences.new()
    rows = [engine.prefill(sequence, PROMPT)]
    rows += [engine.step(Step((Segment(sequence, (token,)),)))[0] for token in DECODED]
    return torch.stack(rows)


@pytest.mark.parametrize("level", [8, 4, 2])
def test_a_gpu_answers_as_a_cpu_does(open_on, open_engine, tiny_store, level):
    """Logits equal a CPU's but for rounding; and not a bit of them depends on the limits."""
    want = logits(open_engine(tiny_store, level=level))
    got = logits(open_on(levels=(level,)))
    assert (got - want).norm() < ROUNDING * want.norm()
    for experts, dram in ((2, 0), (3, 16), (7, 3)):
        assert torch.equal(logits(open_on(experts, dram, levels=(level,))), got), (experts, dram)


@pytest.mark.parametrize("level", [8, 4, 2])
def test_captured_launches_answer_as_modules_do(open_on, experts_only, level):
    """New tokens' logits equal transformers' modules' but for rounding, and do not depend on the limits."""
    engine = open_on(of=experts_only, levels=(level,))
    assert isinstance(engine.runner.fused, GraphDecode)
    got = logits(engine)
    for experts, dram in ((2, 0), (3, 16), (7, 3)):
        assert torch.equal(logits(open_on(experts, dram, of=experts_only, levels=(level,))), got)
    want = logits(open_on(of=experts_only, levels=(level,)).by_modules())
    assert (got - want).norm() < ROUNDING * want.norm()


@pytest.mark.parametrize(
    ("family", "bits"), [("qwen3_moe", 4), ("qwen3_moe", 5), ("qwen3_moe", 6), ("glm4_moe", 4)]
)
def test_dense_weights_in_groups_answer_as_on_a_cpu(open_on, open_engine, tmp_path, family, bits):
    """New tokens of captured launches and of captured modules, and prompts, whose rows are decoded to bf16.

    They differ from a CPU's by the rounding of its activations to 8 bits, and do not depend on the limits.
    """
    save(random_model(family), tmp_path / "source", fused=True)
    store = tmp_path / "store"
    convert_checkpoint(tmp_path / "source", store, max_level=8, layout="cuda", dense_bits=bits)
    engine = open_on(of=store, levels=(8,))
    assert isinstance(engine.runner.fused, GraphDecode)
    got = logits(engine)
    assert torch.equal(logits(open_on(3, 16, of=store, levels=(8,))), got)
    modules = logits(open_on(of=store, levels=(8,)).by_modules())
    assert (got - modules).norm() < ROUNDING * modules.norm()
    want = logits(open_engine(store, level=8))
    assert (got - want).norm() < 2 * ROUNDING * want.norm()


@pytest.mark.parametrize("kv", ["q8_0", "q4_0"])
def test_captured_launches_code_keys_and_values_as_modules_do(open_on, experts_only, kv):
    """New tokens read the codes of a prompt's modules, and answer as modules do but for rounding."""
    engine = open_on(of=experts_only, kv=kv)
    assert isinstance(engine.runner.fused, GraphDecode)
    want = logits(open_on(of=experts_only, kv=kv).by_modules())
    assert (logits(engine) - want).norm() < ROUNDING * want.norm()


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_torchs_operators_code_rows_as_on_a_cpu(kind):
    """Bytes of codes are equal, and so are the numbers that they decode to."""
    x = torch.randn(200, 576, generator=torch.Generator().manual_seed(3)).bfloat16()
    x[0], x[1, 5] = 0, torch.inf
    rows = encode(kind, rotate(x, 64))
    on_gpu = encode(kind, rotate(x.cuda(), 64))
    assert torch.equal(on_gpu.cpu(), rows)
    assert torch.equal(decode(kind, on_gpu, 576).cpu().nan_to_num(), decode(kind, rows, 576).nan_to_num())


@pytest.mark.parametrize("limits", [(), (3, 64)])
def test_tokens_that_run_ahead_answer_as_others_do(open_on, experts_only, monkeypatch, limits):
    """The likeliest tokens, launched ahead of their steps, have the bits of tokens launched in their steps.

    With all experts in the device's memory, and with some in DRAM, which move while tokens run ahead.
    """

    def greedy(engine: Engine) -> list[torch.Tensor]:
        sequence, token = engine.sequences.new(), DECODED[0]
        engine.prefill(sequence, PROMPT[:8])
        engine.fill()
        rows = list[torch.Tensor]()
        for _ in range(24):
            rows.append(engine.step(Step((Segment(sequence, (token,)),)))[0])
            token = int(rows[-1].argmax())
        return rows

    engine = open_on(*limits, of=experts_only, levels=(4,))
    memory, tokens = engine.runner.fused._memory, []
    begin = memory.begin_token
    monkeypatch.setattr(memory, "begin_token", lambda *parts: (tokens.append(1), begin(*parts)))
    got = greedy(engine)
    assert len(tokens) < 10
    monkeypatch.setattr(OneLaunch, "_pays", lambda *parts: False)
    want = greedy(open_on(*limits, of=experts_only, levels=(4,)))
    assert all(map(torch.equal, got, want))


def test_drawn_tokens_run_ahead(open_on, experts_only, monkeypatch):
    """A seed gives one answer, and the GPU draws it by the host's random numbers: the host launches few tokens."""
    engine = open_on(of=experts_only, levels=(4,))
    engine.fill()
    memory, launched = engine.runner.fused._memory, []
    begin = memory.begin_token
    monkeypatch.setattr(memory, "begin_token", lambda *parts: (launched.append(1), begin(*parts)))

    def answer() -> list[int]:
        sampler = Sampler(Sampling(2.0, 0.9, 40, 1, 7, 24, frozenset()))
        request = Request(PROMPT[:8], sampler)
        Scheduler(engine).run(request)
        return request.tokens[8:]

    got = answer()
    assert len(launched) < 10
    monkeypatch.setattr(OneLaunch, "_pays", lambda *parts: False)
    assert answer() == got


def test_a_budget_of_reasoning_holds_where_tokens_run_ahead(open_on, experts_only, monkeypatch):
    """Closing tokens replace tokens that were launched ahead, and the answer is as without such launches."""
    tokenizer = chatml_tokenizer()
    tags = Reasoning("<think>", "</think>", begun=True, closing="\n</think>\n\n")

    def answer() -> list[int]:
        thinking = Thinking(tokenizer, tags, PROMPT[:8], 5)
        sampler = Sampler(replace(GREEDY, max_new_tokens=24, stop=frozenset()))
        request = Request(PROMPT[:8], sampler, thinking=thinking)
        Scheduler(open_on(of=experts_only, levels=(4,))).run(request)
        assert thinking.tokens == 5
        return request.tokens[8:]

    got, end = answer(), tokenizer(tags.closing, add_special_tokens=False)["input_ids"]
    assert got[5 : 5 + len(end)] == end
    monkeypatch.setattr(OneLaunch, "_pays", lambda *parts: False)
    assert answer() == got


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "glm4_moe", "gpt_oss", "deepseek_v2", "gemma4_text"])
def test_captured_modules_answer_as_modules_do(open_on, family, tmp_path):
    """Families without kernels of their own are captured, within the limit, and their answers do not depend on it."""
    save(random_model(family), tmp_path / "source", fused=True)
    how = {"of": tmp_path / "store", "levels": (4,)}
    convert_checkpoint(tmp_path / "source", how["of"], max_level=8, layout="cuda", dense_bits=8)
    engine = open_on(**how)
    assert isinstance(engine.runner.fused, GraphDecode)
    got = logits(engine)
    assert engine.peak.bytes <= engine.plan.vram_limit_bytes
    assert all(torch.equal(logits(open_on(*limits, **how)), got) for limits in ((3, 0), (4, 64)))
    want = logits(open_on(**how).by_modules())
    assert (got - want).norm() < ROUNDING * want.norm()


def test_the_drivers_count_stays_within_the_limit(open_on):
    """After prompts and many steps, all of the process's memory on the GPU is within --vram-limit."""
    engine = open_on(4, 8)
    sequence = engine.sequences.new()
    for _ in range(5):
        sequence.crop(0)
        engine.prefill(sequence, PROMPT)
        for token in DECODED:
            engine.step(Step((Segment(sequence, (token,)),)))
    assert 0 < engine.peak.bytes <= engine.plan.vram_limit_bytes


def test_a_limit_below_the_smallest_is_refused(open_on, device, store):
    """The smallest limit that works includes the CUDA context."""
    model, settings = StoreModel.open(store, device), RunSettings.uniform(4)
    least = model.plan(vram_limit=None, settings=settings, context=64).minimum_vram_bytes
    assert least > device.driver_bytes()
    with pytest.raises(DoesNotFit, match="driver"):
        model.plan(vram_limit=least - 1, settings=settings, context=64)
