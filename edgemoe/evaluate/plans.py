"""Memory plans of an evaluation: one for all settings that rank experts, and one for each that follows hotness."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from edgemoe.console.sizes import format_size
from edgemoe.engine.engine import StoreModel
from edgemoe.errors import DoesNotFit, UserError
from edgemoe.evaluate.arm import STORED, TABLE, Arm
from edgemoe.evaluate.compensation.making import planned_bytes
from edgemoe.evaluate.lynx.arms import parts_of
from edgemoe.evaluate.request import EvalRequest
from edgemoe.evaluate.score import Windows
from edgemoe.kv.blocks import BLOCK_ROWS
from edgemoe.machine.process import available_memory
from edgemoe.memory.plan import MemoryPlan
from edgemoe.policy.settings import RunSettings

_WINDOW_LOGIT_BYTES = 2 + 4 + 4 + 2 + 2
"""Bytes per logit of a long window: bf16, float32, log probabilities; the reference's as kept and as read."""

TASK_CONTEXT = 1024
"""Tokens of context for a task: more than three turns fill."""


def eval_plans(store: StoreModel, request: EvalRequest) -> list[tuple[MemoryPlan, list[Arm]]]:
    """Divides the limits for the longest window or task; arms with a cache have plans of their own (lynx.cached).

    Settings that rank experts share one plan, at the highest level of any, which fits them all. Precision by hotness
    has the plan that `edgemoe plan` shows for it, and so the same hot experts.

    Returns:
        plans, each with the arms that are measured under it.

    Raises:
        UserError: no arm that the store can run; a window that is longer than the model's context, or than a block on a
            device or with a limit; a study of whole windows in several steps.
        DoesNotFit: the limits, or the memory for the logits of a longer window, are too small.
    """
    arms = [arm for arm in possible_arms(request.arms, store)[0] if not arm.cache]
    _require_whole_windows(request)
    if request.window > BLOCK_ROWS:
        _require_long_window(store, request)
    ranked = [arm for arm in arms if not arm.settings.hotness]
    plans = []
    if ranked or request.observed:
        highest = max(arm.settings.levels[0] for arm in ranked or arms)
        plans.append((_plan(store, request, RunSettings.uniform(highest), ranked), ranked))
    plans += [(_plan(store, request, arm.settings, [arm]), [arm]) for arm in arms if arm.settings.hotness]
    return plans


def _plan(store: StoreModel, request: EvalRequest, settings: RunSettings, arms: Sequence[Arm]) -> MemoryPlan:
    context = request.window
    if request.task_count:
        context = max(context, min(TASK_CONTEXT, store.default_context()))
    return store.plan(
        vram_limit=request.vram_limit,
        dram_limit=request.dram_limit,
        settings=replace(settings, compensation=None),
        context=context,
        parallel=max((arm.batch for arm in arms), default=1),
        compensators=planned_bytes(store, arms),
        prefill_rows=request.prefill_rows or (request.window if request.window > BLOCK_ROWS else None),
    )


def _require_long_window(store: StoreModel, request: EvalRequest) -> None:
    """Refuses a window longer than a block where its logits, or the model, have no room for it.

    Raises:
        UserError, DoesNotFit: as eval_plans.
    """
    window = request.window
    blocks = request.vram_limit is not None or store.device is not None
    most = BLOCK_ROWS if blocks else store.default_context()
    if window > most:
        why = "on a device or with --vram-limit" if blocks else "the context that this model runs with"
        raise UserError(f"--window of at most {most} tokens, {why}", str(window), f"give --window {most}")
    weights = store.shape.dense_bytes + store.expert_bytes
    needed, free = weights + window * store.shape.vocab * _WINDOW_LOGIT_BYTES, available_memory()
    if needed > free:
        wanted = f"{format_size(needed)} of memory, for all experts and the logits of --window {window}"
        raise DoesNotFit(wanted, format_size(free), f"give --window {BLOCK_ROWS}", minimum=needed)


def _require_whole_windows(request: EvalRequest) -> None:
    """Refuses to observe windows that take several steps, each of which ranks tokens of its own.

    Raises:
        UserError: as eval_plans.
    """
    rows = request.prefill_rows
    if request.observed and rows is not None and rows < request.window:
        study = f"--study {request.observed[0]}"
        raise UserError(f"windows of one step for {study}", f"--prefill-rows {rows}", "leave it out")


def possible_arms(arms: tuple[Arm, ...], store: StoreModel) -> tuple[list[Arm], list[str]]:
    """Returns the arms that a store can run, and the names of arms that need more bits, which are logged.

    Ranks that its tokens do not have are left out, and parts of the depth without a layer.
    """
    max_level, ranks, found = store.manifest.max_level, store.shape.top_k, store.manifest.compensators
    kept = [arm for arm in arms if arm.settings.levels[0] <= max_level]
    left_out = list(dict.fromkeys(arm.settings.name for arm in arms if arm not in kept))
    kept = [arm for arm in kept if arm.ranks_needed <= ranks or arm.compensators == STORED]
    parts = {None, *parts_of(len(store.manifest.layers))}
    kept = [arm for arm in kept if not arm.variation or arm.variation.part in parts]
    if found:  # levels without the compensators' own have a row without compensators
        kept = [arm for arm in kept if arm.compensators != STORED or found.base_level in arm.settings.levels]
    names = ", ".join(left_out)
    if not kept:
        raise UserError(
            f"a setting of at most {max_level} bits, the highest level of the store",
            names,
            "convert the model again with a higher --max-level",
        )
    if left_out:
        logging.getLogger("edgemoe").warning(
            "left out, because the store has %d bits at most: %s", max_level, names
        )
    return kept, left_out


def require_enough(arms: Sequence[Arm], windows: Windows, tasks: int) -> None:
    """Refuses more windows or chat tasks at once than there are, and steps of a table's batch that would not be full.

    Args:
        arms: settings to measure.
        windows: token ids of each window of the text.
        tasks: number of chat tasks.

    Raises:
        UserError: a study has too few of them, or a batch of the table does not divide the windows.
    """
    for arm in arms:
        if arm.study == TABLE and arm.batch > 1:
            _require_full_steps(arm.batch, windows)
            continue
        of_tasks = arm.study == "lynx-tasks"
        found = tasks if of_tasks else len(windows)
        wanted = 2 if arm.cache else arm.batch  # of a cache's bytes the first window does not count
        if wanted > max(found, 1):
            what = "chat tasks" if of_tasks else "windows of the text"
            option = (
                "--tasks, or a larger --task-count" if of_tasks else "a smaller --window or more --tokens"
            )
            raise UserError(f"{wanted} {what} for --study {arm.study}", f"{found}", f"give {option}")


def _require_full_steps(batch: int, windows: Windows) -> None:
    """Refuses windows that a batch does not divide, or whose last one is shorter.

    Raises:
        UserError: some steps would have fewer tokens than the batch.
    """
    lengths = [len(window) for window in windows]
    if len(windows) % batch or min(lengths) < max(lengths):
        found = f"{len(windows)} windows of {min(lengths)} to {max(lengths)} tokens"
        action = f"give --tokens {batch * max(lengths)} or a multiple of it, and a text that has as many"
        raise UserError(f"windows of equal length, in a multiple of --batch {batch}", found, action)
