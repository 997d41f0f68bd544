"""One prompt and the tokens decoded after it: times, bytes and experts."""

from __future__ import annotations

import time
from dataclasses import dataclass

from edgemoe.bench.prompts import Encode
from edgemoe.console.prefill import prefilling
from edgemoe.engine.engine import Engine
from edgemoe.engine.request import Request
from edgemoe.engine.sampling import Sampler, Sampling
from edgemoe.engine.scheduler import Scheduler
from edgemoe.experts.use import ExpertUse
from edgemoe.kv.sequence import SequenceKV
from edgemoe.machine.process import disk_read_bytes
from edgemoe.prefetch.counts import TransferCounts


@dataclass(frozen=True)
class Phase:
    """Bytes moved and experts used in one phase, prefill or decode."""

    counts: TransferCounts
    use: ExpertUse


@dataclass(frozen=True)
class Sample:
    """One run of one prompt. Seconds, bytes, tokens.

    Args:
        prompt_tokens: the number of tokens of the prompt; none of them was cached.
        ttft_s: time from the start of templating and tokenizing to the first token.
        tpot_s: mean time of a token after the first.
        itl_s: every gap between two tokens: one for each decode step.
        prefill_s: time from the prompt's token ids to the first token, without templating and tokenizing.
        prefill: counts of the prompt.
        decode: counts of the tokens after the first.
        drafts: guesses at further tokens that steps checked, as drafted, and how many were right, as accepted.
        disk_read_bytes: the operating system's count of bytes read; None where it keeps none.
        load_s: time to open the engine that this ran on.
        peak_vram_bytes: peak memory of the process so far, less its memory before the engine was opened.
        peak_process_bytes: peak memory of the process so far.
        tokens: the ids that were decoded.
    """

    prompt_tokens: int
    ttft_s: float
    tpot_s: float
    itl_s: list[float]
    prefill_s: float
    prefill: Phase
    decode: Phase
    disk_read_bytes: int | None
    load_s: float
    peak_vram_bytes: int
    peak_process_bytes: int
    tokens: list[int]
    drafts: dict[str, int]


def greedy(new_tokens: int) -> Sampler:
    """A sampler that takes the likeliest token, `new_tokens` times; no token ends the answer before."""
    return Sampler(Sampling(0, 1, 0, 1, 0, new_tokens, frozenset()))


def take_sample(
    engine: Engine, sequence: SequenceKV, encode: Encode, new_tokens: int, *, load_s: float = 0.0
) -> Sample:
    """Runs a prompt and decodes `new_tokens` (2 or more) greedily.

    Args:
        engine: the engine that runs; its counters are reset.
        sequence: the sequence; it is emptied first.
        encode: makes the prompt; timed.
        new_tokens: number of decoded tokens, the first included.
        load_s: load_s of the sample.

    Raises:
        ContextExceeded: the sequence is too short.
        DamagedData: an expert cannot be read.
    """
    sequence.crop(0)
    disk = disk_read_bytes()
    start = time.perf_counter()
    tokens = encode()
    encoded, request = time.perf_counter(), Request(tokens, greedy(new_tokens), start, sequence=sequence)
    with prefilling(lambda: (sequence.length, request.prompt)):
        Scheduler(engine).run(request)
    trace = request.trace
    assert trace.tpot is not None
    return Sample(
        prompt_tokens=request.prompt,
        ttft_s=trace.ttft,
        tpot_s=trace.tpot,
        itl_s=trace.gaps,
        prefill_s=trace.token_times[0] - encoded,
        prefill=Phase(trace.prefill.transfers, trace.prefill.use),
        decode=Phase(trace.decode.transfers, trace.decode.use),
        disk_read_bytes=None if disk is None else (disk_read_bytes() or 0) - disk,
        load_s=load_s,
        peak_vram_bytes=engine.peak.bytes,
        peak_process_bytes=engine.peak.process_bytes,
        tokens=tokens[request.prompt :],
        drafts=trace.drafts,
    )
