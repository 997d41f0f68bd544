"""Prompts longer than a block of rows: a step reads each expert once, and bits do not depend on a step's rows."""

from __future__ import annotations

from pathlib import Path
from traceback import walk_tb

import pytest
import torch
from family_models import random_model, save
from integrity import check_integrity

from edgemoe.kernels.base import quantized_row_bytes
from edgemoe.kv import blocks
from edgemoe.kv.step import Segment, Step, StepCancelled
from edgemoe.memory import workspace
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.policy.importance import PromptAttention
from edgemoe.policy.levels import LevelPolicy

BLOCK = 8
PROMPT = torch.randint(3, 300, (45,), generator=torch.Generator().manual_seed(5)).tolist()

FAMILIES = ("deepseek_v2", "deepseek_v3", "ernie4_5_moe", "gpt_oss", "granitemoe", "mixtral", "qwen3_next")
"""Latent attention, dense layers, shared experts, sinks, windows, multipliers and linear attention."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a block as small as 8 rows, in plans too."""
    for module in (blocks, workspace):
        monkeypatch.setattr(module, "BLOCK_ROWS", BLOCK)


@pytest.fixture(scope="module")
def store_of(tmp_path_factory: pytest.TempPathFactory):
    def make(family: str) -> Path:
        directory = tmp_path_factory.mktemp(family)
        source = save(
            random_model(family), directory / "source", fused=family not in ("granitemoe", "gpt_oss")
        )
        convert_checkpoint(source, directory / "store", max_level=8, layout="auto", dense_bits=16)
        return directory / "store"

    return make


def answered(engine):
    """Logits after the prompt, and after three more tokens; and what the prompt moved."""
    sequence = engine.sequences.new()
    engine.take_counts()
    logits = [engine.prefill(sequence, PROMPT)]
    counts = engine.take_counts()
    logits += [engine.step(Step((Segment(sequence, (token,)),)))[0] for token in (11, 250, 42)]
    assert sequence.length == len(PROMPT) + 3
    engine.sequences.end(sequence)
    check_integrity(engine.vram)
    return torch.stack(logits), counts


@pytest.mark.e2e
@pytest.mark.parametrize(("level", "kv"), [(8, "bf16"), (4, "q8_0"), (2, "bf16")])
def test_rows_of_a_step_change_no_bit_and_decide_what_is_read(open_engine, tiny_store, level, kv):
    """One step, or several of whole blocks, with all experts in memory or two, give equal bits.

    In one step each expert is read at most once, whatever the limit; in six steps with two experts it is read again.
    """
    want, all_read = answered(open_engine(tiny_store, level=level, kv=kv))
    for rows, experts, look_ahead in ((64, 2, "off"), (64, 5, "auto"), (16, 2, "auto"), (8, 2, "off")):
        engine = open_engine(
            *(tiny_store,), level=level, kv=kv, experts=experts, prefill_rows=rows, speculate=look_ahead
        )
        got, counts = answered(engine)
        assert torch.equal(got, want), (rows, experts)
        if look_ahead == "off":
            assert (counts.ssd_bytes > all_read.ssd_bytes) == (rows < len(PROMPT))
            assert counts.ssd_bytes >= all_read.ssd_bytes


@pytest.mark.e2e
@pytest.mark.parametrize("family", FAMILIES)
def test_families_take_long_steps(open_engine, store_of, family):
    """A prompt in one long step has the bits of one in steps of a block, where modules see a block at a time."""
    store = store_of(family)
    want, _ = answered(open_engine(store, prefill_rows=BLOCK))
    got, _ = answered(open_engine(store, prefill_rows=64, experts=3))
    assert torch.equal(got, want)


@pytest.mark.parametrize("signal", ["heavy-hitters", "heavy-hitters-last", "mix"])
def test_experts_are_ranked_over_the_whole_prompt(open_engine, tiny_store, monkeypatch, signal):
    """A long step's ranks are as in a step that is one block, in every layer, and so are its experts' levels."""
    taken, levels = [], LevelPolicy.levels

    def noted(self, layer, choice, gates, ranks, **how):
        got = levels(self, layer, choice, gates, ranks, **how)
        taken.append((layer, ranks, got))
        return got

    monkeypatch.setattr(LevelPolicy, "levels", noted)
    engine = open_engine(
        tiny_store, prefill_rows=64, levels=(4, 2), retention=0.5, importance=signal, exact=True
    )
    results = []
    for block in (BLOCK, 64):
        monkeypatch.setattr(blocks, "BLOCK_ROWS", block)
        taken.clear()
        sequence = engine.sequences.new()
        engine.prefill(sequence, PROMPT)
        engine.sequences.end(sequence)
        results.append(list(taken))
    (first, cut), (_, whole) = results[0][0][:2], results[1][0][:2]
    assert first == 0
    assert ((cut - whole).abs() * len(PROMPT)).max() <= 1.01  # nearly equal tokens may change places
    assert cut.unique().numel() == len(PROMPT)
    assert torch.equal(results[0][0][2], results[1][0][2])


def test_a_long_step_borrows_blocks_of_experts(open_engine, tiny_store):
    """Experts have the memory of a long prompt's rows but while such a step runs, and the budget holds all along."""
    want, _ = answered(open_engine(tiny_store, prefill_rows=64))
    engine = open_engine(tiny_store, experts=3, prefill_rows=64)
    shape, memory, plan = engine.shape, engine.memory, engine.plan
    states = 12 * shape.hidden + quantized_row_bytes(shape.hidden)
    row = states + 10 * shape.experts_per_layer + 64 * shape.top_k
    assert plan.long_step_bytes == 56 * row
    first, used, seen = dict(memory.blocks), engine.budget.used_bytes, list[tuple[int, int]]()
    assert plan.first_experts > plan.vram_experts == 3

    def note(layer: int, choice: torch.Tensor) -> None:
        assert engine.budget.used_bytes <= engine.budget.limit
        assert memory.expert_bytes + memory.kv_bytes + memory.long_step_bytes < engine.budget.used_bytes
        seen.append((len(choice), min(memory.blocks.values())))
        check_integrity(engine.vram)

    engine.watch(note)
    got, _ = answered(engine)
    assert torch.equal(got, want)
    assert {blocks for rows, blocks in seen if rows > BLOCK} == {3}
    assert {blocks for rows, blocks in seen if rows <= BLOCK} == {min(first.values())}
    sequence, turns = engine.sequences.new(), iter(range(4, -1, -1))
    long = Step((Segment(sequence, tuple(PROMPT), PromptAttention()),), lambda: next(turns) == 0)
    with pytest.raises(StepCancelled) as cancelled:
        engine.step(long)
    left = [value for frame, _ in walk_tb(cancelled.tb) for value in frame.f_locals.values()]
    assert not [value for value in left if isinstance(value, torch.Tensor) and len(PROMPT) in value.shape]
    engine.sequences.end(sequence)
    assert (memory.blocks, engine.budget.used_bytes, memory.long_step_bytes) == (first, used, 0)


def test_an_interrupt_while_experts_get_blocks_back_finds_no_step_half_done(open_engine, tiny_store):
    """The prompt is complete before; the next step has not begun, and gives what it would have given."""
    engine = open_engine(tiny_store, experts=3, prefill_rows=64)
    want = answered(engine)[0][:2]
    sequence, resize = engine.sequences.new(), engine.memory._resize
    logits = [engine.prefill(sequence, PROMPT)]

    def interrupted(blocks: object) -> None:
        raise KeyboardInterrupt

    engine.memory._resize = interrupted
    step = Step((Segment(sequence, (11,)),))
    with pytest.raises(KeyboardInterrupt):
        engine.step(step)
    assert sequence.length == len(PROMPT)
    engine.memory._resize = resize
    logits.append(engine.step(step)[0])
    assert torch.equal(torch.stack(logits), want)
    assert min(engine.memory.blocks.values()) > 3


def test_logits_of_every_row_borrow_the_memory_of_a_long_step(open_engine, tiny_store):
    """A scored prompt has the bytes that the plan's scored_rows counts on, and the logits of one without a limit."""
    want = open_engine(tiny_store, prefill_rows=64)
    whole = want.all_logits(want.sequences.new(), PROMPT, decode=False)
    engine, seen = open_engine(tiny_store, experts=3, prefill_rows=64), set[int]()
    engine.watch(lambda layer, chosen: seen.add(engine.memory.long_step_bytes))
    assert torch.equal(engine.all_logits(engine.sequences.new(), PROMPT, decode=False), whole)
    assert seen == {engine.plan.long_step_bytes}
    assert engine.plan.scored_rows >= open_engine(tiny_store, experts=3, prefill_rows=BLOCK).plan.scored_rows


def test_a_cancel_within_a_layer_leaves_the_sequence_as_it_was(open_engine, tiny_store):
    """StepCancelled between two blocks of attention, and between two experts: lengths and tiers are whole."""
    engine = open_engine(tiny_store, experts=3, prefill_rows=64)
    sequence = engine.sequences.new()
    engine.prefill(sequence, PROMPT[:9])
    for call in (1, 3, 8, 12, 20):
        turns = iter(range(call - 1, -1, -1))
        with pytest.raises(StepCancelled):
            engine.step(
                Step(
                    (Segment(sequence, tuple(PROMPT), PromptAttention()),),
                    lambda turns=turns: next(turns) == 0,
                )
            )
        assert sequence.length == 9
        assert not engine.vram.residents.leases
        assert not engine.vram.residents.pending
    again = engine.prefill(sequence, PROMPT)
    engine.sequences.end(sequence)
    other = engine.sequences.new()
    engine.prefill(other, PROMPT[:9])
    assert torch.equal(engine.prefill(other, PROMPT), again)
