"""Running windows of text through an engine and through the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from edgemoe.engine.engine import Engine
from edgemoe.evaluate.arms import Phase
from edgemoe.evaluate.metrics import Quality, QualityMeter
from edgemoe.evaluate.reference import LogitFile, Reference
from edgemoe.experts.use import ExpertUse
from edgemoe.kv.sequence import SequenceKV
from edgemoe.policy.settings import RunSettings

Windows = Sequence[tuple[int, ...]]


def reference_quality(
    reference: Reference, windows: Windows, keep: LogitFile, done: Callable[[], None]
) -> Quality:
    """The bf16 model's quality, and its logits of every window appended to `keep`."""
    meter = QualityMeter()
    for window in windows:
        logits = reference.logits(window)
        meter.add(logits, window, logits)
        keep.append(logits)
        done()
    return meter.quality()


def setting_quality(
    engine: Engine,
    sequence: SequenceKV,
    settings: RunSettings,
    phase: Phase,
    windows: Windows,
    reference: LogitFile | None,
    done: Callable[[], None],
) -> tuple[Quality, ExpertUse]:
    """One setting's quality in one phase, from empty tiers on.

    Args:
        engine: its settings are replaced.
        sequence: holds a window; what it holds is forgotten.
        settings: to measure.
        phase: prefill: every expert has one level for the whole window. decode: every token's experts have
            levels of their own, as if the tokens came one by one; where higher planes are used they do come so,
            or what one token asked for would be there for those before it.
        windows: of token ids.
        reference: logits of the same windows, or None.
        done: called after every window.

    Returns:
        Quality, and what the experts were used at.
    """
    engine.configure(settings)
    engine.forget_experts()
    engine.take_use()
    meter, decode = QualityMeter(), phase == "decode"
    for number, window in enumerate(windows):
        sequence.crop(0)
        steps = [(token,) for token in window] if decode and not settings.exact else [window]
        logits = torch.cat([engine.all_logits(sequence, step, decode=decode) for step in steps])
        meter.add(logits, window, reference.read(number) if reference else None)
        done()
    sequence.crop(0)
    return meter.quality(), engine.take_use()
