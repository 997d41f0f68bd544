"""One evaluation: the reference first, then every setting through one engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import transformers

from edgemoe import __version__
from edgemoe.console.progress import CountProgress
from edgemoe.console.sizes import format_size
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.engine.sampling import Sampling
from edgemoe.errors import DoesNotFit, UserError
from edgemoe.evaluate.accuracy import (
    Answer,
    engine_conversations,
    reference_conversations,
    task_accuracy,
)
from edgemoe.evaluate.claims import Claim, claims_of, routing_claims, similarity_claims
from edgemoe.evaluate.compensation.arms import equal_arms, with_gains
from edgemoe.evaluate.compensation.making import compensated, planned_bytes
from edgemoe.evaluate.lynx.cached import cached_rows
from edgemoe.evaluate.lynx.chats import TogetherTasks, accuracy_by_kind, shuffled
from edgemoe.evaluate.lynx.phases import phases_quality
from edgemoe.evaluate.lynx.rules import agreeing
from edgemoe.evaluate.metrics import Quality
from edgemoe.evaluate.observations import Observations, RoutingRow, SimilarityRow, observe
from edgemoe.evaluate.reference import LogitFile, Reference
from edgemoe.evaluate.rows import (
    BF16,
    EvalRow,
    lowered_row,
    reference_row,
    setting_row,
    with_accuracy,
    with_pairs,
)
from edgemoe.evaluate.score import (
    Windows,
    lowered_quality,
    reference_quality,
    setting_quality,
    text_windows,
    together_quality,
)
from edgemoe.evaluate.studies import LOWERED, STORED, TABLE, Arm, Phase
from edgemoe.evaluate.tasks import KINDS, Task, held_out_tasks
from edgemoe.experts.use import ExpertUse
from edgemoe.kv.blocks import BLOCK_ROWS
from edgemoe.kv.sequence import SequenceKV
from edgemoe.machine.process import available_memory
from edgemoe.memory.plan import MemoryPlan
from edgemoe.models.runnable import generation_config
from edgemoe.models.tokenizer import load_tokenizer
from edgemoe.policy.settings import RunSettings

_WINDOW_LOGIT_BYTES = 2 + 4 + 4 + 2 + 2
"""Of a logit of a long window: in bf16, in float32 and as log probabilities; and the reference's, kept and read."""

TASK_CONTEXT = 1024
"""Tokens of context for a task: more than three turns fill."""


@dataclass(frozen=True)
class EvalRequest:
    """What to measure.

    Args:
        text: file for perplexity and KL; None: tasks only.
        reference: checkpoint of the bf16 model; None: no bf16 row, no KL.
        tokens: most tokens of the text.
        window: tokens of a window, at most kv.blocks.BLOCK_ROWS on a device or with a vram_limit, which holds no more
            rows' logits.
        task_count: held-out tasks of each kind for every row of the table; 0: none.
        seed: chooses the tasks.
        arms: settings, in the order of the rows.
        observed: studies of studies.OBSERVED; "layers" needs a reference.
        vram_limit, dram_limit: bytes, as for a chat; no result depends on them.
        prefill_rows: most tokens of a window in one step, whose experts are ranked together; None: all.
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
    observed: tuple[str, ...] = ()
    prefill_rows: int | None = None


@dataclass(frozen=True)
class EvalReport:
    """What was measured. Field names are the JSON's.

    Args:
        environment: versions, model, text and counts.
        rows: bf16 first, where there is a reference.
        claims: statements of the paper, and whether they hold here.
        left_out: names of settings that need more bits than the store has.
        routing, similarity: rows of these studies.
    """

    environment: dict[str, Any]
    rows: list[EvalRow]
    claims: list[Claim]
    left_out: list[str]
    routing: list[RoutingRow] = field(default_factory=list)
    similarity: list[SimilarityRow] = field(default_factory=list)


def run_eval(store: StoreModel, request: EvalRequest) -> EvalReport:
    """Measures the reference, frees it, then measures every setting through one engine.

    Shows progress and remaining time on stderr: of the reference and of each setting, text and tasks apart.

    Raises:
        UserError: the text or the reference is unusable, tasks are wanted of a model without a chat template, or there
            are fewer windows or tasks than a study runs at once.
        DoesNotFit: the limits are too small, or the disk for the reference's logits.
    """
    arms, left_out = _possible(request.arms, store)
    evaluation = _Evaluation(store, request)
    evaluation.require(arms)
    plan = plan_eval(store, request)  # limits that are too small are reported before the reference runs
    windows = evaluation.windows
    rows: list[EvalRow] = []
    with ExitStack() as stack:
        logits = None
        if request.reference:
            logits = stack.enter_context(LogitFile(sum(map(len, windows)), store.shape.vocab))
            rows += evaluation.reference(request.reference, logits)
        rows += evaluation.settings([arm for arm in arms if not arm.cache], plan, logits)
        rows += cached_rows(store, [arm for arm in arms if arm.cache], windows, logits)
        rows = list(with_gains(rows))
    environment = _environment(store, request, windows)
    environment |= {"damage": evaluation.damage, "prefill_rows": plan.prefill_rows}
    observed = evaluation.observed
    routing = observed.routing() if observed and "routing" in request.observed else []
    similarity = observed.similarity() if observed and "similarity" in request.observed else []
    claims = [*claims_of(rows), *routing_claims(routing), *similarity_claims(similarity)]
    return EvalReport(environment, rows, claims, left_out, routing, similarity)


def plan_eval(store: StoreModel, request: EvalRequest) -> MemoryPlan:
    """Divides the limits for the longest window or task, at the highest level of any arm, which fits them all.

    Raises:
        UserError: no arm that the store can run; a window that is longer than the model's context, or than a block on a
            device or with a limit; a study of whole windows in several steps.
        DoesNotFit: the limits, or the memory for the logits of a longer window, are too small.
    """
    arms, _ = _possible(request.arms, store)
    context = request.window
    _require_whole_windows(request)
    if context > BLOCK_ROWS:
        _require_long_window(store, request)
    if request.task_count:
        context = max(context, min(TASK_CONTEXT, store.default_context()))
    return store.plan(
        vram_limit=request.vram_limit,
        dram_limit=request.dram_limit,
        settings=RunSettings.uniform(max(arm.settings.levels[0] for arm in arms)),
        context=context,
        parallel=max(arm.batch for arm in arms),
        compensators=planned_bytes(store, arms),
        prefill_rows=request.prefill_rows or (request.window if request.window > BLOCK_ROWS else None),
    )


def _require_long_window(store: StoreModel, request: EvalRequest) -> None:
    """Refuses a window longer than a block where its logits, or the model, have no room for it.

    Raises:
        UserError, DoesNotFit: as plan_eval.
    """
    window = request.window
    blocks = request.vram_limit is not None or store.device is not None
    most = BLOCK_ROWS if blocks else store.default_context()
    if window > most:
        why = "on a device or with --vram-limit" if blocks else "the context that this model runs with"
        raise UserError(f"--window of at most {most} tokens, {why}", str(window), f"give --window {most}")
    weights = store.shape.dense_bytes + store.form.bytes_at(store.manifest.max_level) * store.shape.experts
    needed, free = weights + window * store.shape.vocab * _WINDOW_LOGIT_BYTES, available_memory()
    if needed > free:
        wanted = f"{format_size(needed)} of memory, for all experts and the logits of --window {window}"
        raise DoesNotFit(wanted, format_size(free), f"give --window {BLOCK_ROWS}", minimum=needed)


def _require_whole_windows(request: EvalRequest) -> None:
    """Refuses to observe windows that take several steps, each of which ranks tokens of its own.

    Raises:
        UserError: as plan_eval.
    """
    rows = request.prefill_rows
    if request.observed and rows is not None and rows < request.window:
        study = f"--study {request.observed[0]}"
        raise UserError(f"windows of one step for {study}", f"--prefill-rows {rows}", "leave it out")


class _Evaluation:
    """The windows and tasks that all rows are measured on."""

    def __init__(self, store: StoreModel, request: EvalRequest) -> None:
        self._store, self._request = store, request
        self.damage: str | None = None
        """What the damage of fewer bits was measured on; None where no setting goes by it."""
        self.observed: Observations | None = None
        """What routers chose and saw; None where no study wants it."""
        self._tokenizer = tokenizer = load_tokenizer(store.directory)
        self.windows: Windows = []
        if request.text:
            self.windows = text_windows(tokenizer, request.text, request.tokens, request.window)
        self._alone: list[bool] = []
        """Whether each turn of the chat tasks is right in the first row of their study."""
        self._tasks = _tasks(tokenizer, request.task_count, request.seed)
        own = generation_config(store.directory)
        greedy = {"temperature": 0, "top_p": 1, "seed": 0, "max_new_tokens": 1}
        self._stop = Sampling.of_model(own, tokenizer.eos_token_id, **greedy).stop

    def require(self, arms: list[Arm]) -> None:
        """Refuses more windows or chat tasks at once than there are."""
        for arm in arms:
            tasks = arm.study == "lynx-tasks"
            found = sum(map(len, self._tasks.values())) if tasks else len(self.windows)
            wanted = 2 if arm.cache else arm.batch  # of a cache's bytes the first window does not count
            if wanted > max(found, 1):
                what = "chat tasks" if tasks else "windows of the text"
                option = (
                    "--tasks, or a larger --task-count" if tasks else "a smaller --window or more --tokens"
                )
                raise UserError(f"{wanted} {what} for --study {arm.study}", f"{found}", f"give {option}")

    def reference(self, checkpoint: Path, keep: LogitFile) -> list[EvalRow]:
        """Returns the bf16 row, and those of the study of layers. The model is freed when this returns."""
        model = Reference(checkpoint, self._store.shape.vocab, self._store.manifest.source)
        quality = by_kind = None
        if self.windows:
            with CountProgress(f"{BF16}: text", len(self.windows)) as progress:
                quality = reference_quality(model, self.windows, keep, progress.advance)
        if self._tasks:
            by_kind = self._accuracy(BF16, reference_conversations(model, self._tokenizer, self._stop))
        rows = [with_accuracy(reference_row(quality), by_kind)]
        return rows + (self._lowered(model, keep) if "layers" in self._request.observed else [])

    def _lowered(self, model: Reference, whole: LogitFile) -> list[EvalRow]:
        """Returns a row for each layer that has experts."""
        layers, rows = sorted(self._store.manifest.layers), []
        with CountProgress(
            f"{BF16}, a layer at {LOWERED}: text", len(layers) * len(self.windows)
        ) as progress:
            for layer in layers:
                quality = lowered_quality(model, layer, self.windows, whole, progress.advance)
                rows.append(lowered_row(layer, len(layers), quality))
        return rows

    def settings(self, arms: list[Arm], plan: MemoryPlan, logits: LogitFile | None) -> list[EvalRow]:
        """Returns a row for every arm and phase; tasks run for arms of the table only."""
        rows: list[EvalRow] = []
        with Engine(self._store, plan, RunSettings.uniform(plan.levels[0])) as engine:
            if any(arm.settings.priced or arm.made for arm in arms):
                engine.require_damage()  # while no sequence has its memory
                self.damage = engine.rules.damage.origin if engine.rules.damage else None
            for made, some in groupby(enumerate(arms, 1), key=lambda numbered: numbered[1].made):
                with compensated(engine, self._request.reference, made):
                    for number, arm in some:
                        rows += self._arm(engine, arm, logits, f"{arm.name} ({number} of {len(arms)})")
            for arm in equal_arms(rows, plan.levels[0]):
                rows += self._arm(engine, arm, logits, arm.name)
            if {"routing", "similarity"} & set(self._request.observed):
                sequence = engine.sequences.new()
                with CountProgress("routers: text", len(self.windows)) as progress:
                    self.observed = observe(engine, sequence, self.windows, progress.advance)
        return rows

    def _arm(self, engine: Engine, arm: Arm, logits: LogitFile | None, label: str) -> list[EvalRow]:
        if arm.study == "lynx-tasks":
            with CountProgress(f"{label}: tasks", sum(map(len, self._tasks.values()))) as progress:
                tasks = shuffled(self._tasks, self._request.seed)
                together = TogetherTasks(engine, self._tokenizer, self._stop, progress.advance)
                right, use = together.run(tasks, arm)
            turns = [turn for of_task in right for turn in of_task]
            self._alone = self._alone or turns
            row = with_accuracy(setting_row(arm, "decode", None, use), accuracy_by_kind(tasks, right))
            return [with_pairs(row, turns, self._alone)]
        by_kind = None
        if self._tasks and arm.study == TABLE:
            engine.configure(arm.settings)
            engine.forget_experts()
            with engine_conversations(engine, self._tokenizer, self._stop) as start:
                by_kind = self._accuracy(label, start)
        if not self.windows:
            return [with_accuracy(setting_row(arm, arm.phases[0], None, ExpertUse()), by_kind)]
        rows, sequence = [], engine.sequences.new()
        with CountProgress(f"{label}: text", len(arm.phases) * len(self.windows)) as progress:
            for phase in arm.phases:
                measured = self._quality(engine, sequence, arm, phase, logits, progress.advance)
                rows.append(with_accuracy(setting_row(arm, phase, *measured), by_kind))
        engine.sequences.end(sequence)
        return rows

    def _quality(
        self,
        engine: Engine,
        sequence: SequenceKV,
        arm: Arm,
        phase: Phase,
        logits: LogitFile | None,
        done: Callable[[], None],
    ) -> tuple[Quality, ExpertUse]:
        """Measures an arm on the text, its windows one after another or as many together as it says."""
        if arm.batch == 1:
            return setting_quality(engine, sequence, arm.settings, phase, self.windows, logits, done)
        more = [engine.sequences.new() for _ in range(arm.batch - 1)]
        try:
            sequences, variation = [sequence, *more], arm.variation
            rest = self.windows, logits, done
            if variation is None:
                return together_quality(engine, sequences, arm.settings, *rest)
            rule = agreeing(variation, sorted(self._store.manifest.layers))
            if variation.phases is not None:
                return phases_quality(engine, sequences, arm.settings, rule, variation.phases, *rest)
            with engine.studied(reroute=rule):
                return together_quality(engine, sequences, arm.settings, *rest)
        finally:
            for each in more:
                engine.sequences.end(each)

    def _accuracy(self, label: str, start: Callable[[], Answer]) -> dict[str, float]:
        with CountProgress(f"{label}: tasks", sum(map(len, self._tasks.values()))) as progress:
            return task_accuracy(self._tasks, start, progress.advance)


def _possible(arms: tuple[Arm, ...], store: StoreModel) -> tuple[list[Arm], list[str]]:
    """Returns the arms that a store can run, and the names of those that need more bits, which are logged.

    Ranks that its tokens do not have are left out.
    """
    max_level, ranks, found = store.manifest.max_level, store.shape.top_k, store.manifest.compensators
    kept = [arm for arm in arms if arm.settings.levels[0] <= max_level]
    left_out = list(dict.fromkeys(arm.settings.name for arm in arms if arm not in kept))
    kept = [arm for arm in kept if arm.ranks_needed <= ranks or arm.made == STORED]
    if found:  # levels without the compensators' own have a row without compensators
        kept = [arm for arm in kept if arm.made != STORED or found.base_level in arm.settings.levels]
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


def _tasks(tokenizer: Any, per_kind: int, seed: int) -> dict[str, list[Task]]:
    if per_kind and not tokenizer.chat_template:
        raise UserError(
            "a tokenizer with a chat template for the chat tasks",
            "one without",
            "leave out --tasks, or use a model made for chatting",
        )
    return {kind: held_out_tasks(kind, per_kind, seed) for kind in KINDS} if per_kind else {}


def _environment(store: StoreModel, request: EvalRequest, windows: Windows) -> dict[str, Any]:
    return {
        "edgemoe": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": store.directory.name,
        "source": store.manifest.source,
        "store": store.manifest.fingerprint,
        "dense_bits": store.manifest.dense_bits,
        "kv_cache": str(store.shape.kv.format),
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
