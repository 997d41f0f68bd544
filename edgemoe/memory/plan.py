"""How the memory limits are divided between purposes, decided before anything is loaded."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import torch

from edgemoe.console.sizes import format_least, format_size
from edgemoe.errors import DoesNotFit, UserError
from edgemoe.kv.blocks import BLOCK_ROWS, whole_blocks
from edgemoe.machine.device import Device
from edgemoe.machine.process import available_memory
from edgemoe.memory.block_counts import count_blocks
from edgemoe.memory.compensator_bytes import NO_COMPENSATORS, CompensatorBytes
from edgemoe.memory.model_shape import ModelShape
from edgemoe.memory.split import MINIMUM_EXPERTS, BlockSplit, most_hot
from edgemoe.memory.workspace import default_prefill_rows, long_step_bytes, scored_rows, workspace_bytes
from edgemoe.policy.damage import Damage
from edgemoe.policy.settings import RunSettings, format_levels
from edgemoe.storage.base import ResidentForm
from edgemoe.storage.record.forms import P4
from edgemoe.storage.record.offsets import RecordGeometry

ROUNDING_BYTES = 1 << 26
"""Most bytes that a device's allocator loses to rounding and fragmentation."""

EXPERT_BYTES = 2048
"""Most bytes that the interpreter takes for an expert that is in memory or was: its key, version, blocks, scores and
table, 1,200 by tracemalloc; and what allocators round up. In RAM they count against the limit."""

PROCESS_BYTES = 500_000_000
"""Most bytes that the interpreter, torch and transformers take, outside every limit."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per purpose. Driver, dense, KV, workspace, long step, compensators and planes add up to the VRAM limit.

    In RAM the KV grows with the sequences, and a long prompt's step has its memory only while it runs: experts begin
    with what these do not take (`first_blocks`), and have `plane_bytes` beside the whole of both.
    """

    vram_limit_bytes: int
    dram_limit_bytes: int
    dense_bytes: int
    kv_bytes: int
    workspace_bytes: int
    staging_bytes: int
    """RAM outside both limits: pinned buffers between disk and a device."""
    plane_bytes: int
    experts_resident: dict[str, int]
    """level -> experts that fit into plane_bytes, all of them at that level."""
    minimum_vram_bytes: int
    levels: tuple[int, ...]
    context: int
    vram_blocks: dict[str, int]
    """Block kind's name -> blocks in the VRAM tier."""
    dram_blocks: dict[str, int]
    experts: int = 0
    """Of the model."""
    driver_bytes: int = 0
    """Bytes of a device that its driver takes for the process."""
    compensators_bytes: int = 0
    """Low-rank compensators in memory, what the process has for each, and what products with them take."""
    compensators_resident_bytes: int = 0
    """Of these, most bytes of compensators in memory; the others are read when a step wants them."""
    compensators_total_bytes: int = 0
    """Bytes of all compensators."""
    parallel: int = 1
    """Sequences that run at once, each with a KV for `context` tokens."""
    hot_experts: int | None = None
    """Experts that may have the higher level at once, where precision follows hotness."""
    scored_rows: int = 1
    """Rows of one step whose logits the workspace holds, with the bytes of a long step, all of them."""
    kv_cache: str = "bf16"
    """The format of keys and values."""
    prefill_rows: int = BLOCK_ROWS
    """Most token rows of a prompt in one step: a longer prompt reads experts again for each step."""
    long_step_bytes: int = 0
    """What the rows of a prompt's step beyond one block take while it runs."""
    first_kv_bytes: int = 0
    """KV that is set aside from the start: all of it on a device, else the first block of each sequence."""
    first_blocks: dict[str, int] = field(default_factory=dict)
    """Block kind's name -> blocks of the VRAM tier beside so much KV; `vram_blocks`: beside all KV and a long step."""

    @property
    def vram_experts(self) -> int:
        """Most experts in the VRAM tier, at any level, beside the whole KV and a long step."""
        return max(self.vram_blocks.values())

    @property
    def first_experts(self) -> int:
        """Most experts in the VRAM tier, at any level, as long as sequences are short."""
        return max(self.first_blocks.values())

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the model under the limit that are not experts', with the whole KV and a long step."""
        return self.dense_bytes + self.kv_bytes + self.workspace_bytes + self.long_step_bytes

    @property
    def grows(self) -> bool:
        """Whether experts have bytes that the KV has not come to yet, or that a long step takes."""
        return self.first_kv_bytes < self.kv_bytes + self.long_step_bytes

    @property
    def dram_experts(self) -> int:
        """Most experts in the DRAM tier, at any level."""
        return max(self.dram_blocks.values(), default=0)

    def limit_bytes(self, device: Device | None) -> int:
        """Bytes that the model may take of a device's memory; of RAM, where both tiers lie, those of both limits."""
        return self.vram_limit_bytes + (0 if device else self.dram_limit_bytes)

    def used_bytes(self, form: ResidentForm) -> int:
        """RAM that the plan takes where there is no device, bytes; at most the sum of both limits."""

        def size(blocks: dict[str, int]) -> int:
            return sum(kind.size * blocks.get(kind.name, 0) for kind in form.kinds)

        at_first, at_last = (
            self.first_kv_bytes + size(self.first_blocks),
            self.kv_bytes + self.long_step_bytes + size(self.vram_blocks),
        )
        others = self.dense_bytes + self.workspace_bytes + self.compensators_bytes + size(self.dram_blocks)
        return others + max(at_first, at_last)

    def _resident(self) -> str:
        """How many experts at which levels, for `lines`."""
        high, low, most = self.levels[0], self.levels[-1], self.first_experts
        if self.hot_experts is None:
            beside = "the whole KV" + (" and a long prompt" if self.long_step_bytes else "")
            fewer = f", {self.vram_experts} beside {beside}" if self.vram_experts < most else ""
            return f"{most} experts resident at {format_levels(self.levels)} bits{fewer}"
        every = f"all {most}" if most == self.experts else f"{most} of {self.experts}"
        rest = "" if most == self.experts else "; the others are read when a token wants them"
        return f"{every} experts resident at {low} bits, {self.hot_experts} hot ones at {high}{rest}"

    def as_json(self) -> dict[str, object]:
        """The plan as one JSON object."""
        return asdict(self)

    def lines(self) -> tuple[str, str]:
        """The plan as two lines of text."""
        driver = f"driver {format_size(self.driver_bytes)}, " if self.driver_bytes else ""
        # On a device an expert may be in both tiers; tiers in RAM are exclusive.
        others = "" if self.driver_bytes else "more "
        dram = f", {self.dram_experts} {others}in DRAM" if self.dram_experts else ""
        staging = f", {format_size(self.staging_bytes)} of RAM for staging" if self.staging_bytes else ""
        merged = 2 in self.levels and P4 in self.vram_blocks
        sequences = f"{self.parallel} times " if self.parallel > 1 else ""
        kv_cache = "" if self.kv_cache == "bf16" else f" in {self.kv_cache}"
        factors = f"compensators {format_size(self.compensators_bytes)}, " if self.compensators_bytes else ""
        if self.compensators_resident_bytes < self.compensators_total_bytes:
            resident, total = self.compensators_resident_bytes, self.compensators_total_bytes
            factors = (
                f"{factors[:-2]} ({format_size(resident)} of {format_size(total)}, the others streamed), "
            )
        experts = self.plane_bytes + self.long_step_bytes + self.kv_bytes - self.first_kv_bytes
        kv, first = f"KV {format_size(self.kv_bytes)}", format_size(self.first_kv_bytes)
        if self.first_kv_bytes < self.kv_bytes:
            kv = f"KV {first}, growing to {format_size(self.kv_bytes)}"
        more = f" (a long prompt {format_size(self.long_step_bytes)} more)" if self.long_step_bytes else ""
        return (
            f"limit {format_size(self.vram_limit_bytes)}: {driver}dense {format_size(self.dense_bytes)}, "
            f"{kv} for {sequences}{self.context} tokens{kv_cache}, "
            f"workspace {format_size(self.workspace_bytes)}{more}, {factors}experts {format_size(experts)}",
            f"{self._resident()}{dram}{staging}"
            + ("; with this kernel level 2 saves reads, not memory" if merged else ""),
        )


def make_plan(
    shape: ModelShape,
    geometry: RecordGeometry,
    form: ResidentForm,
    *,
    vram_limit: int | None,
    dram_limit: int,
    settings: RunSettings,
    context: int,
    device: Device | None = None,
    parallel: int = 1,
    compensators: CompensatorBytes = NO_COMPENSATORS,
    damage: Damage | None = None,
    prefill_rows: int | None = None,
) -> MemoryPlan:
    """Divides the limits.

    Args:
        shape: of the model.
        geometry: of the store.
        form: of experts in this device's memory.
        vram_limit: bytes; None: as many as all experts at the highest level take, at most the free memory.
        dram_limit: bytes of the DRAM tier; 0: no DRAM tier.
        settings: their levels, eviction, readers and cache determine the plan.
        context: tokens of KV of each sequence.
        device: whose memory `vram_limit` limits; None: RAM.
        parallel: sequences that run at once.
        compensators: that settings use.
        damage: of the model's experts; None: it is not known yet.
        prefill_rows: most rows of a prompt in one step; None: workspace.default_prefill_rows.

    Raises:
        UserError: prefill_rows for a device, or below 2.
        DoesNotFit: a limit is too small; `minimum` is the smallest sufficient one.
    """
    level = settings.levels[0]
    each = form.bytes_at(level)
    rows = _prefill_rows(shape, each * shape.experts, context, prefill_rows, device)
    fixed = _fixed_bytes(shape, geometry, context, parallel, device, rows)
    whole, taken = shape.experts * each, sum(fixed.values()) + compensators.fixed
    minimum = taken + compensators.least + MINIMUM_EXPERTS * each
    if vram_limit is None:
        free = device.available_bytes() if device else available_memory() - dram_limit - PROCESS_BYTES
        vram_limit = min(taken + compensators.most + whole, free)
    if vram_limit < minimum:
        least = fixed | {"compensators": compensators.fixed + compensators.least}
        purposes, less = _purposes(least, f"{format_size(each)} at level {level}", context, parallel, rows)
        raise _too_small("--vram-limit", vram_limit, minimum, purposes, less)
    if 0 < dram_limit < each:
        raise _too_small("--dram-limit", dram_limit, each, f"one expert at level {level}", "leave it out")
    free = vram_limit - taken
    resident = min(compensators.budget(free, whole), free - MINIMUM_EXPERTS * each)
    planes = free - resident
    split = BlockSplit.of(shape, form, settings, damage)
    first_kv, vram_blocks = _first_kv_bytes(shape, context, parallel, device), split.blocks(planes)
    # Hot sets keep their blocks in a long step: without those of the lower level tokens would wait for the disk.
    lent = 0 if settings.hotness else fixed["long_step_bytes"]
    first_blocks = split.blocks(planes + lent + fixed["kv_bytes"] - first_kv)
    # Tiers in RAM are exclusive.
    left = shape.experts - (0 if device else max(vram_blocks.values()))
    dram_blocks = count_blocks(dram_limit, split.fractions, left, 1) if dram_limit and left else {}
    return MemoryPlan(
        vram_limit_bytes=vram_limit,
        dram_limit_bytes=dram_limit,
        **fixed,
        staging_bytes=staging_buffers(settings) * each if device else 0,
        plane_bytes=planes,
        experts_resident={
            str(bits): min(planes // form.bytes_at(bits), shape.experts)
            for bits in (8, 4, 2)
            if bits <= geometry.max_level
        },
        minimum_vram_bytes=minimum,
        levels=settings.levels,
        context=context,
        vram_blocks=vram_blocks,
        dram_blocks=dram_blocks,
        experts=shape.experts,
        hot_experts=(
            min(*first_blocks.values(), most_hot(settings.hotness, shape)) if settings.hotness else None
        ),
        parallel=parallel,
        kv_cache=str(shape.kv.format),
        compensators_bytes=compensators.fixed + resident,
        compensators_resident_bytes=resident,
        compensators_total_bytes=compensators.total,
        first_kv_bytes=first_kv,
        first_blocks=first_blocks,
        scored_rows=scored_rows(shape, geometry, context, _place(device), parallel, fixed["long_step_bytes"]),
        prefill_rows=rows,
    )


def _purposes(least: dict[str, int], each: str, context: int, parallel: int, rows: int) -> tuple[str, str]:
    """What the smallest limit is needed for, and what would make it smaller, for a message.

    Args:
        least: field of MemoryPlan -> bytes, without experts.
        each: bytes and level of an expert, as text.
        context, parallel: as for make_plan.
        rows: most of a prompt's step.
    """
    names = {"long_step_bytes": "a long prompt"}
    parts = [
        f"{names.get(name, name.removesuffix('_bytes'))} {format_size(size)}"
        for name, size in least.items()
        if size
    ]
    parts.append(f"{MINIMUM_EXPERTS} experts of {each}")
    purposes, less = f"{', '.join(parts)}, {context} tokens of context", "choose a smaller --context"
    if rows > BLOCK_ROWS:
        less = f"{less}, or --prefill-rows {BLOCK_ROWS}"
    if parallel > 1:
        purposes, less = f"{purposes} of {parallel} sequences", f"{less} or fewer sequences"
    return purposes, less


def _place(device: Device | None) -> torch.device:
    return device.place if device else torch.device("cpu")


def _prefill_rows(
    shape: ModelShape, experts_bytes: int, context: int, given: int | None, device: Device | None
) -> int:
    """Most rows of a prompt in one step.

    Raises:
        UserError: as make_plan.
    """
    if given is None:
        return default_prefill_rows(shape, experts_bytes, context, _place(device))
    if device:
        found = f"--device {device.name}, where a step has {BLOCK_ROWS}"
        raise UserError("a model on the CPU, for --prefill-rows", found, "leave it out")
    if given < 2:
        raise UserError("2 or more rows for --prefill-rows", f"{given}", f"choose a multiple of {BLOCK_ROWS}")
    return given


def _too_small(option: str, limit: int, minimum: int, purposes: str, otherwise: str) -> DoesNotFit:
    least = format_least(minimum)
    wanted = f"{option} {least} or more ({purposes})"
    return DoesNotFit(
        wanted, format_size(max(limit, 0)), f"use {option} {least} or {otherwise}", minimum=minimum
    )


def _fixed_bytes(
    shape: ModelShape,
    geometry: RecordGeometry,
    context: int,
    parallel: int,
    device: Device | None,
    prefill_rows: int,
) -> dict[str, int]:
    """Field of MemoryPlan -> bytes, for each purpose but experts on the fastest memory."""
    workspace = workspace_bytes(shape, geometry, context, _place(device), parallel)
    return {
        "driver_bytes": device.driver_bytes() if device else 0,
        "dense_bytes": shape.dense_bytes,
        "kv_bytes": parallel * shape.kv.bytes_for(context),
        "workspace_bytes": workspace + _overhead_bytes(shape, device),
        "long_step_bytes": long_step_bytes(shape, min(prefill_rows, parallel * context)),
    }


def _first_kv_bytes(shape: ModelShape, context: int, parallel: int, device: Device | None) -> int:
    """KV that no block of experts ever takes."""
    if device:
        return parallel * shape.kv.bytes_for(context)
    return parallel * shape.kv.bytes_in_pages(whole_blocks(1, context), context)


def _overhead_bytes(shape: ModelShape, device: Device | None) -> int:
    """What allocators and the interpreter take beside the tensors of a step."""
    return ROUNDING_BYTES if device else EXPERT_BYTES * shape.experts


def staging_buffers(settings: RunSettings) -> int:
    """Pinned buffers of one expert each: every reader fills one while another is copied to the device."""
    return 2 * settings.readers
