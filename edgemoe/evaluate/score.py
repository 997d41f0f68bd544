"""Windows of text, run through the reference and through an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from edgemoe.console.text_files import read_text
from edgemoe.engine.engine import Engine
from edgemoe.errors import UserError
from edgemoe.evaluate.arm import Phase
from edgemoe.evaluate.metrics import Quality, QualityMeter
from edgemoe.evaluate.reference import LogitFile, Reference
from edgemoe.evaluate.studies import LOWERED
from edgemoe.experts.records import StepRecord, StepTotals
from edgemoe.experts.use import ExpertUse
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.step import Segment, Step
from edgemoe.policy.importance import PromptAttention
from edgemoe.policy.settings import RunSettings

Windows = Sequence[tuple[int, ...]]

_CHARACTERS_PER_TOKEN = 32
"""Above any tokenizer's mean; keeps a file of gigabytes from being read for its first tokens."""


@dataclass(frozen=True)
class Text:
    """Windows that a setting is measured on.

    Args:
        windows: token ids of each window.
        reference: the bf16 model's logits of the same windows; None: there are none.
        done: called after every window.
    """

    windows: Windows
    reference: LogitFile | None
    done: Callable[[], None]


class Measurement:
    """The quality of one setting so far, and the records of its steps.

    Args:
        text: the windows.
        records: the records of the steps, which grow while the engine runs.
    """

    def __init__(self, text: Text, records: Sequence[StepRecord]) -> None:
        self._text, self._records, self._meter = text, records, QualityMeter()

    def add(self, number: int, logits: torch.Tensor, first: int = 0) -> None:
        """Adds the logits, float32 [n, vocab], after the tokens of a window from `first` on."""
        text = self._text
        kept = text.reference.read(number)[first:] if text.reference else None
        self._meter.add(logits, text.windows[number][first:], kept)
        text.done()

    def result(self) -> tuple[Quality, ExpertUse]:
        """Returns the quality, and the levels that experts were scheduled and computed at."""
        return self._meter.quality(), StepTotals.of(self._records).use


@contextmanager
def measuring(engine: Engine, settings: RunSettings, text: Text) -> Iterator[Measurement]:
    """Measures the steps inside the block, in these settings and from empty tiers on."""
    engine.configure(settings)
    engine.forget_experts()
    with engine.recorded() as records:
        yield Measurement(text, records)


def text_windows(tokenizer: Any, path: Path, tokens: int, window: int) -> list[tuple[int, ...]]:
    """Cuts the first `tokens` tokens of a text into consecutive windows, each one step of the engine.

    Args:
        tokenizer: the tokenizer of the model.
        path: a UTF-8 text file.
        tokens: most tokens in all; a shorter text gives fewer.
        window: tokens of each; the last may be shorter, and is left out if it predicts nothing.

    Raises:
        UserError: the text is missing, not UTF-8, or too short to predict a single token.
    """
    text = read_text(path, "--text", tokens * _CHARACTERS_PER_TOKEN)
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"][:tokens]
    windows = [tuple(ids[start : start + window]) for start in range(0, len(ids), window)]
    windows = [each for each in windows if len(each) > 1]
    if not windows:
        found = f"{len(ids)} tokens in all"
        raise UserError(f"a window of at least 2 tokens from {path}", found, "give a longer text to --text")
    return windows


def reference_quality(
    reference: Reference, windows: Windows, keep: LogitFile, advance: Callable[[], None]
) -> Quality:
    """Measures the bf16 model, and appends its logits of every window to `keep`.

    Args:
        reference: the bf16 model.
        windows: token ids of each window.
        keep: receives bf16 [n, vocab] for a window of n tokens.
        advance: called after every window.
    """
    meter = QualityMeter()
    for window in windows:
        logits = reference.logits(window)
        meter.add(logits, window, logits)
        keep.append(logits)
        advance()
    return meter.quality()


def lowered_quality(
    reference: Reference, layer: int, windows: Windows, whole: LogitFile, advance: Callable[[], None]
) -> Quality:
    """Measures the bf16 model with one layer's experts at LOWERED bits.

    Args:
        reference: the bf16 model.
        layer: the only one that is lowered.
        windows: token ids of each window.
        whole: the logits of the same windows without it.
        advance: called after every window.
    """
    meter = QualityMeter()
    with reference.lowered(layer, LOWERED):
        for number, window in enumerate(windows):
            meter.add(reference.logits(window), window, whole.read(number))
            advance()
    return meter.quality()


def together_quality(
    engine: Engine, sequences: Sequence[SequenceKV], settings: RunSettings, text: Text
) -> tuple[Quality, ExpertUse]:
    """Measures one setting in steps of one token of each of several windows, starting from empty tiers.

    Args:
        engine, settings, text: see setting_quality.
        sequences: one for each window of a step, all different, with free blocks for a window.

    Returns:
        see setting_quality.
    """
    with measuring(engine, settings, text) as measured:
        for first in range(0, len(text.windows), len(sequences)):
            some = text.windows[first : first + len(sequences)]
            for sequence in sequences:
                sequence.crop(0)
            for number, rows in enumerate(together_logits(engine, sequences, some), first):
                measured.add(number, rows)
    for sequence in sequences:
        sequence.crop(0)
    return measured.result()


def together_logits(engine: Engine, sequences: Sequence[SequenceKV], parts: Windows) -> list[torch.Tensor]:
    """Appends a part of text to each of some sequences, a token of each in a step.

    Args:
        engine: the engine, in its present settings.
        sequences: the sequences, at least as many as parts.
        parts: token ids of each part.

    Returns:
        for each part the logits after each token, float32 [n, vocab].
    """
    logits: list[list[torch.Tensor]] = [[] for _ in parts]
    for position in range(max(map(len, parts))):
        going = [i for i, part in enumerate(parts) if position < len(part)]
        step = Step(tuple(Segment(sequences[i], (parts[i][position],)) for i in going))
        for i, row in zip(going, engine.step(step), strict=True):
            logits[i].append(row)
    return [torch.stack(rows) for rows in logits]


def prompt_logits(engine: Engine, sequence: SequenceKV, window: Sequence[int]) -> Iterator[torch.Tensor]:
    """Appends a prompt in steps of at most the plan's prefill_rows; yields each step's logits, float32 [n, vocab]."""
    prompt, rows = PromptAttention(), engine.plan.prefill_rows
    for start in range(0, len(window), rows):
        yield engine.all_logits(sequence, window[start : start + rows], decode=False, prompt=prompt)


def own_logits(engine: Engine, sequence: SequenceKV, window: Sequence[int]) -> Iterator[torch.Tensor]:
    """Appends tokens, each with levels of its own; yields each step's logits, float32 [n, vocab].

    Settings that are not exact run in single-token steps: in one step, planes read for a later token would serve an
    earlier one.
    """
    rows = engine.plan.prefill_rows if engine.settings.exact else 1
    for start in range(0, len(window), rows):
        yield engine.all_logits(sequence, window[start : start + rows], decode=True)


def setting_quality(
    engine: Engine, sequence: SequenceKV, settings: RunSettings, phase: Phase, text: Text
) -> tuple[Quality, ExpertUse]:
    """Measures one setting in one phase, starting from empty tiers.

    Args:
        engine: its settings are replaced.
        sequence: a sequence with free blocks for a window; its content is discarded.
        settings: the settings that are measured.
        phase: prefill: every expert has one level for a window's step of at most the plan's prefill_rows. decode: the
            experts of every token have levels of their own, as in single-token steps (own_logits).
        text: the windows.

    Returns:
        the quality, and the levels that experts were scheduled and computed at.
    """
    logits_of = prompt_logits if phase == "prefill" else own_logits
    with measuring(engine, settings, text) as measured:
        for number, window in enumerate(text.windows):
            sequence.crop(0)
            whole, *others = logits_of(engine, sequence, window)
            measured.add(number, torch.cat([whole, *others]) if others else whole)
    sequence.crop(0)
    return measured.result()
