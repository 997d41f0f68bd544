"""Ways to compute the tokens of a prompt that must all have the same bits under exact levels."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from edgemoe.engine.engine import Engine
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.step import Segment, Step
from edgemoe.policy.importance import PromptAttention

TOKENS = 120
"""Tokens of a prompt: attention goes through keys in blocks of 64."""

FORMATS = [*((kv, bits) for bits in (16, 8) for kv in ("bf16", "q8_0", "q4_0")), ("bf16", 4), ("bf16", 6)]
"""Format of keys and values, and bits of dense weights."""


def fresh(engine: Engine) -> SequenceKV:
    """A sequence in addition to the ones that the engine's limit includes."""
    return SequenceKV(engine.shape.kv, engine.plan.context)


def alone(engine: Engine, tokens: list[int]) -> torch.Tensor:
    """Logits [tokens, vocabulary] of one prompt in one step."""
    return engine.all_logits(fresh(engine), tokens, decode=False)


def cuts(rng: random.Random) -> list[int]:
    """Where a prompt is cut into at least two parts, sometimes of one token; the last end is TOKENS."""
    inner = rng.sample(range(1, TOKENS), rng.randint(1, 5))
    if rng.random() < 0.5:
        inner.append(min(inner[0] + 1, TOKENS - 1))
    return [*sorted(set(inner)), TOKENS]


def in_chunks(engine: Engine, tokens: list[int], rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt in steps of several tokens."""
    sequence, start, found = fresh(engine), 0, []
    for end in cuts(rng):
        found.append(engine.all_logits(sequence, tokens[start:end], decode=False))
        start = end
    return torch.cat(found), alone(engine, tokens)


def as_an_answer(engine: Engine, tokens: list[int], rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """The last tokens as new ones, each in a step of its own."""
    sequence, first = fresh(engine), rng.randint(1, TOKENS - 12)
    engine.all_logits(sequence, tokens[:first], decode=False)
    found = [engine.step(Step((Segment(sequence, (token,)),))) for token in tokens[first : first + 12]]
    return torch.cat(found), alone(engine, tokens)[first : first + 12]


def several_answers(
    engine: Engine, tokens: list[int], rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """New tokens of three sequences of different lengths in the same steps."""
    firsts = rng.sample(range(1, TOKENS - 4), 3)
    sequences = [fresh(engine) for _ in firsts]
    for sequence, first in zip(sequences, firsts, strict=True):
        engine.all_logits(sequence, tokens[:first], decode=False)
    found = []
    for i in range(4):
        pairs = zip(sequences, firsts, strict=True)
        found.append(engine.step(Step(tuple(Segment(each, (tokens[at + i],)) for each, at in pairs))))
    whole = alone(engine, tokens)
    return torch.stack(found), torch.stack([whole[[at + i for at in firsts]] for i in range(4)])


def several_prompts(
    engine: Engine, tokens: list[int], rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Three prompts of different lengths in one step."""
    ends = rng.sample(range(1, TOKENS // 3), 3)
    sequences = [fresh(engine) for _ in ends]
    parts = [
        Segment(sequence, tuple(tokens[:end]), PromptAttention())
        for sequence, end in zip(sequences, ends, strict=True)
    ]
    found = engine.step(Step(tuple(parts)))
    return found, alone(engine, tokens)[[end - 1 for end in ends]]


def after_kept_tokens(
    engine: Engine, tokens: list[int], rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens after a copied prefix, or after one whose bytes were written out and read again."""
    first, kept = rng.randint(1, TOKENS - 1), fresh(engine)
    engine.all_logits(kept, tokens[:first], decode=False)
    sequence = fresh(engine)
    if rng.random() < 0.5 or kept.states:
        assert sequence.copy_prefix(kept, first) == first
    else:
        for windowed in (False, True):
            into, stored = (each.rows(0, first, windowed=windowed).views for each in (sequence, kept))
            for to, row in zip(into, stored, strict=True):
                to[:] = bytes(row)
        sequence.restore(range(first), windowed=True)
    found = engine.all_logits(sequence, tokens[first:], decode=False)
    return found, alone(engine, tokens)[first:]


def next_to_answers(
    engine: Engine, tokens: list[int], rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt's step between whose layers another sequence answers, and that answer."""
    first, end = rng.randint(1, TOKENS - 12), rng.randint(2, TOKENS)
    answering, prompt = fresh(engine), fresh(engine)
    engine.all_logits(answering, tokens[:first], decode=False)
    context, answered = engine.begin(Step((Segment(prompt, tuple(tokens[:end]), PromptAttention()),))), []
    for _ in engine.run(context):
        token = tokens[first + len(answered)]
        answered.append(engine.step(Step((Segment(answering, (token,)),))))
    whole = alone(engine, tokens)
    assert answered
    assert context.logits is not None
    want = torch.cat((whole[end - 1 : end], whole[first : first + len(answered)]))
    return torch.cat((context.logits, *answered)), want


WAYS: list[Callable[[Engine, list[int], random.Random], tuple[torch.Tensor, torch.Tensor]]] = [
    *(in_chunks, as_an_answer, several_answers),
    *(several_prompts, after_kept_tokens, next_to_answers),
]
"""Each computes a prompt in its way. It returns logits, and logits of these tokens in one step of their own."""
