"""Steps of one and of several sequences through the tiny model, and the ranks of its compensators."""

from __future__ import annotations

import torch

from edgemoe.engine.engine import Engine
from edgemoe.kv.step import Segment, Step

PROMPTS = [[5, 9, 200], [17, 3, 88, 41, 250], [60], [7, 7, 120, 33, 2, 90]]
DECODED = [[11, 250, 42], [99, 7, 180], [64, 12, 5], [201, 31, 77]]

RANKS = {0: (8, 5, 3), 1: (0, 0, 0), 2: (0, 16, 0)}
"""Expert modulo 3 -> ranks; experts of every third have no compensator."""


def together(engine: Engine) -> torch.Tensor:
    """Logits [sequences, steps, vocabulary] of the tokens after the prompts, one of each in a step."""
    sequences = [engine.sequences.new() for _ in PROMPTS]
    rows = [torch.stack([engine.prefill(s, p) for s, p in zip(sequences, PROMPTS, strict=True)])]
    for tokens in zip(*DECODED, strict=True):
        pairs = zip(sequences, tokens, strict=True)
        rows.append(engine.step(Step(tuple(Segment(sequence, (token,)) for sequence, token in pairs))))
    for sequence in sequences:
        engine.sequences.end(sequence)
    return torch.stack(rows, 1)


def alone(engine: Engine, *, decoded: bool = True) -> torch.Tensor:
    """Logits [sequences, steps, vocabulary] of the prompts' ends and of the tokens after them, one after another."""
    rows = []
    for prompt, tokens in zip(PROMPTS, DECODED, strict=True):
        sequence = engine.sequences.new()
        of = [engine.prefill(sequence, prompt)]
        if not decoded:
            engine.take_use()
        of += [engine.step(Step((Segment(sequence, (token,)),)))[0] for token in tokens]
        engine.sequences.end(sequence)
        rows.append(torch.stack(of))
    return torch.stack(rows)
