"""Steps of several sequences, by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from edgemoe.engine.engine import Engine
from edgemoe.kv.step import Segment, Step


def decoded_together(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    decoded: Sequence[Sequence[int]],
    between: Callable[[], object] = lambda: None,
) -> torch.Tensor:
    """Logits [steps, sequences, vocabulary]: the prompts one after another, then a token of each in a step.

    `between` is called after the prompts.
    """
    sequences = [engine.sequences.new() for _ in prompts]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        engine.prefill(sequence, list(prompt))
    between()
    rows = []
    for tokens in zip(*decoded, strict=True):
        pairs = zip(sequences, tokens, strict=True)
        rows.append(engine.step(Step(tuple(Segment(sequence, (token,)) for sequence, token in pairs))))
    for sequence in sequences:
        engine.sequences.end(sequence)
    return torch.stack(rows)
