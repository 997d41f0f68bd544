"""From logits to text: sampling, stopping, streaming, and what each answer cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from tokenizers.decoders import DecodeStream

from edgemoe.engine.engine import Engine
from edgemoe.engine.sampling import Sampler
from edgemoe.experts.use import ExpertUse, fraction_at
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.step import Segment, Step
from edgemoe.machine.process import peak_resident_bytes
from prefetch.counts import TransferCounts
from storage.base import LEVELS


@dataclass(frozen=True)
class Answer:
    """One answer and what it cost. Field names are the JSON's. Seconds, bytes, tokens."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    ttft_s: float
    tpot_s: float | None
    """None for fewer than two tokens."""
    hit_rate: dict[str, float | None]
    """Decode only, share of experts asked for; None where nothing was asked."""
    ssd_bytes_per_token: float | None
    """Decode only."""
    levels: dict[str, int]
    """Experts computed at each level, prefill and decode; 0 are the skipped ones."""
    reused: int
    """Experts of these computed at more bits than scheduled, because their planes were there."""
    cpu_experts: int
    """Experts of these that the CPU computed from DRAM beside a device; without a device that is not counted."""
    effective_retention: float | None
    """Share of (token, expert) pairs scheduled at the highest level; of two, rounding up makes it more than asked."""
    bytes_read: dict[str, int]
    """Bytes that moved from each slower tier, prefill and decode: ssd, dram."""
    peak_vram_bytes: int
    """See Engine.peak_bytes."""
    peak_process_bytes: int
    """By the operating system's count: what the whole process had resident at most."""
    vram_limit_bytes: int
    finish_reason: str
    """stop, length or context."""

    def as_json(self) -> dict[str, object]:
        """One JSON object."""
        return asdict(self)


@dataclass
class Trace:
    """Times of one generation: t0 is before templating, then one per token held by the host."""

    start: float
    token_times: list[float] = field(default_factory=list)
    prefill: TransferCounts = field(default_factory=TransferCounts)
    decode: TransferCounts = field(default_factory=TransferCounts)
    prefill_use: ExpertUse = field(default_factory=ExpertUse)
    decode_use: ExpertUse = field(default_factory=ExpertUse)

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.token_times[0] - self.start

    @property
    def tpot(self) -> float | None:
        """Mean seconds per output token after the first; None for fewer than two."""
        n = len(self.token_times)
        return (self.token_times[-1] - self.token_times[0]) / (n - 1) if n > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive tokens."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]


def decode_tokens(
    engine: Engine, sequence: SequenceKV, tokens: list[int], cached: int, sampler: Sampler, trace: Trace
) -> Iterator[int]:
    """Endless tokens after a prompt whose first `cached` tokens are in the sequence already.

    `tokens` grows by every token yielded; the last one yielded is not in the sequence yet.
    """
    engine.take_counts()
    engine.take_use()
    logits = engine.prefill(sequence, tokens[cached:])
    trace.prefill, trace.prefill_use = engine.take_counts(), engine.take_use()
    while True:
        token = sampler.next(tokens, logits)
        trace.token_times.append(time.perf_counter())
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
        engine: to run.
        tokenizer: a fast tokenizer of transformers.
        sequence: holds the first `cached` of `tokens`.
        tokens: the whole prompt's ids; grows by the answer's.
        cached: tokens reused.
        sampler: chooses tokens, and knows what ends an answer.
        start: time.perf_counter() before templating and tokenizing.
        on_text: called with every piece of text as it becomes complete.

    Raises:
        ContextExceeded: the prompt does not fit, before anything is run.
        KeyboardInterrupt: after leaving sequence and tokens consistent.
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
        if piece := stream.step(tokenizer.backend_tokenizer, token):
            shown += piece
            on_text(piece)
        if len(answer) >= sampling.max_new_tokens:
            break
        if sequence.length >= sequence.context:
            reason = "context"
            break
    text = tokenizer.decode(answer, skip_special_tokens=True)
    # The stream holds back a character whose bytes are not all there; at the end they never will be.
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
        bytes_read={"ssd": both.ssd_bytes, "dram": both.dram_bytes},
        peak_vram_bytes=engine.peak_bytes(),
        peak_process_bytes=peak_resident_bytes(),
        vram_limit_bytes=engine.plan.vram_limit_bytes,
        finish_reason=reason,
    )
