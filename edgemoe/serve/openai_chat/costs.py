"""The costs of answers: OpenAI's usage, llama.cpp's timings, and our own counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from edgemoe.serve.protocol.reply import Shape

if TYPE_CHECKING:
    from edgemoe.engine.generate import Answer

_OUTSIDE = {"text", "tokens", "stop_string", "logprobs", "prompt_logprobs"}
"""Fields of an answer that have places of their own."""


def usage(prompts: Sequence[Sequence[int]], answers: Sequence[Answer]) -> Shape:
    """Tokens of a whole request; a prompt with several answers counts once."""
    prompt = sum(len(tokens) for tokens in {tuple(tokens) for tokens in prompts})
    new = sum(answer.new_tokens for answer in answers)
    cached = max((answer.cached_tokens for answer in answers), default=0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": min(cached, prompt)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(answer.reasoning_tokens or 0 for answer in answers)
        },
    }


def timings(answer: Answer) -> Shape:
    """Times and counts of an answer, as llama.cpp names them; milliseconds."""
    prompt_n, predicted_n = answer.prompt_tokens - answer.cached_tokens, answer.new_tokens
    prompt_ms, predicted_ms = (
        1000 * (answer.ttft_s - answer.queue_s),
        1000 * (answer.total_s - answer.ttft_s),
    )
    return {
        "cache_n": answer.cached_tokens,
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / prompt_n if prompt_n else None,
        "prompt_per_second": 1000 * prompt_n / prompt_ms if prompt_ms else None,
        "predicted_n": predicted_n,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": 1000 * answer.tpot_s if answer.tpot_s is not None else None,
        "predicted_per_second": 1 / answer.tpot_s if answer.tpot_s else None,
    }


def counts(answer: Answer) -> Shape:
    """Counts of an answer, under the names of `edgemoe chat --json`."""
    names = [field.name for field in fields(answer)]
    return {name: getattr(answer, name) for name in names if name not in _OUTSIDE}
