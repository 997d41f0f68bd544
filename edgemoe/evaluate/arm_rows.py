"""Rows of settings, measured through an engine: chat tasks and windows of text."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from edgemoe.console.progress import CountProgress
from edgemoe.engine.engine import Engine
from edgemoe.evaluate.accuracy import ChatTasks, engine_conversations
from edgemoe.evaluate.arm import TABLE, Arm, Phase
from edgemoe.evaluate.lynx.chats import TogetherTasks, accuracy_by_kind, shuffled
from edgemoe.evaluate.lynx.phases import phases_quality
from edgemoe.evaluate.lynx.rules import agreeing
from edgemoe.evaluate.metrics import Quality
from edgemoe.evaluate.reference import LogitFile
from edgemoe.evaluate.rows import EvalRow, setting_row, with_accuracy, with_pairs
from edgemoe.evaluate.score import Text, Windows, setting_quality, together_quality
from edgemoe.evaluate.static_levels import static_policy
from edgemoe.experts.records import StepTotals
from edgemoe.experts.step import Study
from edgemoe.experts.use import ExpertUse
from edgemoe.kv.sequence import SequenceKV


class ArmRows:
    """Measures settings one after another.

    Args:
        windows: the windows of the text; none: tasks alone.
        tasks: chat tasks; none are measured where it is empty.
        logits: the reference's of the same windows; None: there is no reference.
        seed: chooses the order of tasks that are answered together.
    """

    def __init__(self, windows: Windows, tasks: ChatTasks, logits: LogitFile | None, seed: int) -> None:
        self._windows, self._tasks, self._logits, self._seed = windows, tasks, logits, seed
        self._alone: list[bool] = []
        """Whether each turn of the chat tasks is right in the first row of their study."""

    def rows(self, engine: Engine, arm: Arm, label: str) -> list[EvalRow]:
        """Returns a row for every phase of an arm; tasks run for arms of the table with a batch of 1 only.

        Args:
            engine: its settings are replaced.
            arm: the arm that is measured.
            label: the text for the progress on stderr.
        """
        if arm.study == "lynx-tasks":
            return [self._together(engine, arm, label)]
        by_kind = None
        if self._tasks and arm.study == TABLE and arm.batch == 1:
            engine.configure(arm.settings)
            engine.forget_experts()
            with engine_conversations(engine, self._tasks) as start:
                by_kind = self._tasks.accuracy(label, start)
        with engine.recorded() as records:
            rows = (
                self._text(engine, arm, label)
                if self._windows
                else [setting_row(arm, arm.phases[0], None, ExpertUse())]
            )
        if arm.settings.hotness:
            demoted = StepTotals.of(records).transfers.demoted if self._windows else None
            rows = [replace(row, hot_experts=engine.plan.hot_experts, demoted=demoted) for row in rows]
        return [with_accuracy(row, by_kind) for row in rows]

    def _together(self, engine: Engine, arm: Arm, label: str) -> EvalRow:
        """The row of chat tasks that are answered several at once."""
        with CountProgress(f"{label}: tasks", len(self._tasks)) as progress:
            tasks = shuffled(self._tasks.by_kind, self._seed)
            together = TogetherTasks(engine, self._tasks.tokenizer, self._tasks.stop, progress.advance)
            right, use = together.run(tasks, arm)
        turns = [turn for of_task in right for turn in of_task]
        self._alone = self._alone or turns
        row = with_accuracy(setting_row(arm, "decode", None, use), accuracy_by_kind(tasks, right))
        return with_pairs(row, turns, self._alone)

    def _text(self, engine: Engine, arm: Arm, label: str) -> list[EvalRow]:
        """The rows of the text, one for each phase."""
        with ExitStack() as stack:
            sequences = []
            for _ in range(arm.batch):
                sequences.append(engine.sequences.new())
                stack.callback(engine.sequences.end, sequences[-1])
            progress = stack.enter_context(
                CountProgress(f"{label}: text", len(arm.phases) * len(self._windows))
            )
            text = Text(self._windows, self._logits, progress.advance)
            return [
                setting_row(arm, phase, *_quality(engine, sequences, arm, phase, text))
                for phase in arm.phases
            ]


def _quality(
    engine: Engine, sequences: Sequence[SequenceKV], arm: Arm, phase: Phase, text: Text
) -> tuple[Quality, ExpertUse]:
    """Measures an arm on the text, its windows one after another or as many together as it says."""
    settings, variation = arm.settings, arm.variation
    if variation and variation.static:
        with engine.studied(Study(policy=static_policy(engine, *variation.static))):
            return setting_quality(engine, sequences[0], settings, phase, text)
    if arm.batch == 1:
        return setting_quality(engine, sequences[0], settings, phase, text)
    if variation is None:
        return together_quality(engine, sequences, settings, text)
    rule = agreeing(variation, sorted(engine.store.manifest.layers))
    if variation.phases is not None:
        return phases_quality(engine, sequences, settings, rule, variation.phases, text)
    with engine.studied(Study(reroute=rule)):
        return together_quality(engine, sequences, settings, text)
