"""kernels.triton.place against policy.levels: on a GPU if present, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from pairwise import few

pytest.importorskip("triton")

from damages import a_damage, random_gates
from interpreter import DEVICE, NEEDS_TRITON

from edgemoe.experts.assignments import without_skipped
from edgemoe.kernels.triton.place import PLACE, damage_of, place_experts, rules_of
from edgemoe.kernels.triton.products import ITEM
from edgemoe.policy.levels import LevelPolicy
from edgemoe.policy.settings import RunSettings
from edgemoe.policy.tier_prices import TierPrices, place_of

pytestmark = [pytest.mark.triton, pytest.mark.gpu, NEEDS_TRITON]

LAYERS, EXPERTS = 2, 16
OFFSETS = torch.cat((torch.arange(10).view(2, 5) * 1000, torch.tensor([[4], [8]])), 1)
PLANES = (0, 0, 1, 2, 2)
"""The plane of each address of an item."""

SETTINGS = [
    RunSettings(levels=(4,)),
    RunSettings.uniform(2),
    RunSettings(levels=(4, 2), retention=0.6),
    RunSettings(levels=(4, 0), retention=0.5, renormalise=True),
    RunSettings(levels=(8, 4, 2, 0), bits=3.3),
    RunSettings(levels=(8, 4, 2, 0), bits=2.9, exact=True, renormalise=True),
    RunSettings(levels=(8, 4, 2, 0), rule="paper", retention=0.6),
]


def placed(
    settings: RunSettings,
    choice: torch.Tensor,
    gates: torch.Tensor,
    places: torch.Tensor,
    stopped: int = 0,
    tiers: TierPrices | None = None,
) -> dict[str, torch.Tensor]:
    """The kernel's output for one token, chosen int64 [k] and gates float32 [k], in layer 1."""
    policy, k = LevelPolicy(settings, range(LAYERS), EXPERTS, a_damage(LAYERS, EXPERTS), tiers), len(gates)
    rules = [policy.decode_rule(layer, k) for layer in range(LAYERS)]
    numbers = rules_of(rules, k, exact=settings.exact, renormalise=settings.renormalise)
    report = torch.full((3 * k,), -1, dtype=torch.int32)
    report[:k], report[2 * k :] = choice, gates.view(torch.int32)
    out = {
        "stopped": torch.tensor([stopped], dtype=torch.int32),
        "items": torch.full((2, k, ITEM), -1),
        "gates": torch.full((k,), torch.nan),
        "trace": torch.full((3 * k + 1,), -1, dtype=torch.int32),
    }
    out = {name: tensor.to(DEVICE) for name, tensor in out.items()}
    inputs = report, places, numbers[1], damage_of(rules, EXPERTS)[1], OFFSETS
    place_experts(*(tensor.to(DEVICE) for tensor in inputs), **out)
    return {name: tensor.cpu() for name, tensor in out.items()}


def everywhere(own: int, highest: int = 8) -> torch.Tensor:
    """Places of experts of these levels, with addresses of their own."""
    places = torch.arange(EXPERTS * PLACE).view(EXPERTS, PLACE) * 1_000_000
    places[:, 3], places[:, 4] = own, highest
    return places


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: s.name)
@pytest.mark.parametrize("slots", few([1, 3, 8], [3]))
def test_levels_and_weights_are_those_of_the_policy(settings, slots):
    """Levels and gate weights equal LevelPolicy's and without_skipped's bit for bit."""
    policy = LevelPolicy(settings, range(LAYERS), EXPERTS, damage=a_damage(LAYERS, EXPERTS))
    chosen, gates = (rows[::12].contiguous() for rows in random_gates(slots, seed=slots))
    want = policy.levels(1, chosen, gates, None, decode=True)
    weights = without_skipped(gates, want, renormalise=settings.renormalise)
    for row in range(len(gates)):
        found = placed(settings, chosen[row], gates[row], everywhere(0))
        assert found["items"][:, :, 5].tolist() == [want[row].clamp(max=4).tolist(), want[row].tolist()]
        assert torch.equal(found["gates"], weights[row])
        trace = [*chosen[row].tolist(), *gates[row].view(torch.int32).tolist(), *want[row].tolist(), 0]
        assert found["trace"].tolist() == trace


def test_levels_by_place_are_those_of_the_policy():
    """The kernel reads an expert's place off its levels in the device's memory and in either."""
    settings, held = (
        RunSettings(levels=(8, 4, 2, 0), bits=3.0),
        torch.zeros(LAYERS, EXPERTS, dtype=torch.int64),
    )
    generator, places = torch.Generator().manual_seed(2), everywhere(0)
    levels = torch.tensor([0, 2, 4, 8])[torch.randint(0, 4, (2, EXPERTS), generator=generator)]
    places[:, 3], places[:, 4] = levels[0], levels.max(0).values
    held[1] = torch.tensor([place_of(*pair) for pair in levels.T.tolist()])
    tiers = TierPrices(held, dram=0.1)
    policy = LevelPolicy(settings, range(LAYERS), EXPERTS, a_damage(LAYERS, EXPERTS), tiers)
    chosen, gates = (rows[::4].contiguous() for rows in random_gates(8, seed=4))
    want = policy.levels(1, chosen, gates, None, decode=True).tolist()
    found = [placed(settings, *row, places, tiers=tiers) for row in zip(chosen, gates, strict=True)]
    assert [each["trace"][16:24].tolist() for each in found] == want


def test_addresses_are_those_of_the_chosen_experts():
    """Each address is its plane's start and its matrix's offset; levels end at limits; slots and rows are set."""
    chosen, gates, places = torch.tensor([5, 0, 15]), torch.tensor([0.5, 0.3, 0.2]), everywhere(0)
    items = placed(RunSettings(levels=(8,)), chosen, gates, places)["items"]
    for matrix in range(2):
        for slot, expert in enumerate(chosen.tolist()):
            starts = [int(places[expert, plane]) for plane in PLANES]
            want = [start + int(at) for start, at in zip(starts, OFFSETS[matrix, :5], strict=True)]
            assert items[matrix, slot].tolist() == [*want, (4, 8)[matrix], slot, 1]


@pytest.mark.parametrize("exact", [False, True])
def test_more_resident_planes_are_used_unless_exact(exact):
    """An expert wanted at 2 whose 8 is resident is computed at 8; the rule's level is traced; a skipped one is not."""
    settings = RunSettings(levels=(4, 0), retention=0.5, exact=exact)
    found = placed(settings, torch.tensor([1, 2]), torch.tensor([0.9, 0.1]), everywhere(own=8))
    assert found["items"][1, :, 5].tolist() == [4 if exact else 8, 0]
    assert found["trace"].tolist()[-3:] == [4, 0, 0]


def test_it_stops_where_an_expert_is_nowhere():
    """An expert whose level is too low in both memories stops the group: no expert is computed, then or later."""
    places = everywhere(0)
    places[7, 4] = 2
    chosen, gates = torch.tensor([1, 7]), torch.tensor([0.6, 0.4])
    found = placed(RunSettings(levels=(4,)), chosen, gates, places)
    assert int(found["stopped"]) == 1
    assert int(found["trace"][-1]) == 1
    assert not found["items"][:, :, 5].any()
    assert int(placed(RunSettings.uniform(2), chosen, gates, places)["stopped"]) == 0
    later = placed(RunSettings.uniform(2), chosen, gates, places, stopped=1)
    assert int(later["stopped"]) == 1
    assert not later["items"][:, :, 5].any()
