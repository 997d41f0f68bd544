"""cache.fixed_places: blocks of different sizes within a budget of bytes, and a tier on them."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from integrity import check_integrity
from toys import ToyForm

from edgemoe.cache.fixed_places import FixedPlaces
from edgemoe.cache.lru import LRU
from edgemoe.cache.plane_tier import PlaneTier
from edgemoe.storage.base import BLOCK, BlockKind, ExpertKey

KEYS = [ExpertKey(e % 2, e) for e in range(6)]
SIZES = {key: (1 + 2 * e % 5) * BLOCK for e, key in enumerate(KEYS)}
FORM = ToyForm([BlockKind("factors", 5 * BLOCK, 2)], merged=False)


def tier_of(blocks: int) -> tuple[PlaneTier, FixedPlaces]:
    places = FixedPlaces("factors", SIZES, blocks * BLOCK)
    return PlaneTier(FORM, {}, LRU, device="cpu", name="factors", places=places), places


@pytest.mark.e2e
@given(
    st.integers(5, 18),
    st.lists(st.tuples(st.sampled_from(["put", "use", "lease", "release", "drop"]), st.sampled_from(KEYS))),
)
def test_a_tier_evicts_until_the_bytes_of_one_are_free(blocks, calls):
    """As a dict of sizes in order of use does, that skips what is leased; the bytes of every resident are its own."""
    tier, places = tier_of(blocks)
    residents: OrderedDict[ExpertKey, None] = OrderedDict()
    leases, dropped = {}, set()
    for call, key in calls:
        if call == "put" and key not in residents:
            held = sum(SIZES[each] for each in leases.keys() - residents.keys())
            free = blocks * BLOCK - held - sum(SIZES[each] for each in residents)
            victims = [each for each in residents if each not in leases]
            gone = []
            while free < SIZES[key] and victims:
                gone.append(victims.pop(0))
                free += SIZES[gone[-1]]
            into = tier.reserve(key, 2, keep_victims=False)
            if free < SIZES[key] or key in dropped:
                assert into is None
                continue
            for each in gone:
                del residents[each]
            np.asarray(into.into["factors"])[:] = 1 + KEYS.index(key)
            tier.release(tier.publish(into))
            residents[key] = None
        elif call == "use" and key in residents:
            tier.mark_used([key])
            residents.move_to_end(key)
        elif call == "lease" and key in residents and key not in leases:
            leases[key] = tier.acquire(key, 2)
            residents.move_to_end(key)
        elif call == "release" and key in leases:
            tier.release(leases.pop(key))
            dropped.discard(key)
        elif call == "drop" and key in residents:
            tier.drop(key)
            del residents[key]
            dropped |= {key} & leases.keys()
        check_integrity(tier)
        assert tier.resident() == dict.fromkeys(residents, 2)
        for each in KEYS:
            there = each in residents or each in leases
            # Pages that went back to the system are zeros when they are next touched.
            assert np.unique(np.asarray(places.view(each))).tolist() == [(1 + KEYS.index(each)) * there]
    tier.release(*leases.values())
    tier.close()


def test_one_address_for_as_long_as_it_lives():
    """An expert that leaves and comes back lies where it was; others of its size are elsewhere."""
    tier, places = tier_of(5)
    places_of = {key: np.asarray(places.view(key)).ctypes.data for key in KEYS}
    spans = sorted((start, start + SIZES[key]) for key, start in places_of.items())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    for key in KEYS * 2:
        into = tier.reserve(key, 2, keep_victims=False)
        assert into is not None
        assert np.asarray(into.into["factors"]).ctypes.data == places_of[key]
        assert places_of[key] % BLOCK == 0
        tier.release(tier.publish(into))
    tier.close()


def test_a_block_larger_than_the_budget_has_no_place():
    tier, places = tier_of(4)
    largest = max(KEYS, key=SIZES.__getitem__)
    assert SIZES[largest] == 5 * BLOCK
    assert tier.reserve(largest, 2) is None
    assert tier.free_experts(2) == 0
    with pytest.raises(KeyError):
        places.view(ExpertKey(9, 9))
    tier.close()
