"""The price of missing planes against costs computed one by one, and what it leads to."""

from __future__ import annotations

import itertools

import pytest
import torch
from damages import a_damage, random_gates

from edgemoe.policy.levels import LevelPolicy
from edgemoe.policy.settings import RunSettings
from edgemoe.policy.tier_prices import PLACES, TierPrices, place_of

FOUR = (8, 4, 2, 0)
PLANE_BITS = {2: 2.5, 4: 2.0, 8: 4.0}
"""The lowest level that needs a plane -> bits per weight of the plane, group parameters included."""

EXPERTS = 16


def seconds(level: int, own: int, slower: int, dram: float, *, whole: bool) -> float:
    """Time of a level's planes from where each lies, in units of a bit from disk; plane by plane."""
    total = 0.0
    for first, bits in PLANE_BITS.items():
        if first > level:
            continue
        here, there = (held >= (level if whole else first) for held in (own, slower))
        total += 0.0 if here else bits * dram if there else bits
    return total


@pytest.mark.parametrize("levels", [FOUR, (4, 2), (4, 2, 0), (8, 4)])
@pytest.mark.parametrize("whole", [False, True])
def test_charged_bits_are_those_of_the_missing_planes(levels, whole):
    """At every pair of tiers' levels a level is charged for each plane by the fastest tier that has it."""
    paid = TierPrices(torch.zeros(1, 1), 0.25, whole).paid_bits(levels)
    assert paid.shape == (PLACES, len(levels))
    for own, slower in itertools.product((0, 2, 4, 8), repeat=2):
        want = [seconds(level, own, max(own, slower), 0.25, whole=whole) for level in levels]
        assert paid[place_of(own, slower)].tolist() == want


def policies(
    bits: float, places: torch.Tensor, dram: float = 1.0, **changes
) -> tuple[LevelPolicy, LevelPolicy]:
    """One that knows where planes lie, and one that does not."""
    settings, damage = RunSettings(levels=FOUR, bits=bits, **changes), a_damage(1, EXPERTS)
    return (
        LevelPolicy(settings, range(1), EXPERTS, damage, TierPrices(places, dram)),
        LevelPolicy(settings, range(1), EXPERTS, damage),
    )


@pytest.mark.parametrize("dram", [0.0, 0.1, 1.0])
def test_each_level_costs_least_of_all(dram):
    """For random places no other level costs less in float64: damage, and the price of the planes' seconds."""
    generator = torch.Generator().manual_seed(3)
    own, slower = torch.tensor([0, 2, 4, 8])[torch.randint(0, 4, (2, EXPERTS), generator=generator)].tolist()
    held = torch.tensor([[place_of(*pair) for pair in zip(own, slower, strict=True)]])
    policy, _ = policies(3.4, held, dram)
    chosen, gates = random_gates(4, 5, 200, EXPERTS)
    got = policy.levels(0, chosen, gates, None, decode=True)
    price = policy.damage.price(FOUR, 3.4)
    table = policy.damage.of_layer(0, FOUR).double()
    for row, experts in enumerate(chosen.tolist()):
        for slot, expert in enumerate(experts):
            costs = {
                level: float(gates[row, slot].double() ** 2 * table[expert, i])
                + price * seconds(level, own[expert], max(own[expert], slower[expert]), dram, whole=False)
                for i, level in enumerate(FOUR)
            }
            assert costs[int(got[row, slot])] <= min(costs.values()) * (1 + 1e-5) + 1e-9


def test_without_any_plane_in_memory_bits_are_as_wanted():
    """Place 0 is the rule that does not know places, bit for bit; so it is under --exact and in a prompt, always."""
    nowhere, everywhere = torch.zeros(1, EXPERTS, dtype=torch.int64), torch.full((1, EXPERTS), PLACES - 1)
    chosen, gates = random_gates(4, 8, 300, EXPERTS)
    knowing, plain = policies(3.3, nowhere)
    want = plain.levels(0, chosen, gates, None, decode=True)
    assert torch.equal(knowing.levels(0, chosen, gates, None, decode=True), want)
    exact, _ = policies(3.3, everywhere, exact=True)
    assert torch.equal(exact.levels(0, chosen, gates, None, decode=True), want)
    assert exact.decode_rule(0, 4).places is None
    resident, _ = policies(3.3, everywhere)
    prompt = resident.levels(0, chosen, gates, None, decode=False)
    assert torch.equal(prompt, plain.levels(0, chosen, gates, None, decode=False))


def test_dram_is_cheap_and_disk_is_dear():
    """Experts get more bits from DRAM than from disk, all of what is resident, and none falls below that."""
    chosen, gates = random_gates(4, 8, 300, EXPERTS)
    bits = {}
    for name, held in {"disk": (0, 0), "DRAM": (0, 8), "base": (2, 0), "all": (8, 0)}.items():
        places = torch.full((1, EXPERTS), place_of(*held))
        found = policies(3.0, places, 0.1)[0].levels(0, chosen, gates, None, decode=True)
        assert int(found.min()) >= held[0]
        bits[name] = float(found.float().mean())
    assert bits["disk"] < bits["base"] < bits["all"] == 8
    assert bits["disk"] < bits["DRAM"] < 8


def test_places_are_read_when_levels_are_chosen():
    """An expert that leaves memory after the policy was made costs its reads from then on."""
    held = torch.full((1, EXPERTS), place_of(8, 0))
    policy, plain = policies(3.0, held)
    chosen, gates = random_gates(4, 8, 50, EXPERTS)
    assert policy.levels(0, chosen, gates, None, decode=True).unique().tolist() == [8]
    held[:] = 0
    want = plain.levels(0, chosen, gates, None, decode=True)
    assert torch.equal(policy.levels(0, chosen, gates, None, decode=True), want)
