"""The eviction policies: each one's order against a brute-force definition of it, and their names."""

from __future__ import annotations

from itertools import pairwise
from math import fsum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.base import EvictionPolicy
from cache.lfru import LFRU
from cache.lru import LRU
from cache.lru_experts import WholeLRU
from cache.policies import POLICIES, make_policy
from storage.base import ExpertKey
from storage.errors import UserError

A, B, C = (ExpertKey(0, e) for e in range(3))
KEYS = [ExpertKey(layer, expert) for layer in range(2) for expert in range(4)]

HISTORIES = st.lists(
    st.tuples(st.sampled_from(["ask", "publish", "evict", "search"]), st.sampled_from(KEYS)), max_size=60
)
"""What may happen to a tier. Asking for, or evicting, what is not resident then tells the policy nothing; a
search for a victim looks at one candidate only."""


class Played:
    """A policy after a history, told of it as a tier does; and what is needed to say what it should answer."""

    def __init__(self, policy: EvictionPolicy, history: list[tuple[str, ExpertKey]]) -> None:
        self.resident: set[ExpertKey] = set()
        self.touches: list[ExpertKey] = []
        """Every key that was asked for while resident, or published, in order."""
        self.uses: list[tuple[ExpertKey, int]] = []
        """The same without promotions, and how many were resident after it."""
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
            elif event == "ask":
                policy.used([key])
                self.touches.append(key)
                self.uses.append((key, len(self.resident)))
            else:
                policy.forgotten(key)
                self.resident.remove(key)


@pytest.mark.parametrize("policy", [LRU, WholeLRU])
@given(history=HISTORIES)
def test_lru_orders_by_last_touch(policy: type[EvictionPolicy], history: list[tuple[str, ExpertKey]]) -> None:
    """Residents stand in the order of their last request or arrival."""
    lru = policy()
    played = Played(lru, history)
    backwards = played.touches[::-1]
    assert list(lru.candidates()) == sorted(played.resident, key=backwards.index, reverse=True)


def score(key: ExpertKey, uses: list[tuple[ExpertKey, int]], memory: float) -> float:
    """The definition: a use is worth 1, and every later one halves it by 1 / (memory * residents then)."""
    worth = []
    for at, (used, _) in enumerate(uses):
        if used == key:
            age = fsum(1 / (memory * residents) for _, residents in uses[at + 1 :])
            worth.append(0.5**age)
    return fsum(worth)


@given(history=HISTORIES, memory=st.floats(0.05, 100))
def test_lfru_orders_by_decayed_uses(history: list[tuple[str, ExpertKey]], memory: float) -> None:
    """Residents stand in the order of their scores, to rounding; what was evicted keeps its score."""
    lfru = LFRU(memory)
    played = Played(lfru, history)
    order = list(lfru.candidates())
    assert sorted(order) == sorted(played.resident)
    scores = [score(key, played.uses, memory) for key in order]
    assert all(low <= high * (1 + 1e-9) for low, high in pairwise(scores))


def test_lfru_prefers_the_frequent_and_forgets_them_in_time() -> None:
    """Three uses outweigh one later one, until enough others have gone by."""
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


def test_lfru_knows_who_comes_back() -> None:
    """An expert that was evicted after many uses returns above one that had few."""
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
    """A score of long ago neither overflows nor outlives newer ones."""
    lfru = LFRU(memory=0.01)
    lfru.arrived(A)
    lfru.arrived(B)
    for _ in range(50_000):
        lfru.used([B])
    lfru.used([A])
    assert list(lfru.candidates()) == [B, A]


@pytest.mark.parametrize("memory", [0.0, -1.0])
def test_lfru_refuses_an_impossible_memory(memory: float) -> None:
    """A half-life is above 0."""
    with pytest.raises(ValueError, match="above 0"):
        LFRU(memory)


@pytest.mark.parametrize("name", POLICIES)
def test_nobody_is_told_of_strangers(name: str) -> None:
    """A use or an eviction of what is not resident is an error of the tier's, in every policy."""
    policy = make_policy(name)
    policy.arrived(A)
    policy.forgotten(A)
    for tell in (policy.used, policy.forgotten):
        with pytest.raises(KeyError):
            tell(A)
    assert list(policy.candidates()) == []


def test_policies_go_by_name() -> None:
    """The three names make three kinds of policy, each a fresh one, and only lru-experts takes experts whole."""
    made = {name: make_policy(name) for name in POLICIES}
    assert {name: type(policy) for name, policy in made.items()} == {
        "lru-planes": LRU,
        "lru-experts": WholeLRU,
        "lfru": LFRU,
    }
    assert [name for name, policy in made.items() if policy.whole] == ["lru-experts"]
    assert make_policy("lfru") is not made["lfru"]


def test_an_unknown_policy_is_refused() -> None:
    """The message says what was asked and what there is."""
    with pytest.raises(UserError, match=r"'fifo'.*lru-planes, lru-experts, lfru"):
        make_policy("fifo")
