"""Tokens of a step that agree on experts (--lynx), on a device that works late and out of order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from device_double import DoubleDevice
from engine_rig import engines_on
from steps import decoded_together

from edgemoe.engine.engine import Engine
from edgemoe.policy.remapping import Remapping

PROMPTS = [[5, 9, 200], [17, 3, 88, 41, 250], [60], [7, 7, 120, 33, 2, 90]]
DECODED = [[11, 250, 42], [99, 7, 180], [64, 12, 5], [201, 31, 77]]
"""Of each prompt, the tokens after it."""


@pytest.fixture
def open_on(tiny_store, monkeypatch) -> Iterator[Callable[..., Engine]]:
    """Opens engines on a double, or in RAM (engine_rig.engines_on)."""
    for open_one in engines_on(tiny_store, monkeypatch):
        yield partial(open_one, levels=(4,), parallel=4, remapping=Remapping(8, 4))


def agreed(engine: Engine) -> tuple[list[torch.Tensor], dict[str, int], torch.Tensor]:
    """The routers' choices in steps of all sequences, the counts of what changed, and the logits."""
    seen: list[torch.Tensor] = []
    engine.watch(lambda layer, chosen: seen.append(chosen.clone()) if len(chosen) == len(PROMPTS) else None)
    logits = decoded_together(engine, PROMPTS, DECODED, engine.take_use)
    return seen, engine.take_use().agreement, logits


@pytest.mark.e2e
def test_tokens_on_a_device_agree_as_in_ram(open_on):
    """Choices, counts and logits are equal bit for bit, for any limit and order of copies."""
    want, their_counts, logits = agreed(open_on(None).by_modules())
    for seed, (experts, dram) in enumerate([(3, 0), (5, 16)]):
        choices, counts, found = agreed(open_on(DoubleDevice(seed, haste=0.2), experts, dram))
        assert all(map(torch.equal, choices, want))
        assert len(choices) == len(want) == 2 * len(DECODED[0])
        assert counts == their_counts
        assert torch.equal(found, logits)
    assert 0 < counts["active"] < counts["active_before"]


def test_an_agreement_adds_no_wait(open_on):
    """The host waits for the device once per layer with experts and once for logits; counts come with the choice."""
    device = DoubleDevice(2)
    engine = open_on(device, None)
    decoded_together(engine, PROMPTS, [tokens[:1] for tokens in DECODED], lambda: setattr(device, "waits", 0))
    assert device.waits == 2 + 1
