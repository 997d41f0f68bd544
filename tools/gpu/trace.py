"""A Perfetto trace of some new tokens."""

from __future__ import annotations

import argparse

import torch

from edgemoe.console.sizes import parse_size
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.kv.step import Segment, Step
from tools.gpu.cases import FOUR

TRACED = 2
"""New tokens in a trace."""


def trace(store: StoreModel, options: argparse.Namespace, limit: int) -> None:
    """Writes what the host, the kernels and the copies did in TRACED new tokens, as a Perfetto trace.

    The tokens follow a prompt and as many others, under the smallest limit with a large DRAM tier, at 4 bits.
    """
    large = (
        parse_size(options.dram_large) if options.dram_large else store.shape.experts * store.form.bytes_at(4)
    )
    plan = store.plan(
        vram_limit=limit, dram_limit=large, settings=FOUR, context=options.prompt_tokens + options.new_tokens
    )
    random = torch.Generator().manual_seed(options.seed)
    prompt = torch.randint(3, store.shape.vocab, (options.prompt_tokens,), generator=random).tolist()
    with Engine(store, plan, FOUR) as engine:
        sequence = engine.sequences.new()
        logits = engine.prefill(sequence, prompt)

        def decode(tokens: int) -> None:
            nonlocal logits
            for _ in range(tokens):
                logits = engine.step(Step((Segment(sequence, (int(logits.argmax()),)),)))[0]

        decode(options.new_tokens - TRACED)
        with torch.profiler.profile() as profile:
            decode(TRACED)
    profile.export_chrome_trace(str(options.trace))
