"""The engine against transformers' own model, and against itself in other steps."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path

import pytest
import torch
from small_tokenizer import a_tokenizer
from transformers import Qwen3MoeForCausalLM

from edgemoe.engine.engine import Engine
from edgemoe.errors import UserError
from edgemoe.kernels.registry import compute
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.step import Segment, Step
from edgemoe.machine import process
from edgemoe.machine.process import disk_read_bytes
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.models.store_model import StoreModel
from edgemoe.policy.settings import RunSettings

SHARPER = 8
"""At initialisation all 300 tokens are about equally likely, and any two distributions a KL of 0.02 apart."""

ROUNDING = 0.02
"""Largest relative difference of logits, as vectors, that another order of bf16 rounding may make."""

CLOSE = 0.06
"""Least distance of the last chosen expert's logit from the next, as a fraction of the logits' deviation."""

LENGTH = 10
LEVEL_8_KL = 0.001
DENSE_8_KL = 0.01


@pytest.fixture(scope="module")
def model(tiny_model) -> Qwen3MoeForCausalLM:
    """The tiny model with a head whose logits spread like a trained one's."""
    model = copy.deepcopy(tiny_model)
    with torch.no_grad():
        model.lm_head.weight.mul_(SHARPER)
    return model


@pytest.fixture(scope="module")
def source(model, checkpoint, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("sharp") / "model"
    model.save_pretrained(directory)
    a_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def store(source) -> Path:
    return converted(source, source.parent / "store", dense_bits=16)


def converted(source: Path, destination: Path, *, dense_bits: int) -> Path:
    convert_checkpoint(source, destination, max_level=8, layout="auto", dense_bits=dense_bits)
    return destination


def a_sequence(engine: Engine) -> SequenceKV:
    """A sequence in addition to the one that the engine's limit includes."""
    return SequenceKV(engine.shape.kv, engine.plan.context)


@pytest.fixture(scope="module")
def prompts(model) -> list[list[int]]:
    """Three prompts of random tokens.

    A router of random weights often has two experts so close that rounding chooses between them. Such a token proves
    nothing about either side, so prompts with one are left out.
    """
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(3, 300, (100, LENGTH), generator=generator)
    with torch.no_grad():
        routers = model(drawn, output_router_logits=True).router_logits
    decided = torch.ones(len(drawn), dtype=torch.bool)
    for logits in routers:
        best = logits.float().view(len(drawn), LENGTH, -1).topk(3).values
        decided &= (best[..., 1] - best[..., 2] > CLOSE * logits.float().std()).all(1)
    assert int(decided.sum()) >= 3
    return drawn[decided][:3].tolist()


def reference(model: Qwen3MoeForCausalLM, tokens: list[int]) -> torch.Tensor:
    """Logits [tokens, vocab] of transformers' bf16 model, all tokens in one step."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float()


def kl(want: torch.Tensor, logits: torch.Tensor) -> float:
    """Divergence of softmax(got) from softmax(want), nats."""
    p, q = want.double().log_softmax(-1), logits.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum())


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def prefilled(engine: Engine, tokens: list[int]) -> list[torch.Tensor]:
    """Last logits of every prefix, each a prefill of its own."""
    sequence, out = a_sequence(engine), []
    for end in range(1, len(tokens) + 1):
        sequence.crop(0)
        out.append(engine.prefill(sequence, tokens[:end]))
    return out


def decoded(engine: Engine, tokens: list[int]) -> list[torch.Tensor]:
    """Logits after every token, each a step of one row over what is cached."""
    sequence = a_sequence(engine)
    return [engine.step(Step((Segment(sequence, (token,)),)))[0] for token in tokens]


@pytest.mark.e2e
@pytest.mark.parametrize("run", [prefilled, decoded])
@pytest.mark.parametrize(("dense_bits", "bound"), [(16, LEVEL_8_KL), (8, DENSE_8_KL)])
def test_level_8_is_the_checkpoint(open_engine, prompts, model, source, tmp_path, run, dense_bits, bound):
    """After every prefix, prefilled or decoded, the next token is distributed as transformers has it."""
    engine = open_engine(converted(source, tmp_path / "store", dense_bits=dense_bits), experts=3)
    worst = 0.0
    for tokens in prompts:
        want = reference(model, tokens)
        got = run(engine, tokens)
        assert len(got) == len(tokens)
        worst = max(worst, *(kl(*pair) for pair in zip(want, got, strict=True)))
    assert worst < bound


@pytest.mark.e2e
def test_the_bounds_would_see_a_wrong_expert(open_engine, prompts, model, store, monkeypatch):
    """Without the experts' outputs the distance is above both bounds: the bounds are not met by chance."""
    monkeypatch.setattr(compute().kernel, "forward", lambda kernel, x, parts, activation, out: out.zero_())
    engine = open_engine(store)
    for tokens in prompts:
        assert max(map(kl, reference(model, tokens), prefilled(engine, tokens))) > 2 * DENSE_8_KL


def test_a_prompt_may_come_in_two_steps(open_engine, prompts, store):
    """A cached prefix and its continuation give the whole prompt's logits, to rounding."""
    engine = open_engine(store)
    for tokens in prompts:
        whole = engine.prefill(a_sequence(engine), tokens)
        for cut in (1, 5, len(tokens) - 1):
            sequence = a_sequence(engine)
            engine.prefill(sequence, tokens[:cut])
            assert sequence.length == cut
            assert apart(engine.prefill(sequence, tokens[cut:]), whole) < ROUNDING


def test_an_empty_prompt_is_refused(open_engine, store):
    """An empty prompt, which a tokenizer without a template makes no tokens of, is a user's error."""
    engine = open_engine(store)
    with pytest.raises(UserError, match="at least one token"):
        engine.prefill(a_sequence(engine), [])


def test_sequences_of_one_step_do_not_see_each_other(open_engine, prompts, store):
    """Two sequences of unequal lengths and rows have the same logits in one step as alone, to rounding."""
    engine = open_engine(store)
    first, second, _ = prompts
    pasts, rows = (first[:6], second[:2]), (first[6:9], second[2:])
    alone, together = [], []
    for past, more in zip(pasts, rows, strict=True):
        for out in (alone, together):
            out.append((a_sequence(engine), tuple(more)))
            engine.prefill(out[-1][0], past)
    want = torch.cat([engine.step(Step((Segment(*one),))) for one in alone])
    got = engine.step(Step(tuple(Segment(*one) for one in together)))
    assert got.shape == (2, 300)
    assert [sequence.length for sequence, _ in together] == [9, len(second)]
    assert apart(want[0], want[1]) > 10 * ROUNDING
    assert max(apart(*pair) for pair in zip(got, want, strict=True)) < ROUNDING


def test_a_long_prompt_takes_several_steps(open_engine, prompts, model, store, monkeypatch):
    """A prompt of more than the plan's prefill_rows takes several steps and keeps the checkpoint's logits."""
    engine, rows, step = open_engine(store, prefill_rows=4), [], Engine.step
    monkeypatch.setattr(Engine, "step", lambda self, one: (rows.append(one.rows), step(self, one))[1])
    tokens = prompts[0]
    got = engine.prefill(a_sequence(engine), tokens)
    assert rows == [4, 4, 2]
    assert kl(reference(model, tokens)[-1], got) < LEVEL_8_KL


@pytest.mark.usefixtures("accounted")
def test_counted_bytes_are_the_bytes_that_the_system_read(open_engine, prompts, store):
    """Under a small limit the operating system reads as many bytes as the counters have, within 2 %."""
    engine = open_engine(store, experts=2)
    decoded(engine, prompts[0])
    engine.take_counts()
    before = disk_read_bytes()
    for tokens in prompts:
        decoded(engine, tokens)
    fetched, counts = disk_read_bytes() - before, engine.take_counts()
    layers, top_k, steps = 2, 2, 3 * LENGTH
    assert counts.requests == layers * top_k * steps
    assert counts.levels == {8: counts.requests}
    assert counts.vram_hits + counts.ssd_bytes // 20480 == counts.requests
    assert counts.ssd_bytes > counts.requests * 20480 / 2
    assert fetched == pytest.approx(counts.ssd_bytes, rel=0.02)


def test_an_expert_that_fits_is_read_once(open_engine, prompts, store):
    """With blocks for all experts, the second run of the same tokens reads nothing."""
    engine = open_engine(store)
    first = decoded(engine, prompts[0])
    assert engine.take_counts().ssd_bytes > 0
    again = decoded(engine, prompts[0])
    counts = engine.take_counts()
    assert (counts.ssd_bytes, counts.vram_hits) == (0, counts.requests)
    engine.forget_experts()
    assert engine.vram.resident() == {}
    assert torch.equal(torch.stack(first), torch.stack(again))


@pytest.mark.parametrize("exact", [True, False])
def test_only_an_engine_that_is_not_exact_uses_better_planes(open_engine, prompts, store, exact: bool):
    """Level 4 scheduled, level 8 resident: exact computes at level 4, not exact at level 8."""
    tokens = prompts[0]
    engine = open_engine(store, exact=exact)
    best = decoded(engine, tokens)[-1]
    engine.configure(engine.settings.with_(levels=(4,)))
    got = decoded(engine, tokens)[-1]
    assert set(engine.vram.resident().values()) == {8}
    four = decoded(open_engine(store, level=4), tokens)[-1]
    assert not torch.equal(best, four)
    assert torch.equal(got, four if exact else best)


def test_objects_before_the_first_engine_are_frozen_once(open_engine, store, monkeypatch):
    """An engine's own objects are collected after its end; only older objects are frozen, and once."""
    calls = []
    monkeypatch.setattr(process.gc, "collect", lambda: calls.append("collect"))
    monkeypatch.setattr(process.gc, "freeze", lambda: calls.append("freeze"))
    process.freeze_existing_objects.cache_clear()
    open_engine(store).close()
    assert calls == ["collect", "freeze"]
    engine = open_engine(store)
    assert calls == ["collect", "freeze"]
    monkeypatch.undo()
    assert gc.get_freeze_count() > 100_000
    model = weakref.ref(engine.model)
    engine.close()
    engine._parts = engine.rules = None  # the fixture keeps the engine itself
    gc.collect()
    assert model() is None


def test_a_closed_engine_is_freed_without_the_collector(store):
    """The first engine is itself among the frozen objects: a cycle through it would keep its weights in memory."""
    settings = RunSettings(levels=(8,))
    model = StoreModel.open(store)
    engine = Engine(model, model.plan(vram_limit=4_000_000, settings=settings, context=64), settings)
    engine.sequences.end(engine.sequences.new())
    freed = weakref.ref(engine)
    gc.disable()
    try:
        engine.close()
        del engine
        assert freed() is None
    finally:
        gc.enable()
