"""Times cold prompts in one long step and in steps of fewer rows, and counts what they read.

    python -m tools.timing.prompts --model w1-store --vram-limit 2.3GB --exact 4 --prompt-file book.txt
        [--prompt-tokens 512,2048,8192] [--prefill-rows 512] [--rounds 1] [--fill]

A new engine runs each prompt, the two ways alternating; its cache is empty, or with --fill has what fits. Prints a JSON
line for each: seconds to the first token, seconds in attention by the compiled kernel, bytes read, and these as a
fraction of all experts at that level. Tokens are the demo model's.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgemoe.bench.prompts import text_prompts
from edgemoe.console.sizes import parse_size
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.errors import EdgemoeError
from edgemoe.experts.records import StepTotals
from edgemoe.models.demo import DEMO
from edgemoe.models.tokenizer import load_tokenizer
from edgemoe.policy.settings import RunSettings
from tools.command_line import failed, make_parser, positive, two_or_more
from tools.timing.attention_clock import attention_clock


def one_prompt(
    store: StoreModel, level: int, limit: int | None, tokens: list[int], rows: int | None, fill: bool
) -> dict[str, Any]:
    """Runs one prompt on an engine of its own, whose cache is empty, or filled."""
    settings = RunSettings(levels=(level,), exact=True, speculate="auto")
    plan = store.plan(vram_limit=limit, settings=settings, context=len(tokens) + 1, prefill_rows=rows)
    with Engine(store, plan, settings) as engine:
        sequence = engine.sequences.new()
        if fill:
            engine.fill()
        with attention_clock() as attention, engine.recorded() as records:
            start = time.perf_counter()
            engine.prefill(sequence, tokens)
            seconds = time.perf_counter() - start
        read, peak = StepTotals.of(records).transfers.ssd_bytes, engine.peak.bytes
    return {
        "prompt_tokens": len(tokens),
        "prefill_rows": plan.prefill_rows,
        "ttft_s": seconds,
        "attention_s": sum(attention),
        "ssd_bytes": read,
        "of_experts": read / (store.form.bytes_at(level) * store.shape.experts),
        "workspace_bytes": plan.workspace_bytes,
        "long_step_bytes": plan.long_step_bytes,
        "peak_bytes": peak,
        "vram_limit_bytes": plan.vram_limit_bytes,
    }


def measure(options: argparse.Namespace) -> None:
    """Runs all prompts of all rounds; prints a line for each."""
    store, tokenizer = StoreModel.open(options.model), load_tokenizer(DEMO)
    for number in options.prompt_tokens:
        prompts = text_prompts(tokenizer, options.prompt_file, number, options.rounds, 0)
        for turn, encode in enumerate(prompts.prompts):
            ways = [None, options.prefill_rows]
            for rows in ways[:: -1 if turn % 2 else 1]:
                made = one_prompt(store, options.exact, options.vram_limit, encode(), rows, options.fill)
                gc.collect()  # the engine's memory is freed before the next one opens
                print(json.dumps({"round": turn} | made), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = make_parser("tools.timing.prompts", __doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--vram-limit", type=parse_size)
    parser.add_argument("--exact", type=positive, default=4)
    parser.add_argument("--prompt-file", type=Path)
    lengths = [512, 2048, 8192]
    parser.add_argument(
        "--prompt-tokens", type=lambda text: [two_or_more(one) for one in text.split(",")], default=lengths
    )
    parser.add_argument("--prefill-rows", type=two_or_more, default=512)
    parser.add_argument("--rounds", type=positive, default=1)
    parser.add_argument(
        "--fill", action="store_true", help="read the experts that fit before the clock starts"
    )
    try:
        measure(parser.parse_args(argv))
    except EdgemoeError as error:
        return failed("tools.timing.prompts", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
