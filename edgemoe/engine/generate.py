"""Answers: tokens one after another, their text streamed, and the time and bytes of each answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from tokenizers.decoders import DecodeStream

from edgemoe.engine.engine import Engine
from edgemoe.engine.sampling import Sampler
from edgemoe.experts.use import ExpertUse, fraction_at, mean_bits
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.step import Segment, Step
from edgemoe.machine.process import peak_resident_bytes
from prefetch.counts import TransferCounts
from storage.base import LEVELS
from storage.untrusted import foreign_code

_DECODES = "a tokenizer that decodes the model's tokens"


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
    """Of these, experts computed at more bits than scheduled, because their planes were resident."""
    cpu_experts: int
    """Of these, experts that the CPU computed from DRAM beside a device; 0 without a device."""
    effective_retention: float | None
    """Fraction of (token, expert) pairs scheduled at the highest level.

    Each token's number of such experts is rounded up, so the fraction can exceed the configured retention ratio.
    """
    bits: float | None
    """Mean bits a weight that decode scheduled; None without decode."""
    predicted_kl: float | None
    """Estimated KL of a new token to the highest level, in nats, by calibrated damage; None where levels go by none."""
    bytes_read: dict[str, int]
    """Bytes moved from each slower tier, ssd and dram, by prefill and decode."""
    read_retries: int
    """Attempts after failures, of reads of experts that succeeded in the end; 0 on a sound disk."""
    peak_vram_bytes: int
    """Peak of the memory that --vram-limit limits (Engine.peak_bytes)."""
    peak_process_bytes: int
    """Peak resident memory of the whole process, by the operating system's count."""
    vram_limit_bytes: int
    finish_reason: str
    """One of stop, length and context."""

    def as_json(self) -> dict[str, object]:
        """Returns the fields as a JSON object."""
        return asdict(self)


@dataclass
class Trace:
    """Times and counts of one generation.

    Args:
        start: seconds of time.perf_counter() before templating.
        token_times: of each token, when the host has it.
        prefill, decode: transfers.
        prefill_use, decode_use: experts by level.
    """

    start: float
    token_times: list[float] = field(default_factory=list)
    prefill: TransferCounts = field(default_factory=TransferCounts)
    decode: TransferCounts = field(default_factory=TransferCounts)
    prefill_use: ExpertUse = field(default_factory=ExpertUse)
    decode_use: ExpertUse = field(default_factory=ExpertUse)

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
    def gaps(self) -> list[float]:
        """Seconds between consecutive tokens."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]


def decode_tokens(
    engine: Engine, sequence: SequenceKV, tokens: list[int], cached: int, sampler: Sampler, trace: Trace
) -> Iterator[int]:
    """Yields tokens after a prompt, without end.

    Args:
        engine: runs the steps.
        sequence: has the first `cached` tokens.
        tokens: ids of the prompt; grows by each yielded token, of which the sequence lacks the last.
        cached: number of tokens that are not computed again, less than all.
        sampler: chooses tokens.
        trace: collects times and counts.
    """
    engine.take_counts()
    engine.take_use()
    logits = engine.prefill(sequence, tokens[cached:])
    trace.prefill, trace.prefill_use = engine.take_counts(), engine.take_use()
    while True:
        token = sampler.next(tokens, logits)
        trace.token_times.append(time.perf_counter())
        if len(trace.token_times) > 1:
            engine.observe_token(trace.token_times[-1] - trace.token_times[-2])
        tokens.append(token)
        yield token
        logits = engine.step(Step((Segment(sequence, (token,)),)))[0]
        trace.decode = trace.decode + engine.take_counts()
        trace.decode_use = trace.decode_use + engine.take_use()


def generate(
    engine: Engine,
    tokenizer: Any,
    sequence: SequenceKV,
    tokens: list[int],
    cached: int,
    sampler: Sampler,
    start: float,
    on_text: Callable[[str], None],
) -> Answer:
    """Streams one answer.

    Args:
        engine: runs the steps.
        tokenizer: a fast tokenizer of transformers.
        sequence: has the first `cached` of `tokens`.
        tokens: ids of the whole prompt; grows by the answer's ids.
        cached: number of reused tokens.
        sampler: chooses tokens; its settings end the answer.
        start: time.perf_counter() before templating and tokenizing, in seconds.
        on_text: called with each piece of text as soon as it is complete.

    Raises:
        ContextExceeded: the prompt does not fit; nothing is computed.
        ModelRefused: the tokenizer cannot decode a token.
        KeyboardInterrupt: sequence and tokens are consistent.
    """
    prompt, sampling = len(tokens), sampler.sampling
    trace = Trace(start)
    stream = DecodeStream(skip_special_tokens=True)
    answer: list[int] = []
    shown, reason = "", "length"
    for token in decode_tokens(engine, sequence, tokens, cached, sampler, trace):
        if token in sampling.stop:
            reason = "stop"
            break
        answer.append(token)
        with foreign_code(_DECODES):
            piece = stream.step(tokenizer.backend_tokenizer, token)
        if piece:
            shown += piece
            on_text(piece)
        if len(answer) >= sampling.max_new_tokens:
            break
        if sequence.length >= sequence.context:
            reason = "context"
            break
    with foreign_code(_DECODES):
        text = tokenizer.decode(answer, skip_special_tokens=True)
    # The stream withholds an incomplete character; the whole text has a replacement character in its place.
    if text != shown and text.startswith(shown):
        on_text(text[len(shown) :])
    return _answer(engine, text, prompt, cached, trace, reason)


def _answer(engine: Engine, text: str, prompt: int, cached: int, trace: Trace, reason: str) -> Answer:
    decode, steps = trace.decode, len(trace.token_times) - 1
    both, use = trace.prefill + decode, trace.prefill_use + trace.decode_use
    return Answer(
        text=text,
        prompt_tokens=prompt,
        cached_tokens=cached,
        new_tokens=len(trace.token_times),
        ttft_s=trace.ttft,
        tpot_s=trace.tpot,
        hit_rate={
            "vram": decode.vram_hits / decode.requests if decode.requests else None,
            "dram": decode.dram_hits / decode.requests if decode.requests else None,
        },
        ssd_bytes_per_token=decode.ssd_bytes / steps if steps > 0 else None,
        levels={str(level): use.experts.get(level, 0) for level in LEVELS},
        reused=use.reused,
        cpu_experts=both.left_below,
        effective_retention=fraction_at(use.scheduled, engine.settings.levels[0]),
        bits=mean_bits(trace.decode_use.scheduled),
        predicted_kl=trace.decode_use.damage / steps if steps > 0 and engine.settings.priced else None,
        bytes_read={"ssd": both.ssd_bytes, "dram": both.dram_bytes},
        read_retries=both.read_retries,
        peak_vram_bytes=engine.peak_bytes(),
        peak_process_bytes=peak_resident_bytes(),
        vram_limit_bytes=engine.plan.vram_limit_bytes,
        finish_reason=reason,
    )
