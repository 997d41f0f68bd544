"""The step that an engine runs before any other."""

from __future__ import annotations

from contextlib import suppress

from edgemoe.engine.parts import EngineParts
from edgemoe.errors import NotFinite
from edgemoe.experts.step import StepContext, Study
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.step import Segment, Step
from edgemoe.models.store_model import StoreModel
from edgemoe.policy.importance import PromptAttention
from edgemoe.policy.levels import SkipEveryExpert
from edgemoe.policy.settings import RunSettings


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
    context = StepContext(parts.fetcher, step, skipping, Study())
    # Weights that are not finite are named by the first step of a user.
    with suppress(NotFinite):
        for _ in parts.runner.run(context):
            pass
    context.experts.end()
