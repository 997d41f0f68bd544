"""Divides the limits that a user names for an open store, with the settings that fit them."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Protocol

from edgemoe.console.sizes import format_least, format_most, format_size, parse_size
from edgemoe.errors import DoesNotFit, UserError
from edgemoe.machine import devices, process
from edgemoe.models.options.groups import LimitOptions, Opening

if TYPE_CHECKING:
    from edgemoe.memory.plan import MemoryPlan
    from edgemoe.models.store_model import StoreModel
    from edgemoe.policy.settings import RunSettings

HOT_SEQUENCES, HOT_FRACTION = 8, 0.1
"""With so many sequences at once or more, an automatic policy is hotness, if every expert fits at the lower level
and this fraction of them at the higher one (docs/decisions/0031)."""


class ChooseSettings(Protocol):
    """models.options.run_settings with the options given."""

    def __call__(self, max_level: int, *, fits: bool, hot: bool = False) -> RunSettings:
        """The settings for a store whose highest level is max_level; `fits`: all of its experts fit at that level.

        `hot`: an automatic policy is hotness.
        """


@dataclass(frozen=True)
class Division:
    """Limits for a memory plan to divide, and the sequences that it is for.

    Args:
        vram, dram: limits in bytes, as StoreModel.plan takes them.
        context: tokens of KV of each sequence; None: the model's default.
        parallel: sequences that run at once.
        prefill_rows: most rows of a prompt in one step; None: the plan's choice.
    """

    vram: int | None
    dram: int = 0
    context: int | None = None
    parallel: int = 1
    prefill_rows: int | None = None

    @classmethod
    def of(cls, opening: Opening) -> Division:
        """Reads the sizes that options give.

        Raises:
            UserError: a limit is no size.
        """
        return cls(*parse_limits(opening), opening.context, opening.parallel, opening.prefill_rows)

    def plan(self, store: StoreModel, settings: RunSettings) -> MemoryPlan:
        """The plan of a store with these settings; raises as StoreModel.plan."""
        return store.plan(
            vram_limit=self.vram,
            dram_limit=self.dram,
            settings=settings,
            context=self.context,
            parallel=self.parallel,
            prefill_rows=self.prefill_rows,
        )


def parse_limits(limits: LimitOptions) -> tuple[int | None, int]:
    """Reads --vram-limit and --dram-limit.

    Returns:
        bytes of VRAM, None where no limit is given, and bytes of DRAM, by default 0.

    Logs a warning for a limit that is more than the machine has.

    Raises:
        UserError: one is no size, or there is no such device.
    """
    vram = None if limits.vram_limit is None else parse_size(limits.vram_limit)
    dram = 0 if limits.dram_limit is None else parse_size(limits.dram_limit)
    total = process.total_memory()
    if dram > total:
        _warn_of_ram("--dram-limit", dram, total)
    if vram and vram > total and devices.open_device(limits.device) is None:
        _warn_of_ram("--vram-limit", vram, total)
    return vram, dram


def _warn_of_ram(option: str, limit: int, total: int) -> None:
    """Warns of a limit that is more than the machine's RAM, in bytes."""
    from edgemoe.memory.overhead import suggested_limits

    free = process.available_memory()
    memory = f"{format_size(total)} of RAM that this machine has, of which {format_size(free)} are free"
    _warn_of_machine(option, limit, memory, format_most(suggested_limits(free, None)[0]))


def _warn_of_gpu(limit: int, free: int) -> None:
    """Warns of a limit that is more than the free memory of the GPU, in bytes."""
    from edgemoe.memory.overhead import suggested_limits

    memory = f"{format_size(free)} of GPU memory that are free"
    _warn_of_machine("--vram-limit", limit, memory, format_most(suggested_limits(0, free)[0]))


@cache
def _warn_of_machine(option: str, limit: int, memory: str, suggested: str) -> None:
    """Logs a warning for a limit in bytes that is more than some memory, once a process."""
    logging.getLogger("edgemoe").warning(
        "%s %s is more than the %s: here a model has that at most; give %s %s",
        option,
        format_size(limit),
        memory,
        option,
        suggested,
    )


def plan_levels(
    store: StoreModel, choose: ChooseSettings, division: Division, *, shrink: bool = False
) -> tuple[MemoryPlan, RunSettings]:
    """Divides the limits with one of two settings: for a store whose experts all fit, or for one whose experts do not.

    Args:
        store: an open one.
        choose: run_settings with the options given.
        division: the limits and the sequences.
        shrink: whether limits shrink to the machine's free memory, as in within_memory.

    Raises:
        UserError, DoesNotFit: an option that cannot be met.
    """
    _warn_of_context(store.config.get("max_position_embeddings"), division.context)
    if store.device and division.vram and not shrink and division.vram > store.device.available_bytes():
        _warn_of_gpu(division.vram, store.device.available_bytes())
    level = store.manifest.max_level
    highest, fewer = choose(level, fits=True), choose(level, fits=False)
    plan = division.plan(store, highest)
    if shrink:
        plan = within_memory(store, plan, highest, division.prefill_rows)
    smaller = replace(division, vram=plan.vram_limit_bytes, dram=plan.dram_limit_bytes, context=plan.context)
    settings = highest
    if fewer != highest and plan.experts_resident[str(level)] < store.shape.experts:
        plan, settings = smaller.plan(store, fewer), fewer
    fits = plan.experts_resident[str(settings.levels[0])] >= store.shape.experts
    if division.parallel >= HOT_SEQUENCES and not fits:
        plan, settings = _automatic_hotness(store, choose, smaller) or (plan, settings)
    _require_look_ahead(store, plan, settings)
    if plan.dram_blocks and not store.device:
        _warn_of_two_tiers(plan.limit_bytes(None))
    return plan, settings


def _automatic_hotness(
    store: StoreModel, choose: ChooseSettings, division: Division
) -> tuple[MemoryPlan, RunSettings] | None:
    """The plan and the settings of precision by hotness, where an automatic policy takes it."""
    with suppress(UserError, DoesNotFit):  # other options contradict hotness; a device lacks memory for it
        settings = choose(store.manifest.max_level, fits=False, hot=True)
        plan = division.plan(store, settings)
        if plan.vram_experts == plan.experts and (plan.hot_experts or 0) >= HOT_FRACTION * plan.experts:
            return plan, settings
    return None


def _require_look_ahead(store: StoreModel, plan: MemoryPlan, settings: RunSettings) -> None:
    """Refuses a mode of look-ahead on a device whose second tier has every expert, where layers run in groups.

    A group of layers requests no expert, so that nothing is read ahead. `auto` and `off` are taken everywhere.
    """
    grouped = store.device and settings.in_place == "on" and plan.dram_experts >= plan.experts
    if grouped and settings.speculate not in ("auto", "off"):
        raise UserError(
            f"experts that come from the disk, for --speculate {settings.speculate}",
            "a --dram-limit that has all of them",
            "leave it out",
        )


@cache
def _warn_of_two_tiers(together: int) -> None:
    """Logs, once a process, that a second tier in the same RAM costs copies of experts from one to the other."""
    logging.getLogger("edgemoe").warning(
        "without a GPU --dram-limit is RAM as --vram-limit is, and experts are copied between the two: "
        "--vram-limit %s alone takes the same memory and is faster",
        format_least(together),
    )


@cache
def _warn_of_context(trained: int | None, context: int | None) -> None:
    """Logs a warning for more tokens than the model has been trained on, once a process."""
    if context and trained and context > trained:
        logging.getLogger("edgemoe").warning(
            "--context %d is more than the %d tokens that the model was trained on: expect worse answers beyond them",
            context,
            trained,
        )


def within_memory(
    store: StoreModel, plan: MemoryPlan, settings: RunSettings, prefill_rows: int | None = None
) -> MemoryPlan:
    """Shrinks a plan that needs more memory than the machine has free, with a warning; otherwise returns it.

    `prefill_rows` is what the plan was made with.

    Raises:
        DoesNotFit: the smallest limit that works exceeds the free memory too.
    """
    from edgemoe.memory.overhead import PROCESS_BYTES

    free = process.available_memory() - max(PROCESS_BYTES - process.resident_bytes(), 0)
    planned = plan.vram_limit_bytes, plan.dram_limit_bytes
    if store.device:
        limits = (
            min(planned[0], store.device.available_bytes()),
            min(planned[1], max(free - plan.staging_bytes, 0)),
        )
    else:
        limits = planned[0] - max(plan.used_bytes(store.form) - free, 0), planned[1]
    if limits == planned:
        return plan
    for option, size, possible in zip(("--vram-limit", "--dram-limit"), planned, limits, strict=True):
        if possible < size:
            _warn_of_free_memory(option, size, possible)
    return store.plan(
        vram_limit=limits[0],
        dram_limit=limits[1],
        settings=settings,
        context=plan.context,
        parallel=plan.parallel,
        prefill_rows=prefill_rows,
    )


def _warn_of_free_memory(option: str, limit: int, possible: int) -> None:
    """Logs a warning for a limit that becomes smaller, as the free memory allows fewer bytes."""
    logging.getLogger("edgemoe").warning(
        "%s %s is more than the free memory allows, %s: fewer experts stay in memory, and more of them is read for "
        "each token; end other programs, or give %s %s",
        option,
        *map(format_size, (limit, possible)),
        option,
        format_most(possible),
    )
