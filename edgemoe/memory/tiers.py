"""The tiers of a plan, each in its memory, and the transfer path between them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from edgemoe.cache.arena import in_ram
from edgemoe.cache.device_arena import on_device, pinned
from edgemoe.cache.plane_tier import PlaneTier
from edgemoe.cache.policies import make_policy
from edgemoe.machine.device import Device
from edgemoe.machine.out_of_memory import taking
from edgemoe.memory.overhead import staging_buffers
from edgemoe.memory.plan import MemoryPlan
from edgemoe.policy.settings import RunSettings
from edgemoe.prefetch.device_path import DevicePath, Staging
from edgemoe.prefetch.ram_path import RamPath
from edgemoe.prefetch.transfer_path import TransferPath
from edgemoe.storage.base import ResidentForm
from edgemoe.storage.record.forms import WholeForm


@dataclass(frozen=True)
class Tiers:
    """The memory that an engine fetches experts through. `dram` is None where the plan has no blocks for it."""

    vram: PlaneTier
    dram: PlaneTier | None
    path: TransferPath

    def close(self) -> None:
        """Waits for copies and returns all memory. Idempotent; the fetcher must be closed before."""
        self.path.close()
        for tier in (self.vram, self.dram):
            # Frames of an interrupted step may still refer to a block: its memory is then freed with them.
            with suppress(BufferError, ValueError):
                if tier:
                    tier.close()


def form_of(form: ResidentForm, settings: RunSettings) -> ResidentForm:
    """The form of experts in memory under a rule of promotion."""
    return WholeForm(form) if settings.promotion == "whole" else form


def open_tiers(form: ResidentForm, plan: MemoryPlan, settings: RunSettings, device: Device | None) -> Tiers:
    """Allocates a plan's blocks; without a device, both tiers lie in RAM.

    Args:
        form: the form that form_of returned.
        plan: the plan of the limits.
        settings: the settings; their eviction and readers are used.
        device: a device with its own memory; None: RAM.

    Raises:
        DoesNotFit: the device has too little free memory, or the system pins no memory.
        OSError: the system refuses so much memory.
    """
    make_tier = partial(PlaneTier, form, policy=partial(make_policy, settings.eviction))
    make_dram = partial(make_tier, plan.dram_blocks, name="dram", device="cpu")
    if device is None:
        vram = make_tier(plan.first_blocks, name="vram", device="cpu", arenas=in_ram)
        dram = make_dram(arenas=in_ram) if plan.dram_blocks else None
        return Tiers(vram, dram, RamPath(vram, dram, form))
    with taking(device, "experts", plan.minimum_vram_bytes):
        vram = make_tier(plan.vram_blocks, name="vram", device=device.name, arenas=partial(on_device, device))
    dram = make_dram(arenas=partial(pinned, device, "dram")) if plan.dram_blocks else None
    staging = Staging(device, form.kinds_at(plan.levels[0]), staging_buffers(settings))
    return Tiers(vram, dram, DevicePath(vram, dram, form, device, staging))
