"""Contexts of steps, made from an engine's parts; and the step that an engine runs before any other."""

from __future__ import annotations

from contextlib import suppress

from edgemoe.engine.parts import EngineParts
from edgemoe.errors import NotFinite
from edgemoe.experts.step import StepContext, Study
from edgemoe.experts.use import ChoiceCounts
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.step import Segment, Step, StepKV
from edgemoe.models.store_model import StoreModel
from edgemoe.policy.importance import PromptAttention, attention_kind, needs_attention
from edgemoe.policy.levels import LevelPolicy, SkipEveryExpert
from edgemoe.policy.settings import RunSettings
from edgemoe.prefetch.base import ExpertSource


def make_context(
    source: ExpertSource,
    step: Step,
    policy: LevelPolicy,
    study: Study,
    *,
    all_rows: bool = False,
    choices: ChoiceCounts | None = None,
) -> StepContext:
    """Makes the context of a step.

    Args:
        source: brings the step's experts.
        step: the segments of sequences that the step computes.
        policy: chooses the level of each expert.
        study: what a measurement changes in the step or observes of it.
        all_rows: whether the step returns the logits of every row, not only of each segment's last.
        choices: counts the routers' choices; None: they are not counted.

    Raises:
        ContextExceeded: a sequence's context is too small.
    """
    settings = policy.settings
    ranked = len(settings.scheduled) > 1 and not settings.priced
    scored = ranked and not step.decodes and needs_attention(settings.importance)
    kv = StepKV(step, signal=attention_kind(settings.importance) if scored else None)
    return StepContext(step, kv, policy, source.begin(), study=study, all_rows=all_rows, choices=choices)


def rehearse(parts: EngineParts, settings: RunSettings, store: StoreModel) -> None:
    """Runs two tokens without experts, so that the pages of libraries which steps touch are resident from now on.

    They belong to the program and not to the model: PeakMemory counts them as resident before loading.
    """
    shape = store.shape
    skipping = SkipEveryExpert(
        settings.with_(levels=(settings.levels[0], 0), speculate="off", hotness=None),
        sorted(store.manifest.layers),
        shape.experts_per_layer,
    )
    sequence = SequenceKV(shape.kv, 2, "cpu")
    step = Step((Segment(sequence, (0, 0), PromptAttention()),))
    context = make_context(parts.fetcher, step, skipping, Study())
    # Weights that are not finite are named by the first step of a user.
    with suppress(NotFinite):
        for _ in parts.runner.run(context):
            pass
    context.experts.end()
