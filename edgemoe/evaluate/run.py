"""One evaluation: the reference first, then every setting through one engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from edgemoe import __version__
from edgemoe.chat.conversation import generation_config, load_tokenizer
from edgemoe.console.progress import CountProgress
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.engine.generate import Sampling
from edgemoe.evaluate.accuracy import (
    engine_conversations,
    reference_conversations,
    task_accuracy,
    task_set,
)
from edgemoe.evaluate.arms import TABLE, Arm
from edgemoe.evaluate.claims import Claim, claims_of
from edgemoe.evaluate.reference import LogitFile, Reference
from edgemoe.evaluate.rows import EvalRow, reference_row, setting_row, with_accuracy
from edgemoe.evaluate.score import Windows, reference_quality, setting_quality
from edgemoe.evaluate.tasks import Task
from edgemoe.evaluate.windows import text_windows
from edgemoe.experts.use import ExpertUse
from edgemoe.kv.sequence import SequenceKV
from edgemoe.memory.plan import MemoryPlan
from edgemoe.policy.settings import RunSettings
from storage.errors import UserError

TASK_CONTEXT = 1024
"""Tokens of context that three turns of a task never fill."""


@dataclass(frozen=True)
class EvalRequest:
    """What to measure.

    Args:
        text: file for perplexity and KL; None: tasks only.
        reference: checkpoint of the bf16 model; None: no bf16 row, no KL.
        tokens: most tokens of the text.
        window: tokens of a window, at most plan.PREFILL_ROWS.
        task_count: held-out tasks of each kind for every row of the table; 0: none.
        seed: chooses the tasks.
        arms: settings, in the order of the rows.
        vram_limit, dram_limit: bytes, as for a chat; no result depends on them.
    """

    text: Path | None
    reference: Path | None
    tokens: int
    window: int
    task_count: int
    seed: int
    arms: tuple[Arm, ...]
    vram_limit: int | None = None
    dram_limit: int = 0


@dataclass(frozen=True)
class EvalReport:
    """What was measured.

    Args:
        environment: versions, model, text and counts.
        rows: bf16 first, where there is a reference.
        claims: what the paper says, and whether it holds here.
        left_out: names of settings that the store has not the bits for.
    """

    environment: dict[str, Any]
    rows: list[EvalRow]
    claims: list[Claim]
    left_out: list[str]

    def as_json(self) -> dict[str, Any]:
        """One JSON object; names as in the documentation."""
        return {
            "environment": self.environment,
            "rows": [row.as_json() for row in self.rows],
            "claims": [vars(claim) for claim in self.claims],
            "left_out": self.left_out,
        }


def run_eval(store: StoreModel, request: EvalRequest) -> EvalReport:
    """Measures the reference, frees it, then measures every setting through one engine.

    Raises:
        UserError: the text or the reference is unusable, or the model cannot chat though tasks were asked.
        DoesNotFit: the limits are too small, or the disk for the reference's logits.
    """
    kept, left_out = _possible(request.arms, store.manifest.max_level)
    tokenizer = load_tokenizer(store.directory)
    windows = text_windows(tokenizer, request.text, request.tokens, request.window) if request.text else []
    tasks = _tasks(tokenizer, request.task_count, request.seed)
    evaluation = _Evaluation(store, tokenizer, windows, tasks)
    plan = evaluation.plan(kept, request)  # what does not fit is better told before the reference has run
    rows: list[EvalRow] = []
    with ExitStack() as stack:
        logits = None
        if request.reference:
            logits = stack.enter_context(LogitFile(sum(map(len, windows)), store.shape.vocab))
            rows.append(evaluation.reference(request.reference, logits))
        rows += evaluation.settings(kept, plan, logits)
    return EvalReport(_environment(store, request, windows), rows, claims_of(rows), left_out)


class _Evaluation:
    """The material that all rows are measured on."""

    def __init__(
        self, store: StoreModel, tokenizer: Any, windows: Windows, tasks: dict[str, list[Task]]
    ) -> None:
        self._store, self._tokenizer, self._windows, self._tasks = store, tokenizer, windows, tasks
        self._stop = Sampling.of_model(
            generation_config(store.directory),
            tokenizer.eos_token_id,
            temperature=0,
            top_p=1,
            seed=0,
            max_new_tokens=1,
        ).stop

    def reference(self, checkpoint: Path, keep: LogitFile) -> EvalRow:
        """The bf16 row. The model is in memory only for as long as this takes."""
        with CountProgress("bf16") as progress:
            done = _counter(progress, len(self._windows) + self._task_total())
            model = Reference(checkpoint, self._store.shape.vocab, self._store.manifest.source)
            quality = reference_quality(model, self._windows, keep, done) if self._windows else None
            by_kind = None
            if self._tasks:
                start = reference_conversations(model, self._tokenizer, self._stop)
                by_kind = task_accuracy(self._tasks, start, done)
        return with_accuracy(reference_row(quality), by_kind)

    def plan(self, arms: list[Arm], request: EvalRequest) -> MemoryPlan:
        """Room for a window or a task, and for the highest level everywhere, which holds every other setting too."""
        highest = RunSettings.uniform(max(arm.settings.levels[0] for arm in arms))
        context = max(request.window, min(TASK_CONTEXT, self._store.default_context()) if self._tasks else 0)
        return self._store.plan(
            vram_limit=request.vram_limit, dram_limit=request.dram_limit, settings=highest, context=context
        )

    def settings(self, arms: list[Arm], plan: MemoryPlan, logits: LogitFile | None) -> list[EvalRow]:
        """A row for every arm and phase; tasks are asked for rows of the table only."""
        total = sum(
            len(arm.phases) * len(self._windows) + self._task_total() * (arm.study == TABLE) for arm in arms
        )
        rows: list[EvalRow] = []
        with (
            CountProgress("edgemoe") as progress,
            Engine(self._store, plan, RunSettings.uniform(plan.levels[0])) as engine,
        ):
            sequence, done = engine.new_sequence(), _counter(progress, total)
            for arm in arms:
                rows += self._arm(engine, sequence, arm, logits, done)
        return rows

    def _arm(
        self,
        engine: Engine,
        sequence: SequenceKV,
        arm: Arm,
        logits: LogitFile | None,
        done: Callable[[], None],
    ) -> list[EvalRow]:
        by_kind = None
        if self._tasks and arm.study == TABLE:
            engine.configure(arm.settings)
            engine.forget_experts()
            start = engine_conversations(engine, self._tokenizer, self._stop, sequence)
            by_kind = task_accuracy(self._tasks, start, done)
        if not self._windows:
            return [with_accuracy(setting_row(arm, arm.phases[0], None, ExpertUse()), by_kind)]
        rows = []
        for phase in arm.phases:
            quality, use = setting_quality(engine, sequence, arm.settings, phase, self._windows, logits, done)
            rows.append(with_accuracy(setting_row(arm, phase, quality, use), by_kind))
        return rows

    def _task_total(self) -> int:
        return sum(map(len, self._tasks.values()))


def _possible(arms: tuple[Arm, ...], max_level: int) -> tuple[list[Arm], list[str]]:
    """The arms that a store has the bits for, and the names of the others, which are warned of."""
    kept = [arm for arm in arms if arm.settings.levels[0] <= max_level]
    left_out = list(dict.fromkeys(arm.settings.name for arm in arms if arm not in kept))
    if not kept:
        raise UserError(
            f"settings up to {max_level} bits were wanted",
            f"all asked need more: {', '.join(left_out)}",
            "Convert the model again with a higher --max-level",
        )
    if left_out:
        logging.getLogger("edgemoe").warning(
            "left out, as the store has %d bits at most: %s", max_level, ", ".join(left_out)
        )
    return kept, left_out


def _tasks(tokenizer: Any, count: int, seed: int) -> dict[str, list[Task]]:
    if count and not tokenizer.chat_template:
        raise UserError(
            "chat tasks were wanted",
            "the model's tokenizer has no chat template",
            "Use --task-count 0, or a model made for chatting",
        )
    return task_set(count, seed) if count else {}


def _counter(progress: CountProgress, total: int) -> Callable[[], None]:
    """What counts one more of `total` each time it is called."""
    finished = 0

    def done() -> None:
        nonlocal finished
        finished += 1
        progress.update(finished, total)

    return done


def _environment(store: StoreModel, request: EvalRequest, windows: Windows) -> dict[str, Any]:
    return {
        "edgemoe": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": store.directory.name,
        "source": store.manifest.source,
        "dense_bits": store.manifest.dense_bits,
        "reference": request.reference.name if request.reference else None,
        "text": request.text.name if request.text else None,
        "tokens": sum(map(len, windows)),
        "window": request.window,
        "windows": len(windows),
        "task_count": request.task_count,
        "seed": request.seed,
        "vram_limit_bytes": request.vram_limit,
        "dram_limit_bytes": request.dram_limit,
    }
