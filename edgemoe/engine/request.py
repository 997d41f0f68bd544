"""A request for an answer: its prompt, the tokens after it, and what its steps took."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from edgemoe.engine.sampling import Sampler
from edgemoe.engine.thinking import Thinking
from edgemoe.experts.records import StepRecord, StepTotals
from edgemoe.kv.pictures import pictures_of
from edgemoe.kv.sequence import SequenceKV
from edgemoe.policy.importance import PromptAttention

CANCELLED = "cancelled"
"""The reason of a request that was cancelled."""


@dataclass
class Trace:
    """Times and counts of one request. A step's counts are added for all of its rows.

    Args:
        start: seconds of time.perf_counter() at arrival.
        admitted: when the request got its KV; None: it waits.
        token_times: when the host has got each token.
        prefill, decode: sums over the steps that the request took part in.
        drafted, accepted: guesses at the request's own tokens, and how many of them were right.
    """

    start: float
    admitted: float | None = None
    token_times: list[float] = field(default_factory=list)
    prefill: StepTotals = field(default_factory=StepTotals)
    decode: StepTotals = field(default_factory=StepTotals)
    drafted: int = 0
    accepted: int = 0

    @property
    def ttft(self) -> float:
        """Seconds from the start to the first token."""
        return self.token_times[0] - self.start

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None for fewer than two tokens."""
        n = len(self.token_times)
        return (self.token_times[-1] - self.token_times[0]) / (n - 1) if n > 1 else None

    @property
    def drafts(self) -> dict[str, int]:
        """Guesses at the request's tokens that steps checked, and how many of them were right, by name."""
        return {"drafted": self.drafted, "accepted": self.accepted}

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive tokens."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]


@dataclass(eq=False)
class Request:
    """A prompt, and the tokens after it.

    Args:
        tokens: ids of the prompt; grows by the answer's ids, of which the sequence lacks the last.
        sampler: chooses tokens; its settings end the answer.
        start: seconds of time.perf_counter() at arrival.
        on_token: called with each token, one of `stop` included, and the float32 logits [vocab] it was chosen from, in
            the thread that drives the scheduler; True ends the answer.
        on_end: called once, when the request has ended.
        sequence: a sequence of the caller's, which has the prompt's first tokens, fewer than all, and stays at the end;
            None: one is made and freed.
        on_rows: called with the number of rows before it and float32 logits [rows, vocab], for all rows of the prompt
            in turn; None: these are not computed.
        scored: ends the request with its prompt; otherwise the prompt is answered.
        rows_from: the first row of the prompt that `on_rows` is to get.
        client: requests of several clients that wait are admitted in turn.
        thinking: follows the reasoning of the answer, and closes it; None: reasoning is text as any other.

    Attributes:
        cached: tokens of the prompt that are not computed again.
        prompt_tokens: number of tokens that run as a prompt: the prompt's, or all so far where they are computed again.
        length: number of these that the sequence has.
        partly: tokens that the layers of the step under way amount to.
        pictures: the pictures of the prompt, whose features only this request has; None: it has none.
        reason: why it ended: stop, length, context, CANCELLED, or "scored"; None before, and after an error.
        error: the error that ended it.
    """

    tokens: list[int]
    sampler: Sampler
    start: float = field(default_factory=time.perf_counter)
    on_token: Callable[[int, torch.Tensor], bool] = lambda token, logits: False
    on_end: Callable[[], None] = lambda: None
    sequence: SequenceKV | None = None
    on_rows: Callable[[int, torch.Tensor], None] | None = None
    scored: bool = False
    rows_from: int = 0
    client: str = ""
    thinking: Thinking | None = None
    reason: str | None = None
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.prompt = self.prompt_tokens = len(self.tokens)
        self.trace = Trace(self.start)
        self.cancelled, self.keeps_kv = False, self.sequence is not None
        own = pictures_of(self.tokens)
        self.attention, self.pictures = PromptAttention(), own.of_another_prompt() if own else None
        self.cached = self.length = self.sequence.length if self.sequence else 0
        self.partly = 0

    @property
    def ended(self) -> bool:
        """Whether no step will run for it any more."""
        return self.reason is not None or self.error is not None

    def next_token(self, logits: torch.Tensor) -> int:
        """Chooses the token after `tokens`, which gets it: the sampler's, or one that closes the reasoning.

        Args:
            logits: float32 [vocab]; not changed.

        Raises:
            UserError: the grammar is too complex to follow.
            ModelRefused: the tokenizer cannot decode the token.
        """
        new, thinking = len(self.tokens) - self.prompt, self.thinking
        token = thinking.forced() if thinking else None
        if token is not None:
            self.sampler.take(token)
        else:
            scores = thinking.masked(self.tokens, logits) if thinking else logits
            token = self.sampler.next(self.tokens, scores, new)
        if thinking:
            thinking.take(token)
        self.tokens.append(token)
        return token


class Sampled(NamedTuple):
    """A step's logits from which tokens of one request are to be chosen.

    Attributes:
        request: the request.
        logits: float32 [rows, vocab]: after the last token, and after each guess.
        drafts: the guesses, one fewer than rows.
        record: the record of the step.
        together: all requests of the step.
    """

    request: Request
    logits: torch.Tensor
    drafts: tuple[int, ...]
    record: StepRecord
    together: tuple[Request, ...]
