"""A prefix cache of a model on a device: prompts that an earlier process computed are read, with their bits."""

from __future__ import annotations

import pytest
import torch
from counted_engine import CountedEngine
from device_double import DoubleDevice
from engine_rig import Launched, in_planes
from greedy import run

from edgemoe.engine.parts import Wraps
from edgemoe.engine.scheduler import Scheduler
from edgemoe.kv.blocks import BLOCK
from edgemoe.kv.prefix_cache import PrefixCache
from edgemoe.policy.settings import RunSettings

PROMPT = [(7 * i) % 290 + 3 for i in range(BLOCK + 20)]


@pytest.mark.e2e
def test_a_restart_on_a_device_reads_its_blocks(tiny_store, tmp_path):
    """One engine computes all tokens, the next one only tokens after the block; both answers have equal bits."""
    device, settings, rows = DoubleDevice(3), RunSettings(levels=(4,), exact=True), []
    store = in_planes(tiny_store, device)
    plan = store.plan(vram_limit=None, settings=settings, context=2 * BLOCK, parallel=1)
    for cached in (0, BLOCK):
        with CountedEngine(
            store, plan, settings, Wraps(kernel=lambda kernel: Launched(kernel, device))
        ) as engine:
            cache = PrefixCache.open(tmp_path, 1 << 30, engine.shape.kv)
            scheduler = Scheduler(engine, keep=True, disk=cache)
            request = run(scheduler, PROMPT, new=2)
            scheduler.close()
        assert request.cached == cached
        rows.append(torch.stack(request.rows))
    device.end()
    assert torch.equal(*rows)
