"""The controller of bits against simulated machines whose time per token it does not know."""

from __future__ import annotations

import random

import pytest

from edgemoe.policy.target import BitsController

MACHINES = [
    (0.010, 0.010, 1.0, 0.05),
    (0.005, 0.020, 1.0, 0.10),
    (0.030, 0.005, 0.3, 0.10),
    (0.002, 0.002, 0.2, 0.20),
    (0.020, 0.030, 0.5, 0.15),
]
"""Seconds without and per bit, how fast a cache follows a change, and relative noise."""


class Machine:
    """A token's time: linear in bits that follow the wanted ones with a lag, noise, and one slow token in a hundred."""

    def __init__(self, fixed: float, per_bit: float, lag: float, noise: float, seed: int) -> None:
        self._fixed, self._per_bit, self._lag, self._noise = fixed, per_bit, lag, noise
        self._random, self._bits = random.Random(seed), 4.5

    def token(self, bits: float) -> float:
        self._bits += (bits - self._bits) * self._lag
        seconds = self._fixed + self._per_bit * self._bits
        slow = 3 * seconds if self._random.random() < 0.01 else 0.0
        return seconds * (1 + self._noise * self._random.gauss(0, 1)) + slow


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("bits", [2.8, 3.5, 6.0])
def test_target_is_met_within_a_tenth_after_fifty_tokens(machine, bits):
    """On every machine and at every seed; the bits settle: in the last hundred tokens they change by a bit at most."""
    target = machine[0] + machine[1] * bits
    for seed in range(10):
        controller, simulated, times, chosen = (
            BitsController(target, 4.5, (2.5, 8.5)),
            Machine(*machine, seed),
            [],
            [],
        )
        for _ in range(250):
            times.append(simulated.token(controller.bits))
            controller.observe(times[-1])
            chosen.append(controller.bits)
        late = times[50:]
        assert sum(late) / len(late) == pytest.approx(target, rel=0.1)
        assert max(chosen[-100:]) - min(chosen[-100:]) <= 0.5 * bits
        assert controller.least is None


def test_a_target_out_of_reach_gets_the_fewest_bits():
    """The mean time there is known after some intervals; one slow interval alone does not count as a miss."""
    controller = BitsController(0.001, 4.5, (2.5, 8.5))
    for _ in range(40):
        controller.observe(0.02)
    assert (controller.bits, controller.least) == (2.5, pytest.approx(0.02))
    reachable = BitsController(0.03, 2.5, (2.5, 8.5))
    for token in range(40):
        reachable.observe(0.5 if token < 4 else 0.03)
    assert reachable.least is None


def test_a_target_without_need_gets_the_most_bits():
    controller = BitsController(1.0, 4.5, (2.5, 8.5))
    for _ in range(60):
        controller.observe(0.02)
    assert (controller.bits, controller.least) == (8.5, None)


def test_a_met_target_changes_nothing():
    controller = BitsController(0.02, 4.5, (2.5, 8.5))
    for token in range(200):
        controller.observe(0.0195 if token % 2 else 0.0205)
    assert (controller.bits, controller.changes) == (4.5, 0)
