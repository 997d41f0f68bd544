"""Answers: the text of a request's tokens, streamed, with the time and bytes that it cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from edgemoe.engine.engine import Engine
from edgemoe.engine.request import Request
from edgemoe.engine.sampling import PromptScores, Sampler, TokenLogprobs
from edgemoe.engine.text import TextStream
from edgemoe.engine.thinking import Thinking
from edgemoe.errors import UserError
from edgemoe.experts.use import fraction_at
from edgemoe.grammar.lark import Reasoning
from edgemoe.kv.pictures import pictures_of
from edgemoe.storage.base import LEVELS


@dataclass(frozen=True)
class Answer:
    """One answer with its times (seconds), bytes and counts.

    Field names are JSON names. Counts of experts are of prefill and decode together, except where they say otherwise.
    """

    text: str
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    ttft_s: float
    """Time to the first token."""
    tpot_s: float | None
    """Mean time per later token; None for fewer than two tokens."""
    hit_rate: dict[str, float | None]
    """Fraction of decode's requested experts that the tier had; None without requests."""
    ssd_bytes_per_token: float | None
    """Bytes that decode read; None for fewer than two tokens."""
    levels: dict[str, int]
    """Experts computed at each level; at 0 the skipped ones."""
    reused: int
    """Experts computed at more bits than scheduled, because their planes were resident; part of `experts`."""
    hot: dict[str, int] | None
    """With --policy hotness: experts that are hot at its end, and what has moved while it ran, by its name
    (TransferCounts.transitions); None without."""
    lynx: dict[str, int] | None
    """Steps of decode whose sequences agreed on experts: distinct experts of a layer before and after, summed over
    layers and steps, as active_before and active; and (token, expert) pairs that changed, as remapped. None without."""
    compensated: dict[str, int] | None
    """With --compensate: (token, expert) pairs that were computed with their low-rank compensator, as pairs; experts,
    each once a layer and step, as experts; and bytes of compensators read from disk, as bytes_read. None without."""
    effective_retention: float | None
    """Fraction of (token, expert) pairs scheduled at the highest level.

    Each token's number of such experts is rounded up, so the fraction can exceed the configured retention ratio.
    """
    bits: float | None
    """Mean bits per weight that decode scheduled, compensators included; None without decode."""
    predicted_kl: float | None
    """Estimated KL of a new token to the highest level, in nats, by calibrated damage; None where levels go by none."""
    bytes_read: dict[str, int]
    """Bytes moved from each slower tier, ssd and dram, by prefill and decode."""
    read_retries: int
    """Attempts after failures, of reads of experts that succeeded in the end; 0 on a sound disk."""
    peak_vram_bytes: int
    """Peak of the memory that `limit_bytes` limits (PeakMemory)."""
    peak_process_bytes: int
    """Peak resident memory of the whole process, by the operating system's count."""
    vram_limit_bytes: int
    limit_bytes: int
    """Limit of the memory that peak_vram_bytes counts: --vram-limit, and without a device --dram-limit too."""
    finish_reason: str
    """One of stop, length and context."""
    drafts: dict[str, int] | None
    """With --draft: guesses at further tokens that steps checked, as drafted; and how many of them were right, as
    accepted. None where no step may have guesses."""
    stop_string: str | None
    """The stop string that ended it; None: none did."""
    batch: float | None
    """Mean sequences of a decode step; None without one. Counts of experts and bytes are of all sequences of the steps,
    except ssd_bytes_per_token."""
    tokens: list[int]
    """Ids, without the one that ended the answer."""
    logprobs: list[TokenLogprobs] | None
    """Log probabilities of `tokens`, and of the token that ended the answer; None unless they were requested."""
    prompt_logprobs: list[TokenLogprobs] | None
    """Log probabilities of the prompt's tokens but the first; None unless they were requested."""
    queue_s: float
    """Part of ttft_s: the time until the request got its KV."""
    total_s: float
    """Time to the last token."""
    reasoning_tokens: int | None = None
    """Tokens of reasoning, a part of new_tokens, without its tags; None where the model's tags are not known."""

    def as_json(self) -> dict[str, object]:
        """Returns the fields as a JSON object."""
        return asdict(self)


class Generation:
    """An answer on its way: a request, and the text of its tokens.

    Args:
        engine: the engine of the scheduler that gets the request.
        tokenizer: a fast tokenizer of transformers.
        tokens: ids of the whole prompt; grows by the answer's ids.
        sampler: chooses tokens; its settings end the answer.
        start: time.perf_counter() before templating and tokenizing, in seconds.
        on_text: called with each piece of text as soon as it is complete; True ends the answer.
        client: see Request.
        reasoning: tags of the model's reasoning, which is counted, and ends after `thinking_budget` of the sampling;
            None: they are not known.

    Attributes:
        request: the request that a scheduler gets.
        logprobs: log probabilities of each token so far, where they were requested.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        tokens: list[int],
        sampler: Sampler,
        start: float,
        on_text: Callable[[str], bool | None],
        *,
        client: str = "",
        reasoning: Reasoning | None = None,
    ) -> None:
        self._engine, self._tokenizer, self._sampler, self._on_text = engine, tokenizer, sampler, on_text
        sampling = sampler.sampling
        self._text = TextStream(
            tokenizer, sampling.stop_strings, special_tokens=sampling.special_tokens, after=tokens
        )
        self._ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        top = sampling.prompt_logprobs
        if top is not None and pictures_of(tokens):
            wanted = "a prompt of text alone, for the log probabilities of its tokens"
            raise UserError(wanted, "one with pictures", "leave prompt_logprobs out")
        self._scores = PromptScores(tokens, top) if top is not None else None
        self.request = Request(
            tokens,
            sampler,
            start,
            on_token=self._token,
            client=client,
            thinking=Thinking(tokenizer, reasoning, tokens, sampling.thinking_budget) if reasoning else None,
            on_rows=self._scores.add if self._scores else None,
        )

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs]:
        """Log probabilities of the prompt's tokens run so far, except the first, where they were requested."""
        return self._scores.logprobs if self._scores else []

    def _token(self, token: int, logits: torch.Tensor) -> bool:
        sampling = self._sampler.sampling
        if sampling.top_logprobs is not None:
            self.logprobs.append(TokenLogprobs.of(logits, token, sampling.top_logprobs))
        if token in sampling.stop:
            return True
        self._ids.append(token)
        return self._show(self._text.add(token)) or self._text.stop is not None

    def _show(self, piece: str) -> bool:
        return bool(piece and self._on_text(piece))

    def answer(self) -> Answer:
        """Returns the answer of a request that has ended without an error, and streams what is left of its text.

        Raises:
            ModelRefused: the tokenizer cannot decode its tokens.
        """
        self._show(self._text.end())
        trace, request = self.request.trace, self.request
        decode, totals, both = trace.decode.transfers, trace.decode, trace.prefill + trace.decode
        moved, use, new = both.transfers, both.use, totals.use
        engine, hot = self._engine, self._engine.rules.hot
        return Answer(
            text=self._text.text,
            prompt_tokens=request.prompt,
            cached_tokens=request.cached,
            new_tokens=len(trace.token_times),
            ttft_s=trace.ttft,
            tpot_s=trace.tpot,
            hit_rate={
                "vram": decode.vram_hits / decode.requests if decode.requests else None,
                "dram": decode.dram_hits / decode.requests if decode.requests else None,
            },
            ssd_bytes_per_token=decode.ssd_bytes / totals.tokens if totals.tokens else None,
            levels={str(level): use.experts.get(level, 0) for level in LEVELS},
            reused=use.reused,
            hot={"experts": hot.size} | moved.transitions if hot else None,
            lynx=new.agreement if engine.settings.remapping else None,
            compensated=(
                use.compensation | {"bytes_read": moved.compensator_bytes}
                if engine.settings.compensation
                else None
            ),
            effective_retention=fraction_at(use.experts if hot else use.scheduled, engine.settings.levels[0]),
            bits=new.bits_computed if hot else new.bits_scheduled,
            predicted_kl=new.damage / totals.rows if totals.rows and engine.settings.priced else None,
            bytes_read={"ssd": moved.ssd_bytes, "dram": moved.dram_bytes},
            read_retries=moved.read_retries,
            peak_vram_bytes=engine.peak.bytes,
            peak_process_bytes=engine.peak.process_bytes,
            vram_limit_bytes=engine.plan.vram_limit_bytes,
            limit_bytes=engine.plan.limit_bytes(engine.device),
            finish_reason=request.reason or "",
            drafts=trace.drafts if engine.most_drafts else None,
            stop_string=self._text.stop,
            batch=(totals.rows - totals.drafted) / totals.steps if totals.steps else None,
            tokens=self._ids,
            logprobs=None if self._sampler.sampling.top_logprobs is None else self.logprobs,
            prompt_logprobs=self._scores.logprobs if self._scores else None,
            queue_s=(trace.admitted or trace.start) - trace.start,
            total_s=trace.token_times[-1] - trace.start,
            reasoning_tokens=request.thinking.tokens if request.thinking else None,
        )
