"""Windows whose first half is a prompt: tokens of one phase agree on experts, or of neither (Lynx, figure 9)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from edgemoe.engine.engine import Engine
from edgemoe.evaluate.arm import Phase
from edgemoe.evaluate.metrics import Quality
from edgemoe.evaluate.score import Text, measuring, together_logits
from edgemoe.experts.step import Reroute, Study
from edgemoe.experts.use import ExpertUse
from edgemoe.kv.sequence import SequenceKV
from edgemoe.policy.settings import RunSettings


def phases_quality(
    engine: Engine,
    sequences: Sequence[SequenceKV],
    settings: RunSettings,
    rule: Reroute,
    phases: Sequence[Phase],
    text: Text,
) -> tuple[Quality, ExpertUse]:
    """Measures new tokens, the second halves of windows, after prompts, their first halves; empties the sequences.

    A prompt's step has as many tokens as a step of new tokens has sequences, so as many agree in both.

    Args:
        engine: its settings are replaced.
        sequences: one for each window of a step, all different, with free blocks for a window.
        settings: the settings that are measured, without remapping.
        rule: the rule by which tokens agree.
        phases: the phases in which tokens agree.
        text: windows of four tokens or more.

    Returns:
        the quality of the second halves, and the use of both.
    """
    rows = len(sequences)
    with measuring(engine, settings, text) as measured:
        for first in range(0, len(text.windows), rows):
            some = text.windows[first : first + rows]
            halves = [len(window) // 2 for window in some]
            with _agreeing(engine, rule if "prefill" in phases else None):
                for window, sequence, half in zip(some, sequences, halves, strict=False):
                    _prompt(engine, sequence, window[:half], rows)
            parts = [window[half:] for window, half in zip(some, halves, strict=True)]
            with _agreeing(engine, rule if "decode" in phases else None):
                logits = together_logits(engine, sequences, parts)
            for number, (half, own) in enumerate(zip(halves, logits, strict=True), first):
                measured.add(number, own, half)
    for sequence in sequences:
        sequence.crop(0)
    return measured.result()


def _agreeing(engine: Engine, rule: Reroute | None) -> AbstractContextManager[None]:
    """Lets tokens agree by a rule inside the block; None: each token keeps its own experts."""
    return nullcontext() if rule is None else engine.studied(Study(reroute=rule))


def _prompt(engine: Engine, sequence: SequenceKV, tokens: Sequence[int], rows: int) -> None:
    """Runs a prompt from an empty sequence on, in steps of so many rows."""
    sequence.crop(0)
    for start in range(0, len(tokens), rows):
        engine.all_logits(sequence, tokens[start : start + rows], decode=False)
