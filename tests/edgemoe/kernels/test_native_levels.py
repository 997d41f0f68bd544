"""csrc/levels.c against policy.levels, and the structures that both sides share."""

from __future__ import annotations

import ctypes

import pytest
import torch
from availability import needs_native
from damages import a_damage, random_gates
from pairwise import pairwise

from edgemoe.experts.assignments import without_skipped
from edgemoe.kernels.native import library as native
from edgemoe.kernels.native import structure_sizes
from edgemoe.kernels.native.decoder_parts import level_rule
from edgemoe.kernels.native.structure_sizes import check_sizes
from edgemoe.policy.levels import LevelPolicy
from edgemoe.policy.settings import CRITICAL, RunSettings
from edgemoe.policy.tier_prices import PLACES, TierPrices

pytestmark = needs_native

LAYERS = 5
LEVELS = ((8,), (4,), (4, 2), (4, 0), (8, 4), (8, 4, 2), (8, 4, 2, 0))
RETENTIONS = (0.2, 0.5, 0.6, 0.75, 0.9, 0.99, 1.0)


def c_levels(policy: LevelPolicy, layer: int, choice: torch.Tensor, gates: torch.Tensor) -> list[int]:
    """The levels of one token, chosen int64 [k] and gates float32 [k], by the compiled rule."""
    rule = policy.decode_rule(layer, len(gates))
    structure = level_rule(rule)
    found = torch.full((len(gates),), -1)
    function = native.library().edgemoe_levels
    function.restype, function.argtypes = None, [*(ctypes.c_void_p,) * 3, ctypes.c_int64, ctypes.c_void_p]
    function(ctypes.addressof(structure), gates.data_ptr(), choice.data_ptr(), len(gates), found.data_ptr())
    return found.tolist()


def check_levels(settings: RunSettings) -> None:
    """Checks that the compiled levels of every layer equal LevelPolicy.levels, for random weights of 1 to 8 experts."""
    policy = LevelPolicy(settings, range(LAYERS), experts=16, damage=a_damage(LAYERS, 16))
    for slots in range(1, 9):
        chosen, gates = random_gates(slots, seed=slots)
        for layer in range(LAYERS):
            want = policy.levels(layer, chosen, gates, None, decode=True).tolist()
            rows = zip(chosen, gates.contiguous(), strict=True)
            assert [c_levels(policy, layer, *row) for row in rows] == want


@pytest.mark.e2e
@pairwise(levels=LEVELS, retention=RETENTIONS, depth=["cosine", "equal"], critical=CRITICAL)
def test_levels_are_those_of_the_policy(levels, retention, depth, critical):
    """Both sides choose alike by retention; only two levels have more than one rounding."""
    critical = critical if len(levels) == 2 else CRITICAL[0]
    check_levels(RunSettings(levels=levels, retention=retention, depth=depth, critical=critical))


@pytest.mark.e2e
@pytest.mark.parametrize("retention", [0.3, 0.6, 0.75, 0.9])
@pytest.mark.parametrize("critical", CRITICAL)
def test_thresholds_are_those_of_the_policy(retention, critical):
    """Both sides choose alike by the paper's rule for four levels."""
    settings = RunSettings(levels=(8, 4, 2, 0), rule="paper", retention=retention, critical=critical)
    check_levels(settings)


@pytest.mark.e2e
@pytest.mark.parametrize("levels", [(4, 2), (8, 4, 2, 0), (4, 0)])
def test_levels_by_bits_are_those_of_the_policy(levels):
    """Both sides choose alike by mean bits."""
    check_levels(RunSettings(levels=levels, bits=3.3))


@pytest.mark.e2e
@pytest.mark.parametrize("bits", [2.6, 3.3, 4.0])
@pytest.mark.parametrize("levels", [(8, 4, 2, 0), (4, 2)])
def test_levels_by_place_are_those_of_the_policy(levels, bits):
    """With planes of every expert somewhere, at every pair of the tiers' levels, both sides choose alike."""
    held = torch.randint(0, PLACES, (LAYERS, 16), generator=torch.Generator().manual_seed(1))
    settings, damage = RunSettings(levels=levels, bits=bits), a_damage(LAYERS, 16)
    policy = LevelPolicy(settings, range(LAYERS), 16, damage, TierPrices(held, dram=0.07))
    plain = LevelPolicy(settings, range(LAYERS), 16, damage)
    chosen, gates = random_gates(6, seed=int(10 * bits))
    for layer in range(LAYERS):
        want = policy.levels(layer, chosen, gates, None, decode=True)
        rows = zip(chosen, gates.contiguous(), strict=True)
        assert [c_levels(policy, layer, *row) for row in rows] == want.tolist()
        assert not torch.equal(want, plain.levels(layer, chosen, gates, None, decode=True))


@pytest.mark.parametrize("slots", range(1, 9))
def test_renormalised_gates_are_those_of_the_policy(slots):
    """The weights that are left, scaled by the compiled function, equal without_skipped's bit for bit."""
    function = native.library().edgemoe_renormalise
    function.restype, function.argtypes = None, [ctypes.c_void_p, ctypes.c_int64] * 2
    generator = torch.Generator().manual_seed(slots)
    for gates in random_gates(slots, seed=slots)[1]:
        levels = torch.randint(0, 2, (slots,), generator=generator) * 4
        want = without_skipped(gates[None], levels[None], renormalise=True)[0]
        row, kept = gates.contiguous(), gates[levels > 0].clone()
        function(row.data_ptr(), slots, kept.data_ptr(), len(kept))
        assert torch.equal(kept, want[levels > 0])


def test_sizes_are_those_of_the_compiled_structures():
    """The library was built from these sources, so no size differs."""
    check_sizes(native.library())


@pytest.mark.parametrize("at", range(len(structure_sizes.SIZES)))
def test_a_size_that_differs_is_named(monkeypatch, at):
    """A structure with a field too many fails the check, which names the structure and both sizes."""
    kind = structure_sizes.SIZES[at]

    class Longer(ctypes.Structure):
        _fields_ = [*kind._fields_, ("more", ctypes.c_int64)]

    sizes = list(structure_sizes.SIZES)
    sizes[at] = Longer
    monkeypatch.setattr(structure_sizes, "SIZES", tuple(sizes))
    with pytest.raises(AssertionError, match=rf"Longer: expected {ctypes.sizeof(kind)} bytes, got \d+"):
        check_sizes(native.library())
