"""experts/assignments.py against brute-force dictionaries."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgemoe.experts.assignments import Assignments, PromptSum, RowSum
from edgemoe.kernels.native import library as native
from edgemoe.storage.base import ExpertKey

LEVELS = (0, 2, 4, 8)
EXPERTS = 12


@st.composite
def choices(draw):
    """Experts and levels [T][k]; a token's experts are distinct."""
    tokens, slots = draw(st.integers(1, 9)), draw(st.integers(1, 8))
    token = st.permutations(range(EXPERTS)).map(lambda order: order[:slots])
    chosen = draw(st.lists(token, min_size=tokens, max_size=tokens))
    row = st.lists(st.sampled_from(LEVELS), min_size=slots, max_size=slots)
    return chosen, draw(st.lists(row, min_size=tokens, max_size=tokens))


def flat(rows: list[list[int]]) -> list[int]:
    return [number for row in rows for number in row]


def assignments_of(choice: list[list[int]], levels: list[list[int]]) -> Assignments:
    levels_of = torch.tensor(levels)
    gates = torch.rand(levels_of.shape).masked_fill(levels_of == 0, 0)
    return Assignments.of(torch.tensor(choice), levels_of, gates)


@pytest.mark.e2e
@given(choices())
def test_assignments_are_the_pairs_of_each_expert_and_level(choice):
    """Every computed (token, slot) pair is in the assignment of its expert and level, and in no other."""
    chosen, levels = choice
    want: dict[tuple[int, int], list[int]] = {}
    for place, (expert, level) in enumerate(zip(flat(chosen), flat(levels), strict=True)):
        want.setdefault((expert, level), []).append(place)
    skipped = [len(places) for (_, level), places in want.items() if not level]
    assignments = assignments_of(chosen, levels)
    found = {
        (expert, one.level): one.places.tolist()
        for expert, several in assignments.by_expert.items()
        for one in several
    }
    assert found == {pair: places for pair, places in want.items() if pair[1]}
    assert all(one.rows == len(one.places) for several in assignments.by_expert.values() for one in several)
    assert sorted(assignments.skipped) == sorted(skipped)
    assert assignments.rows + sum(skipped) == len(flat(chosen))
    highest = {
        ExpertKey(3, expert): max(level for other, level in found if other == expert) for expert, _ in found
    }
    assert assignments.wanted(3) == highest


@pytest.mark.e2e
@given(choices(), st.integers(1, 12))
def test_batches_have_every_assignment_once(choice, limit):
    """Batches keep the order of leases, have at most `limit` rows, or one larger assignment, and lose nothing."""
    assignments = assignments_of(*choice)
    leases = [SimpleNamespace(key=key) for key in assignments.wanted(0)]
    batches = list(assignments.batches(leases, limit))
    assert all(batches)
    assert all(len(batch) == 1 or sum(one.rows for _, one in batch) <= limit for batch in batches)
    batched = [(lease.key.expert, one) for batch in batches for lease, one in batch]
    want = [(lease.key.expert, one) for lease in leases for one in assignments.by_expert[lease.key.expert]]
    assert [(expert, id(one)) for expert, one in batched] == [(expert, id(one)) for expert, one in want]


def test_a_tokens_experts_stay_in_the_routers_order():
    """The order of a single token's experts is the order in which they are requested."""
    assignments = assignments_of([[7, 2, 9, 0]], [[8, 4, 0, 2]])
    assert list(assignments.by_expert) == [7, 2, 0]
    assert [one.places.item() for several in assignments.by_expert.values() for one in several] == [0, 1, 3]
    assert assignments.skipped == [1]


@pytest.mark.parametrize("tokens", [1, 3])
def test_gates_are_float32(tokens):
    """Gate weights of any dtype become float32 [T, k], contiguous."""
    chosen, levels = torch.zeros(tokens, 1, dtype=torch.int64), torch.full((tokens, 1), 4)
    gates = Assignments.of(chosen, levels, torch.ones(tokens, 1).bfloat16()).gates
    assert (gates.dtype, gates.shape, gates.is_contiguous()) == (torch.float32, (tokens, 1), True)


@pytest.mark.skipif(not native.available(), reason="torch's operators add in orders of their own")
def test_a_tokens_sum_has_the_same_bits_in_prompts_and_in_decode():
    """Rows that nearly cancel each other, so that another order of a sum shows in bf16: in a prompt's sums, in sums of
    several new tokens, and in each token's own."""
    tokens, slots, size = 40, 4, 256
    gates = torch.rand(tokens, slots) + 0.1
    rows = torch.randn(tokens, slots, size)
    rows[:, 1::2] = -rows[:, ::2] * (gates[:, ::2] / gates[:, 1::2])[..., None]
    rows, hidden = rows.bfloat16(), torch.empty(tokens, size, dtype=torch.bfloat16)
    chosen = torch.stack([torch.randperm(EXPERTS)[:slots] for _ in range(tokens)])
    levels = torch.full_like(chosen, 8)

    def summed(kind: type[RowSum], part: slice, experts: list[int]) -> torch.Tensor:
        assignments = Assignments.of(chosen[part], levels[part], gates[part])
        one = kind(hidden[part], assignments)
        for expert in experts:
            for assignment in assignments.by_expert.get(expert, ()):
                room = one.room(assignment.places)
                room.copy_(rows[part].flatten(0, 1)[assignment.places])
                one.add(assignment.places, room)
        return one.result()

    in_order, every = [*range(EXPERTS)], slice(0, tokens)
    want = summed(PromptSum, every, in_order)
    assert torch.equal(summed(RowSum, every, in_order[::-1]), want)
    for token in range(tokens):
        assert torch.equal(summed(RowSum, slice(token, token + 1), in_order[::-1])[0], want[token])
