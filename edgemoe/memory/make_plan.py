"""Divides the memory limits between purposes, or refuses them with the smallest sufficient limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from edgemoe.console.sizes import format_least, format_size
from edgemoe.errors import DoesNotFit
from edgemoe.kv.blocks import BLOCK_ROWS, whole_blocks
from edgemoe.machine.process import available_memory
from edgemoe.memory.block_counts import count_blocks
from edgemoe.memory.compensator_bytes import NO_COMPENSATORS, CompensatorBytes
from edgemoe.memory.limits import Limits
from edgemoe.memory.model_shape import PlannedModel
from edgemoe.memory.overhead import PROCESS_BYTES, overhead_bytes, staging_buffers
from edgemoe.memory.plan import MemoryPlan
from edgemoe.memory.split import MINIMUM_EXPERTS, BlockSplit, least_bytes, most_hot
from edgemoe.memory.workspace import (
    default_prefill_rows,
    device_step_bytes,
    long_step_bytes,
    scored_rows,
    workspace_bytes,
)
from edgemoe.policy.damage import Damage
from edgemoe.policy.settings import RunSettings


def make_plan(
    model: PlannedModel,
    limits: Limits,
    settings: RunSettings,
    *,
    compensators: CompensatorBytes = NO_COMPENSATORS,
    damage: Damage | None = None,
) -> MemoryPlan:
    """Divides the limits.

    Args:
        model: the model to plan for.
        limits: the limits to divide.
        settings: the settings; their levels, eviction, readers and cache determine the plan.
        compensators: the compensators that settings use.
        damage: the damage of the model's experts; None: it is not known yet.

    Raises:
        DoesNotFit: a limit is too small; `minimum` is the smallest sufficient one.
    """
    needs = _Needs(model, limits, settings, compensators)
    vram_limit = needs.vram_limit()
    free = vram_limit - needs.taken
    resident = min(compensators.budget(free, needs.whole), free - needs.least_experts)
    blocks = _blocks(needs, damage, free - resident)
    return MemoryPlan(
        vram_limit_bytes=vram_limit,
        plane_bytes=free - resident,
        experts_resident=_experts_resident(model, free - resident),
        hot_experts=blocks.hot,
        vram_blocks=blocks.vram,
        first_blocks=blocks.first,
        dram_blocks=blocks.dram,
        compensators_bytes=compensators.fixed + resident,
        compensators_resident_bytes=resident,
        compensators_total_bytes=compensators.total,
        **needs.fields(),
    )


@dataclass(frozen=True)
class _Needs:
    """A model's need of the limits, apart from the number of experts in them; arguments as for make_plan."""

    model: PlannedModel
    limits: Limits
    settings: RunSettings
    compensators: CompensatorBytes

    @cached_property
    def expert(self) -> int:
        """Bytes of an expert at the highest level."""
        return self.model.form.bytes_at(self.settings.levels[0])

    @cached_property
    def least_experts(self) -> int:
        """Fewest bytes of experts."""
        model = self.model
        return least_bytes(model.shape, model.form, self.settings, device=model.device is not None)

    @property
    def whole(self) -> int:
        """Bytes of all experts at the highest level."""
        return self.model.bytes_of_all(self.settings.levels[0])

    @cached_property
    def rows(self) -> int:
        """Most rows of a prompt in one step."""
        given = self.limits.prefill_rows
        return (
            default_prefill_rows(self.model, self.limits.prompt_rows, self.whole) if given is None else given
        )

    @cached_property
    def fixed(self) -> dict[str, int]:
        """Field of MemoryPlan -> bytes in the fastest memory, for each purpose but experts and compensators."""
        model, limits = self.model, self.limits
        rows = min(self.rows, limits.tokens)
        # A device keeps the bytes of a long step: its blocks of experts do not come and go.
        stays = device_step_bytes(model.shape, rows) if model.device else 0
        return {
            "driver_bytes": model.device.driver_bytes() if model.device else 0,
            "dense_bytes": model.shape.dense_bytes,
            "vision_bytes": model.shape.vision.bytes_for(limits.tokens) if model.shape.vision else 0,
            "kv_bytes": limits.parallel * model.shape.kv.bytes_for(limits.context),
            "workspace_bytes": workspace_bytes(model, limits, self.settings.most_drafts)
            + overhead_bytes(model)
            + stays,
            "long_step_bytes": 0 if model.device else long_step_bytes(model.shape, rows),
        }

    @cached_property
    def first_kv(self) -> int:
        """Bytes of KV that no block of experts ever takes."""
        kv, limits = self.model.shape.kv, self.limits
        if self.model.device:
            return limits.parallel * kv.bytes_for(limits.context)
        return limits.parallel * kv.bytes_in_pages(whole_blocks(1, limits.context), limits.context)

    @cached_property
    def taken(self) -> int:
        """Bytes of the first limit that neither experts nor compensators have."""
        return sum(self.fixed.values()) + self.compensators.fixed

    @property
    def minimum(self) -> int:
        """The smallest sufficient limit, bytes."""
        return self.taken + self.compensators.least + self.least_experts

    def vram_limit(self) -> int:
        """The first limit, bytes.

        Raises:
            DoesNotFit: a limit is too small.
        """
        limit, level = self.limits.vram, self.settings.levels[0]
        if limit is None:
            most = self.taken + self.compensators.most + self.whole
            limit = min(most, _free_bytes(self.model, self.limits))
        if limit < self.minimum:
            least = self.fixed | {"compensators": self.compensators.fixed + self.compensators.least}
            purposes = _purposes(least, self._least_text, self.limits)
            raise _too_small("--vram-limit", limit, self.minimum, purposes, *_ways_to_fit(self, limit))
        if 0 < self.limits.dram < self.expert:
            purpose = f"one expert at level {level}"
            raise _too_small("--dram-limit", self.limits.dram, self.expert, purpose, "leave it out")
        return limit

    @property
    def _least_text(self) -> str:
        """The experts of the smallest limit, for a message."""
        level = self.settings.levels[0]
        if self.least_experts == MINIMUM_EXPERTS * self.expert:
            return f"{MINIMUM_EXPERTS} experts of {format_size(self.expert)} at level {level}"
        experts, low = self.model.shape.experts, self.settings.levels[-1]
        held = f"all {experts} experts at level {low} and one per layer at level {level}"
        return f"{held} {format_size(self.least_experts)}"

    def fields(self) -> dict[str, Any]:
        """The fields of MemoryPlan that do not depend on how many experts the limits hold."""
        limits, long_step = self.limits, self.fixed["long_step_bytes"]
        return self.fixed | {
            "dram_limit_bytes": limits.dram,
            "minimum_vram_bytes": self.minimum,
            "staging_bytes": staging_buffers(self.settings) * self.expert if self.model.device else 0,
            "first_kv_bytes": self.first_kv,
            "levels": self.settings.levels,
            "context": limits.context,
            "parallel": limits.parallel,
            "experts": self.model.shape.experts,
            "experts_bytes": self.whole,
            "kv_cache": str(self.model.shape.kv.format),
            "prefill_rows": self.rows,
            "drafts": self.settings.most_drafts,
            "scored_rows": scored_rows(self.model, limits, long_step),
        }


class _Blocks(NamedTuple):
    """Block kind's name -> blocks, as in MemoryPlan: vram_blocks, first_blocks and dram_blocks; and hot_experts."""

    vram: dict[str, int]
    first: dict[str, int]
    dram: dict[str, int]
    hot: int | None


def _blocks(needs: _Needs, damage: Damage | None, planes: int) -> _Blocks:
    """Divides the bytes of experts into blocks.

    Args:
        needs: the other parts of the model that the limits hold.
        damage: the loss of quality from fewer bits of the model's experts; None: it is not known yet.
        planes: bytes that experts have in the first tier next to the whole KV and a long step.
    """
    model, settings, dram_limit = needs.model, needs.settings, needs.limits.dram
    split, hot = BlockSplit.of(model.shape, model.form, settings, damage), None
    vram = split.blocks(planes)
    # Until sequences grow experts have the rest of the KV's bytes, and the bytes of a long step while none runs. Hot
    # sets keep their blocks in a long step: without the lower level's blocks tokens would wait for the disk.
    lent = needs.fixed["kv_bytes"] - needs.first_kv
    first = split.blocks(planes + lent + (0 if settings.hotness else needs.fixed["long_step_bytes"]))
    # Tiers in RAM are exclusive.
    left = model.shape.experts - (0 if model.device else max(vram.values()))
    dram = count_blocks(dram_limit, split.fractions, left, 1) if dram_limit and left else {}
    if settings.hotness:
        hot = min(*first.values(), most_hot(settings.hotness, model.shape))
    return _Blocks(vram, first, dram, hot)


def _experts_resident(model: PlannedModel, planes: int) -> dict[str, int]:
    """Level -> experts that fit into so many bytes, all of them at that level or at their layer's highest one."""
    levels, experts = (bits for bits in (8, 4, 2) if bits <= model.geometry.max_level), model.shape.experts
    return {str(bits): min(planes * experts // model.bytes_of_all(bits), experts) for bits in levels}


def _free_bytes(model: PlannedModel, limits: Limits) -> int:
    """Free bytes of the memory that the first tier lies in."""
    if model.device:
        return model.device.available_bytes()
    return available_memory() - limits.dram - PROCESS_BYTES


def _purposes(least: dict[str, int], experts: str, limits: Limits) -> str:
    """The uses of the smallest limit, for a message.

    Args:
        least: field of MemoryPlan -> bytes, without experts.
        experts: the experts of the limit, as text.
        limits: the limits of the plan.
    """
    names = {"long_step_bytes": "a long prompt"}
    parts = [
        f"{names.get(name, name.removesuffix('_bytes'))} {format_size(size)}"
        for name, size in least.items()
        if size
    ]
    parts.append(experts)
    several = f" of {limits.parallel} sequences" if limits.parallel > 1 else ""
    return f"{', '.join(parts)}, {limits.context} tokens of context{several}"


CONTEXT_STEP = 64
"""A message names a context that fits in a multiple of so many tokens."""


def _ways_to_fit(needs: _Needs, limit: int) -> list[str]:
    """Options each of which alone makes a limit in bytes sufficient: a shorter context, fewer sequences, fewer rows."""
    limits = needs.limits

    def suffices(**changes: int) -> bool:
        return replace(needs, limits=replace(limits, **changes)).minimum <= limit

    context = CONTEXT_STEP * _largest(
        lambda n: suffices(context=n * CONTEXT_STEP), limits.context // CONTEXT_STEP
    )
    parallel = _largest(lambda n: suffices(parallel=n), limits.parallel - 1)
    rows = needs.rows > BLOCK_ROWS and suffices(prefill_rows=BLOCK_ROWS)
    ways = {"--context": context, "--parallel": parallel, "--prefill-rows": BLOCK_ROWS if rows else 0}
    return [f"{option} {value}" for option, value in ways.items() if value]


def _largest(fits: Callable[[int], bool], end: int) -> int:
    """The largest number up to `end` that fits, where smaller numbers fit too; 0: not even 1."""
    low, high = 0, end
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _too_small(option: str, limit: int, minimum: int, purposes: str, *ways: str) -> DoesNotFit:
    least = format_least(minimum)
    return DoesNotFit(
        f"{option} {least} or more ({purposes})",
        format_size(max(limit, 0)),
        " or ".join((f"use {option} {least}", *ways)),
        minimum=minimum,
    )
