"""The tiers of a plan, in the memory that they belong to, and the route between them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from cache.arena import in_ram
from cache.device_arena import OnDevice, Pinned
from cache.free_list import Arenas
from cache.plane_tier import PlaneTier
from cache.policies import make_policy
from edgemoe.machine.out_of_memory import taking
from edgemoe.memory.plan import MemoryPlan, staging_buffers
from edgemoe.policy.settings import RunSettings
from prefetch.device_path import DevicePath, Staging
from prefetch.ram_path import RamPath
from prefetch.transfer_path import TransferPath
from storage.base import ResidentForm
from storage.device import Device


@dataclass(frozen=True)
class Tiers:
    """What an engine fetches experts through. `dram` is None where the plan has no blocks for it."""

    vram: PlaneTier
    dram: PlaneTier | None
    path: TransferPath

    def close(self) -> None:
        """Waits for copies and gives all the memory back. After the fetcher between them is closed. Idempotent."""
        self.path.close()
        for tier in (self.vram, self.dram):
            # Frames of a step that was cut short may still hold a block: the memory then goes when they do.
            with suppress(BufferError, ValueError):
                if tier:
                    tier.close()


def open_tiers(form: ResidentForm, plan: MemoryPlan, settings: RunSettings, device: Device | None) -> Tiers:
    """Takes the memory for a plan's blocks; without a device, all of it in RAM.

    Raises:
        DoesNotFit: the device has not so much, or the system lets no memory be pinned.
        OSError: the memory is not to be had.
    """

    def tier(name: str, blocks: Mapping[str, int], arenas: Arenas, place: str) -> PlaneTier:
        policy = partial(make_policy, settings.eviction)
        return PlaneTier(form, blocks, policy, device=place, name=name, arenas=arenas)

    if device is None:
        vram = tier("vram", plan.vram_blocks, in_ram, "cpu")
        dram = tier("dram", plan.dram_blocks, in_ram, "cpu") if plan.dram_blocks else None
        return Tiers(vram, dram, RamPath(vram, dram, form))
    with taking(device, "experts", plan.minimum_vram_bytes):
        vram = tier("vram", plan.vram_blocks, OnDevice(device), device.name)
    dram = tier("dram", plan.dram_blocks, Pinned(device, "dram"), "cpu") if plan.dram_blocks else None
    staging = Staging(device, form.kinds_at(plan.levels[0]), staging_buffers(settings))
    return Tiers(vram, dram, DevicePath(vram, dram, form, device, staging))
