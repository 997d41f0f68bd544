"""Levels of a new token's experts and the items that compute them, chosen on a device without its host.

The rules of levels are as in csrc/levels.h, to the same bits. `Rules` says how they lie in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from edgemoe.policy.levels import DecodeRule
from edgemoe.policy.tier_prices import PLACES

PLACE = 5
"""int64 numbers of an expert's place: addresses of base, d4 and d8; its level in the device's memory; its level."""

MOST_LEVELS = 4
_PRICES_AT = 3 + MOST_LEVELS
_SLOTS_AT = _PRICES_AT + PLACES * MOST_LEVELS

OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}
"""Options of the launch: damage is rounded before its price is added, as in C."""


def rules_of(rules: Sequence[DecodeRule], slots: int, *, exact: bool, renormalise: bool) -> torch.Tensor:
    """The numbers of each layer's rule, float32 [layers, 71 + slots].

    A layer has: whether levels go by damage, `exact`, `renormalise`, four levels, their four prices at each place of an
    expert (infinity: there is no such level), and where levels do not go by damage, the level of each slot.
    """
    numbers = torch.zeros(len(rules), _SLOTS_AT + slots)
    numbers[:, 1], numbers[:, 2] = exact, renormalise
    numbers[:, _PRICES_AT:_SLOTS_AT] = torch.inf
    for layer, rule in zip(numbers, rules, strict=True):
        if rule.price is not None:
            layer[0] = 1
            layer[3 : 3 + len(rule.levels)] = torch.tensor(rule.levels)
            prices = layer[_PRICES_AT:_SLOTS_AT].view(PLACES, MOST_LEVELS)
            prices[:, : len(rule.levels)] = (
                rule.price
            )  # the same at every place where the rule does not tell them apart
        else:
            layer[_SLOTS_AT:] = torch.tensor(rule.by_place(slots))
    return numbers


def damage_of(rules: Sequence[DecodeRule], experts: int) -> torch.Tensor:
    """Damage of each layer's experts at the levels of its rule, float32 [layers, experts, 4]; 0 for what has none."""
    damage = torch.zeros(len(rules), experts, MOST_LEVELS)
    for layer, rule in zip(damage, rules, strict=True):
        if rule.damage is not None:
            layer[:, : len(rule.levels)] = rule.damage
    return damage


def place_experts(
    report: torch.Tensor,
    places: torch.Tensor,
    rules: torch.Tensor,
    damage: torch.Tensor,
    offsets: torch.Tensor,
    stopped: torch.Tensor,
    items: torch.Tensor,
    gates: torch.Tensor,
    trace: torch.Tensor,
) -> None:
    """Launches the choice of levels for the experts that a router chose, and writes the items that compute them.

    An expert is computed at its level by the rule or, unless exact, at its level in the device's memory if that is
    higher. Where an expert's place has a lower level than the rule wants, `stopped` becomes 1. While it is 1 all items
    have level 0: they compute nothing.

    Args:
        report: int32 [3 k], as choose_experts'.
        places: int64 [E, PLACE], of the layer's experts; level 0: no address is valid.
        rules: float32 [71 + k], of the layer (rules_of).
        damage: float32 [E, 4], of the layer (damage_of).
        offsets: int64 [2, 6], from the start of its plane to each address of an item, and the highest level of the
            matrix, for gate_up and down.
        stopped: int32 [1].
        items: int64 [2, k, ITEM], written.
        gates: float32 [k], written: the weights of the slots, 0 for a skipped one.
        trace: int32 [3 k + 1], written: the experts, the bits of the router's gate weights, the levels by the rule, and
            `stopped`.
    """
    top_k = len(gates)
    sizes = top_k, triton.next_power_of_2(top_k)
    place[(1,)](
        *(report, places, rules, damage, offsets, stopped, items, gates, trace, *sizes),
        num_warps=1,
        **OPTIONS,
    )


@triton.jit
def place(
    report,
    places,
    rules,
    damage,
    offsets,
    stopped,
    items,
    gates,
    trace,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
):
    """One program: see place_experts.

    The literals 4, 5, 7, 8 and 71 are MOST_LEVELS, PLACE, _PRICES_AT, ITEM and _SLOTS_AT.
    """
    slot = tl.arange(0, K_PADDED)
    inside = slot < K
    expert = tl.load(report + slot, mask=inside, other=0)
    bits = tl.load(report + 2 * K + slot, mask=inside, other=0)
    gate = bits.to(tl.float32, bitcast=True)
    by_order = tl.load(rules + 71 + slot, mask=inside, other=0)
    at = places + expert.to(tl.int64) * 5
    own, highest = tl.load(at + 3, mask=inside, other=0), tl.load(at + 4, mask=inside, other=0)
    held = (
        4 * ((own > 0).to(tl.int64) + (own > 2) + (own > 4)) + (highest > 0) + (highest > 2) + (highest > 4)
    )
    level = tl.zeros((K_PADDED,), tl.float32) + tl.load(rules + 3)
    least = tl.full((K_PADDED,), float("inf"), tl.float32)
    for i in tl.static_range(4):
        lost = gate * gate * tl.load(damage + expert * 4 + i, mask=inside, other=0)
        cost = lost + tl.load(rules + 7 + 4 * held + i)
        level = tl.where(cost < least, tl.load(rules + 3 + i), level)
        least = tl.where(cost < least, cost, least)
    wanted = tl.where(inside, tl.where(tl.load(rules) > 0, level, by_order), 0).to(tl.int64)
    missing = tl.sum(tl.where(wanted > highest, 1, 0), 0)
    stop = tl.maximum(tl.load(stopped), tl.where(missing > 0, 1, 0))
    reused = tl.where(tl.load(rules + 1) > 0, wanted, tl.maximum(own, wanted))
    computed = tl.where(wanted > 0, tl.where(stop > 0, 0, reused), 0)
    kept = tl.where(wanted > 0, gate, 0.0)
    if tl.load(rules + 2) > 0:
        total, left = tl.zeros((), tl.float32), tl.zeros((), tl.float32)
        for i in tl.static_range(K):
            total += tl.sum(tl.where(slot == i, gate, 0.0), 0)
            left += tl.sum(tl.where(slot == i, kept, 0.0), 0)
        kept = kept * tl.div_rn(total, tl.maximum(left, 1e-20))
    tl.store(gates + slot, kept, mask=inside)
    for matrix in tl.static_range(2):
        item = items + (matrix * K + slot) * 8
        for address in tl.static_range(5):
            plane = 0 if address < 2 else (1 if address == 2 else 2)
            start = tl.load(at + plane, mask=inside, other=0)
            tl.store(item + address, start + tl.load(offsets + matrix * 6 + address), mask=inside)
        tl.store(item + 5, tl.minimum(computed, tl.load(offsets + matrix * 6 + 5)), mask=inside)
        tl.store(item + 6, slot.to(tl.int64), mask=inside)
        tl.store(item + 7, tl.full((K_PADDED,), 1, tl.int64), mask=inside)
    tl.store(trace + slot, expert, mask=inside)
    tl.store(trace + K + slot, bits, mask=inside)
    tl.store(trace + 2 * K + slot, wanted.to(tl.int32), mask=inside)
    tl.store(trace + 3 * K, stop)
    tl.store(stopped, stop)
