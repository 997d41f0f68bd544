"""The eviction policies: the order of each against its definition by brute force, and their names."""

from __future__ import annotations

from itertools import pairwise
from math import fsum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgemoe.cache.base import EvictionPolicy
from edgemoe.cache.lfru import LFRU
from edgemoe.cache.lru import LRU, PooledLRU, WholeLRU
from edgemoe.cache.policies import POLICIES, is_pooled, make_policy
from edgemoe.errors import UserError
from edgemoe.storage.base import ExpertKey

A, B, C = (ExpertKey(0, e) for e in range(3))
KEYS = [ExpertKey(layer, expert) for layer in range(2) for expert in range(4)]

HISTORIES = st.lists(
    st.tuples(st.sampled_from(["request", "publish", "evict", "search"]), st.sampled_from(KEYS)), max_size=60
)
"""Events of a tier. The policy learns nothing of a request for, or an eviction of, an expert that is not resident; a
search for a victim looks at one candidate only."""


class Played:
    """Calls a policy as a tier does over a history, and collects what its definition refers to."""

    def __init__(self, policy: EvictionPolicy, history: list[tuple[str, ExpertKey]]) -> None:
        self.resident: set[ExpertKey] = set()
        self.touches: list[ExpertKey] = []
        """Every key that was requested while resident, or published, in order."""
        self.uses: list[tuple[ExpertKey, int]] = []
        """Touches without promotions, each with the number of residents after it."""
        for event, key in history:
            if event == "publish":
                policy.arrived(key)
                promotion = key in self.resident
                self.resident.add(key)
                self.touches.append(key)
                if not promotion:
                    self.uses.append((key, len(self.resident)))
            elif event == "search":
                assert next(policy.candidates(), None) in (self.resident or {None})
            elif key not in self.resident:
                continue
            elif event == "request":
                policy.used([key])
                self.touches.append(key)
                self.uses.append((key, len(self.resident)))
            else:
                policy.forgotten(key)
                self.resident.remove(key)


@pytest.mark.parametrize("policy", [LRU, WholeLRU])
@given(history=HISTORIES)
def test_lru_orders_by_last_touch(policy: type[EvictionPolicy], history: list[tuple[str, ExpertKey]]) -> None:
    """Residents come in the order of their last request or arrival."""
    lru = policy()
    played = Played(lru, history)
    backwards = played.touches[::-1]
    assert list(lru.candidates()) == sorted(played.resident, key=backwards.index, reverse=True)


def score(key: ExpertKey, uses: list[tuple[ExpertKey, int]], memory: float) -> float:
    """The definition: a use adds 1, which every later use divides by 2 ** (1 / (memory * residents then))."""
    worth = []
    for at, (used, _) in enumerate(uses):
        if used == key:
            age = fsum(1 / (memory * residents) for _, residents in uses[at + 1 :])
            worth.append(0.5**age)
    return fsum(worth)


@given(history=HISTORIES, memory=st.floats(0.05, 100))
def test_lfru_orders_by_decayed_uses(history: list[tuple[str, ExpertKey]], memory: float) -> None:
    """Residents come in the order of their scores, to rounding; an evicted expert keeps its score."""
    lfru = LFRU(memory)
    played = Played(lfru, history)
    order = list(lfru.candidates())
    assert sorted(order) == sorted(played.resident)
    scores = [score(key, played.uses, memory) for key in order]
    assert all(low <= high * (1 + 1e-9) for low, high in pairwise(scores))


def test_lfru_prefers_frequent_experts_for_a_while() -> None:
    """Three uses outweigh one later use, until many other uses have followed."""
    lfru = LFRU(memory=2)
    for key in (A, B):
        lfru.arrived(key)
    for _ in range(2):
        lfru.used([A])
    lfru.used([B])
    assert list(lfru.candidates()) == [B, A]
    lfru.arrived(C)
    for _ in range(20):
        lfru.used([C])
    lfru.used([B])
    assert list(lfru.candidates()) == [A, B, C]


def test_lfru_keeps_the_score_of_an_evicted_expert() -> None:
    """An expert that was evicted after many uses returns above an expert of few uses."""
    lfru = LFRU(memory=100)
    lfru.arrived(A)
    for _ in range(5):
        lfru.used([A])
    lfru.forgotten(A)
    lfru.arrived(B)
    lfru.used([B])
    lfru.arrived(A)
    lfru.used([B])
    assert list(lfru.candidates()) == [B, A]


def test_lfru_stays_exact_over_long_times() -> None:
    """An old score neither overflows nor outlives later ones."""
    lfru = LFRU(memory=0.01)
    lfru.arrived(A)
    lfru.arrived(B)
    for _ in range(50_000):
        lfru.used([B])
    lfru.used([A])
    assert list(lfru.candidates()) == [B, A]


@pytest.mark.parametrize("memory", [0.0, -1.0])
def test_lfru_refuses_an_impossible_memory(memory: float) -> None:
    """A half-life of 0 or less is an error."""
    with pytest.raises(ValueError, match="above 0"):
        LFRU(memory)


@pytest.mark.parametrize("name", POLICIES)
def test_only_residents_are_used_or_forgotten(name: str) -> None:
    """In every policy a use or an eviction of an expert that is not resident is an error."""
    policy = make_policy(name)
    policy.arrived(A)
    policy.forgotten(A)
    with pytest.raises(KeyError):
        policy.used([A])
    with pytest.raises(KeyError):
        policy.forgotten(A)
    assert list(policy.candidates()) == []


def test_policies_have_names() -> None:
    """Each name makes a policy of its own class, a fresh one per call; two evict whole experts, one from a pool."""
    made = {name: make_policy(name) for name in POLICIES}
    assert {name: type(policy) for name, policy in made.items()} == {
        "lru-planes": LRU,
        "lru-experts": WholeLRU,
        "lru-pool": PooledLRU,
        "lfru": LFRU,
    }
    assert [name for name, policy in made.items() if policy.whole] == ["lru-experts", "lru-pool"]
    assert [name for name in POLICIES if is_pooled(name)] == ["lru-pool"]
    assert make_policy("lfru") is not made["lfru"]


def test_an_unknown_policy_is_refused() -> None:
    """The message names the unknown policy and the known ones."""
    with pytest.raises(UserError, match=r"'fifo'.*lru-planes, lru-experts, lru-pool, lfru"):
        make_policy("fifo")


@pytest.mark.e2e
@pytest.mark.parametrize("name", POLICIES)
@given(history=HISTORIES, keys=st.lists(st.sampled_from(KEYS)))
def test_several_uses_at_once_are_uses_in_a_row(
    name: str, history: list[tuple[str, ExpertKey]], keys: list[ExpertKey]
) -> None:
    """One call with several residents orders the experts like one call a resident."""
    together, apart = make_policy(name), make_policy(name)
    resident = Played(together, history).resident
    Played(apart, history)
    used = [key for key in keys if key in resident]
    together.used(iter(used))
    for key in used:
        apart.used([key])
    assert list(together.candidates()) == list(apart.candidates())
