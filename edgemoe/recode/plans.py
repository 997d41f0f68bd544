"""Memory plans of runs that sample, code or measure: in free memory, the model next to what the run itself takes."""

from __future__ import annotations

from edgemoe.console.sizes import format_size
from edgemoe.console.width import say
from edgemoe.errors import DoesNotFit
from edgemoe.machine import process
from edgemoe.memory.overhead import EXPERT_BYTES, PROCESS_BYTES
from edgemoe.memory.plan import MemoryPlan
from edgemoe.models.store_model import StoreModel
from edgemoe.policy.settings import RunSettings
from edgemoe.recode.request import WINDOW, RecodeRequest

_ANY = 1 << 62
"""A limit that holds every expert."""

LOGIT_BYTES = 36
"""Most bytes per logit of a window that is compared: float32 of its steps and of the window, log probabilities of the
model and of the reference, and the operands of their difference."""


def logit_bytes(store: StoreModel) -> int:
    """Most bytes that logits of a window take while they are compared."""
    return WINDOW * store.shape.vocab * LOGIT_BYTES


def plan_for_run(
    store: StoreModel, request: RecodeRequest, settings: RunSettings, others: int, purpose: str
) -> MemoryPlan:
    """Divides the run's limits, or on a CPU without a limit what is free next to other memory; prints both on stderr.

    Args:
        store: the store.
        request: the limits.
        settings: levels of the experts.
        others: bytes of memory that the run takes outside of the plan.
        purpose: the use of this memory, for people.

    Raises:
        DoesNotFit: the limits, or the free memory, are too small.
    """

    def plan(limit: int | None) -> MemoryPlan:
        return store.plan(vram_limit=limit, dram_limit=request.dram_limit, settings=settings, context=WINDOW)

    limit = request.vram_limit
    if limit is None and not store.device:
        whole = plan(_ANY)
        free = _free_memory()
        least = whole.minimum_vram_bytes + others
        if free < least:
            wanted = f"{format_size(least)} of free memory, {format_size(others)} of it for {purpose}"
            found = format_size(max(free, 0))
            raise DoesNotFit(wanted, found, "end other programs, or give a cgroup more memory", minimum=least)
        limit = min(whole.used_bytes(store.form) + EXPERT_BYTES * store.shape.experts, free - others)
    made = plan(limit)
    size = made.vram_limit_bytes if store.device else made.used_bytes(store.form)
    say(f"memory: at most {format_size(size)} for the model, {format_size(others)} for {purpose}")
    return made


def coding_room(largest: int, limit: int) -> int:
    """Bytes that matrices may take while they are coded: the free memory, up to a limit.

    Args:
        largest: bytes that the largest matrix takes, which is always allowed.
        limit: bytes.

    Raises:
        DoesNotFit: less is free than the largest matrix takes.
    """
    free = max(process.available_memory(), 0)
    _require(free, largest, "the largest matrix that is coded")
    return max(largest, min(free, limit))


def require_room(least: int) -> None:
    """Refuses to begin where a layer of experts cannot be coded next to what the process still takes.

    Args:
        least: bytes that the layer and one expert take.

    Raises:
        DoesNotFit: less is free.
    """
    _require(max(_free_memory(), 0), least, "a layer of experts that is coded")


def _free_memory() -> int:
    """Bytes that are free next to what the process itself still takes; negative where less is free."""
    return process.available_memory() - max(PROCESS_BYTES - process.resident_bytes(), 0)


def _require(free: int, least: int, purpose: str) -> None:
    if free < least:
        wanted = f"{format_size(least)} of free memory, for {purpose}"
        action = "end other programs, or give a cgroup more memory"
        raise DoesNotFit(wanted, format_size(free), action, minimum=least)
