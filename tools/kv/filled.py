"""Times decode tokens after a long context, by the format of keys and values, under one limit.

    python -m tools.kv.filled STORE [--limit 3GB] [--context 32768] [--filled 0 16384] [--formats bf16 q8_0 q4_0]
        [--tokens 24] [--rounds 2] [--attention]

The context is filled synthetically: random keys and values are stored in place of a prompt's, which takes seconds
instead of minutes. Times do not depend on their content; the tokens that follow are random too. Shorter contexts come
first: experts have the memory that the KV has not come to yet, and a row ends with the peak so far. Formats take turns,
`--rounds` times, each in an engine of its own, whose first third of the tokens warms the cache of experts. With
--attention no engine is opened: attention alone, of all layers, is timed at each length, and the store gives its shape.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

from edgemoe.console.sizes import parse_size
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.errors import EdgemoeError
from edgemoe.experts.records import StepTotals
from edgemoe.kernels.native.attention import NativeAttention
from edgemoe.kernels.native.attention_rows import LayerKV
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.step import Segment, Step
from edgemoe.policy.settings import RunSettings
from tools.command_line import failed, make_parser, positive
from tools.kv.quality import format_of

PART = 1024
"""Tokens that are stored at once."""


def fill(sequence: SequenceKV, tokens: int) -> None:
    """Stores random keys and values of so many tokens."""
    generator = torch.Generator().manual_seed(0)
    sequence.crop(0)
    while sequence.length < tokens:
        rows = min(PART, tokens - sequence.length)
        for layer, shape in sequence.shapes.items():
            keys, values = (
                torch.randn(shape.heads, rows, dim, generator=generator).bfloat16()
                for dim in (shape.key_dim, shape.value_dim)
            )
            sequence.write(layer, keys, values)
        sequence.commit(rows)


def decode_times(engine: Engine, sequence: SequenceKV, filled: int, tokens: int) -> tuple[float, float]:
    """Median seconds per token after `filled` tokens, and bytes read from disk per token, over the last two thirds."""
    draw, seconds = random.Random(filled), list[float]()
    with engine.recorded() as records:
        for _ in range(tokens):
            start = time.perf_counter()
            engine.step(Step((Segment(sequence, (draw.randrange(engine.shape.vocab),)),)))
            seconds.append(time.perf_counter() - start)
    timed, counted = seconds[tokens // 3 :], StepTotals.of(records[tokens // 3 :])
    return median(timed), counted.transfers.ssd_bytes / len(timed)


def attention_seconds(store: StoreModel, sequence: SequenceKV, filled: int, tokens: int) -> float:
    """Seconds of all layers' attention of a token after `filled` tokens, the median of several."""
    shape = sequence.shape
    attention = NativeAttention(store.shape.heads, shape.heads, shape.key_dim, None, shape.key_dim**-0.5)
    qkv = torch.randn(1, (store.shape.heads + 2 * shape.heads) * shape.key_dim).bfloat16()
    rotation = torch.ones(1, shape.key_dim).bfloat16(), torch.zeros(1, shape.key_dim).bfloat16()
    seconds = []
    for _ in range(tokens):
        start = time.perf_counter()
        for keys, values in sequence.slices:
            attention(qkv.clone(), rotation, LayerKV(keys, values, filled, shape.format), None)
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def time_formats(options: argparse.Namespace) -> None:
    """Prints the rows of main's options."""
    opened, settings = StoreModel.open(options.store), RunSettings(levels=(4,), speculate="auto")
    for name in options.formats * options.rounds:
        store = opened.with_kv(format_of(name))
        if options.attention:
            sequence = SequenceKV(store.shape.kv, max(options.filled) + 1)
            fill(sequence, max(options.filled))
            for filled in options.filled:
                took = attention_seconds(store, sequence, filled, options.tokens)
                rate = store.shape.kv.bytes_for(filled) / took / 1e9
                print(f"| {name} | {filled} | {1000 * took:.2f} ms | {rate:.1f} GB/s |", flush=True)
            continue
        plan = store.plan(vram_limit=parse_size(options.limit), settings=settings, context=options.context)
        with Engine(store, plan, settings) as engine:
            engine.fill()
            sequence = engine.sequences.new(reserve=1)
            for filled in sorted(options.filled):
                engine.sequences.reserve(sequence, filled + options.tokens)
                fill(sequence, filled)
                took, read = decode_times(engine, sequence, filled, options.tokens)
                blocks, peak = min(engine.memory.blocks.values()), engine.peak.bytes
                cells = f"{1000 * took:.1f} ms | {read / 1e6:.1f} MB | {blocks} of {plan.experts}"
                print(f"| {name} | {filled} | {cells} | {peak / 1e6:.0f} MB at most |", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one row per format and length, and with --attention the rate at which bytes of the KV are read."""
    parser = make_parser("tools.kv.filled", __doc__)
    parser.add_argument("store", type=Path)
    parser.add_argument("--limit", default="3GB")
    parser.add_argument("--context", type=positive, default=32768)
    parser.add_argument("--filled", type=int, nargs="+", default=[0, 16384])
    parser.add_argument("--formats", nargs="+", default=["bf16", "q8_0", "q4_0"])
    parser.add_argument("--tokens", type=positive, default=24)
    parser.add_argument("--rounds", type=positive, default=2)
    parser.add_argument("--attention", action="store_true")
    given = parser.parse_args(argv)
    try:
        time_formats(given)
    except EdgemoeError as error:
        return failed("tools.kv.filled", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
