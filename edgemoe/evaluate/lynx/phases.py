"""Windows whose first half is a prompt: tokens of one phase agree on experts, or of neither (Lynx, figure 9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from edgemoe.engine.engine import Engine
from edgemoe.evaluate.metrics import Quality, QualityMeter
from edgemoe.evaluate.reference import LogitFile
from edgemoe.evaluate.score import Windows, together_logits
from edgemoe.evaluate.studies import Phase
from edgemoe.experts.step import Reroute, StepTotals
from edgemoe.experts.use import ExpertUse
from edgemoe.kv.sequence import SequenceKV
from edgemoe.policy.settings import RunSettings


def phases_quality(
    engine: Engine,
    sequences: Sequence[SequenceKV],
    settings: RunSettings,
    rule: Reroute,
    phases: Sequence[Phase],
    windows: Windows,
    reference: LogitFile | None,
    done: Callable[[], None],
) -> tuple[Quality, ExpertUse]:
    """Measures new tokens, the second halves of windows, behind prompts, their first halves.

    A prompt's step has as many tokens as a step of new tokens has sequences, so as many agree in both.

    Args:
        engine: its settings are replaced.
        sequences: one for each window of a step, all different, with free blocks for a window.
        settings: to measure, without remapping.
        rule: by which tokens agree.
        phases: in which they do.
        windows: of token ids, each of four tokens or more.
        reference: logits of the same windows, or None.
        done: called after every window.

    Returns:
        the quality of the second halves, and the use of both.
    """

    def agreeing(phase: Phase) -> AbstractContextManager[None]:
        return engine.studied(reroute=rule) if phase in phases else nullcontext()

    engine.configure(settings)
    engine.forget_experts()
    meter, rows = QualityMeter(), len(sequences)
    with engine.recorded() as records:
        for first in range(0, len(windows), rows):
            some = windows[first : first + rows]
            halves = [len(window) // 2 for window in some]
            with agreeing("prefill"):
                for window, sequence, half in zip(some, sequences, halves, strict=False):
                    sequence.crop(0)
                    for start in range(0, half, rows):
                        engine.all_logits(sequence, window[start : min(start + rows, half)], decode=False)
            with agreeing("decode"):
                parts = [window[half:] for window, half in zip(some, halves, strict=True)]
                logits = together_logits(engine, sequences, parts)
            for number, (window, half, own) in enumerate(zip(some, halves, logits, strict=True), first):
                meter.add(own, window[half:], reference.read(number)[half:] if reference else None)
                done()
    for sequence in sequences:
        sequence.crop(0)
    return meter.quality(), StepTotals.of(records).use
