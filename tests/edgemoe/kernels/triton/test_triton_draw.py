"""Triton's kernels of a token's draw against the definition: on a GPU if present, else in the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from interpreter import DEVICE, NEEDS_TRITON, few_programs, round_like_a_gpu

from edgemoe.kernels.triton import draw as kernels
from edgemoe.kernels.triton import token
from edgemoe.layers.graph.draw_memory import DrawMemory
from edgemoe.policy.drawing import UNIT, DrawRule, Draws

pytestmark = [pytest.mark.triton, pytest.mark.gpu, NEEDS_TRITON]


@pytest.fixture(autouse=True)
def rounding(monkeypatch):
    round_like_a_gpu(monkeypatch)
    monkeypatch.setattr(token, "BLOCK", 256)
    few_programs(monkeypatch)


class OneNumber(Draws):
    """Draws whose next number is given."""

    def __init__(self, rule: DrawRule, number: int) -> None:
        super().__init__(rule, 0)
        self._number = number

    def coming(self, count):
        return np.full(count, self._number)


def drawn(logits: torch.Tensor, draws: Draws, memory: DrawMemory, position: int = 300) -> int:
    """The token that the kernels draw, of logits bf16 [vocab]."""
    parts = token.parts_of(len(logits))
    state = torch.tensor([position, 7, 99], device=DEVICE)
    highest, numbers = torch.zeros(parts, device=DEVICE), torch.zeros(len(logits), device=DEVICE)
    result = torch.zeros(1 + parts, dtype=torch.int32, device=DEVICE)
    memory.follow(draws, position)
    kernels.draw_token(logits.to(DEVICE), highest, numbers, result, state, memory.tables)
    assert state.tolist() == [position + 1, int(result[0]), 99]
    assert torch.equal(numbers.cpu(), logits.float())
    assert not memory.tables.counts.any()
    return int(result[0])


def memory_of(vocab: int) -> DrawMemory:
    """Memory on the device of these tests."""

    class Place:
        place = DEVICE

        @staticmethod
        def host_tensor(shape, dtype):
            return torch.zeros(shape, dtype=dtype)

    return DrawMemory(Place, vocab)


@pytest.mark.parametrize(
    ("vocab", "rule"),
    [
        (700, DrawRule.of(0.7, 20, 0.95)),
        (700, DrawRule.of(1.0)),
        (300, DrawRule.of(2.0, 0, 0.6, 0.01)),
        (7, DrawRule.of(30.0, 50, 0.999, 0.5)),
    ],
)
def test_the_kernels_draw_the_hosts_token(vocab, rule):
    """Equal logits, zeros of both signs, forbidden tokens, the ends of the random numbers, several parts."""
    chance, memory = torch.Generator().manual_seed(vocab), memory_of(vocab)
    for number in (0, (1 << UNIT) - 1, int(torch.randint(1 << UNIT, (1,), generator=chance))):
        logits = (torch.randint(-12, 13, (vocab,), generator=chance) * 0.25).bfloat16()
        logits[torch.randint(vocab, (3,), generator=chance)] = -0.0
        logits[3] = -torch.inf
        assert drawn(logits, OneNumber(rule, number), memory) == rule.draw(logits.float(), number)


def test_the_numbers_of_a_seed_come_in_their_order():
    """Token by token, past the numbers that the device has at once, and after a change of the rule."""
    logits, memory = torch.linspace(0, 1, 40).bfloat16(), memory_of(40)
    rule, draws, sent = DrawRule.of(3.0), Draws(DrawRule.of(3.0), 5), []
    memory.tables.rule.copy_ = lambda *args, **how: (
        sent.append(1),
        torch.Tensor.copy_(memory.tables.rule, *args),
    )
    for position in (10, 12, 266, 267):
        while draws.number < position - 10:
            draws.next()
        if position == 12:
            draws.rule = rule = DrawRule.of(5.0, 3)
        token_id = drawn(logits, draws, memory, position)
        assert token_id == rule.draw(logits.float(), draws.next())
    assert len(sent) == 3


def test_a_nan_leaves_the_token_within_the_vocabulary():
    """The next token's launches look up a row of the table, whatever the logits are."""
    some = torch.full((270,), torch.nan)
    some[[3, 266]] = 1
    memory = memory_of(270)
    for logits in (some, torch.full((270,), -torch.inf)):
        with np.errstate(all="ignore"):
            parts = token.parts_of(270)
            result = torch.zeros(1, dtype=torch.int32, device=DEVICE)
            numbers, state = torch.zeros(270, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
            memory.follow(Draws(DrawRule.of(0.7, 5, 0.9), 1), 0)
            bf16, highest = logits.bfloat16().to(DEVICE), torch.zeros(parts, device=DEVICE)
            kernels.draw_token(bf16, highest, numbers, result, state, memory.tables)
        assert 0 <= int(result[0]) < 270
