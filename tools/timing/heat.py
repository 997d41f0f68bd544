"""Times the first answer of a start with the heat of an earlier run and without it.

    python -m tools.timing.heat --model STORE --text BOOK --vram-limit 3GB [--idle 2] [--rounds 3] [--json]

An earlier run answers some prompts of the text and leaves how hot each expert was. Then starts with and without that
heat take turns: each fills free memory for --idle seconds, as a chat does while its user types, and answers another
prompt of the text. Prints medians of time to the first token, time per later token, and bytes read for the answer.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from edgemoe.engine.engine import Engine
from edgemoe.engine.request import Request
from edgemoe.engine.sampling import Sampler, Sampling
from edgemoe.engine.scheduler import Scheduler
from edgemoe.errors import EdgemoeError, UserError
from edgemoe.evaluate.score import text_windows
from edgemoe.models.heat import mixed
from edgemoe.models.open import open_store
from edgemoe.models.options.groups import Opening
from edgemoe.models.options.run_settings import run_settings
from edgemoe.models.tokenizer import load_tokenizer
from edgemoe.storage.base import ExpertKey
from tools.command_line import failed, make_parser, positive

EARLIER = 4
"""Prompts of the earlier run."""


def answer(engine: Engine, prompt: Sequence[int], new_tokens: int) -> dict[str, float]:
    """Answers greedily; returns seconds to the first token and for a later one, and bytes read."""
    sampling = Sampling(0, 1, 0, 1, 0, new_tokens, frozenset())
    request = Request(list(prompt), Sampler(sampling))
    scheduler = Scheduler(engine)
    try:
        scheduler.run(request)
    finally:
        scheduler.close()
    trace = request.trace
    read = (trace.prefill + trace.decode).transfers.ssd_bytes
    return {"ttft_s": trace.ttft, "tpot_s": trace.tpot or 0.0, "ssd_bytes": read}


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Runs the earlier run, then the starts.

    Raises:
        UserError: the text is too short. EdgemoeError: the model cannot be opened.
    """

    def choose(max_level: int, *, fits: bool, hot: bool = False) -> Any:
        return run_settings(max_level, fits=fits, hot=hot, levels=given.levels)

    opening = Opening(given.model, vram_limit=given.vram_limit, device="cpu", context=1024)
    store, plan, settings = open_store(opening, choose)
    needed = EARLIER + given.rounds
    prompts = text_windows(
        load_tokenizer(store.directory), given.text, needed * given.prompt_tokens, given.prompt_tokens
    )
    if len(prompts) < needed:
        raise UserError(f"{needed} prompts in {given.text}", f"{len(prompts)}", "give a longer text")

    def start(heat: Mapping[ExpertKey, float], prompts: Sequence[Sequence[int]], idle: float) -> Any:
        with Engine(store, plan, settings) as engine:
            engine.fill_first(heat)
            until = time.monotonic() + idle
            engine.fill(lambda: time.monotonic() < until)
            answers = [answer(engine, prompt, given.new_tokens) for prompt in prompts]
            used = engine.heat()
        del engine
        gc.collect()  # its memory is freed before the next one opens
        return answers, used

    _, used = start({}, prompts[:EARLIER], 0.0)
    kept = mixed({}, used)
    found: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    for prompt in prompts[EARLIER:needed]:
        for name, heat in (("without", {}), ("with", kept)):
            found[name] += start(heat, [prompt], given.idle)[0]
    return {
        name: {key: median(each[key] for each in answers) for key in answers[0]} | {"samples": answers}
        for name, answers in found.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = make_parser("tools.timing.heat", __doc__)
    parser.add_argument("--model", type=Path, required=True, help="a store")
    parser.add_argument("--text", type=Path, required=True, help="of the prompts")
    parser.add_argument("--vram-limit", required=True)
    parser.add_argument("--levels", default="4", help="as `edgemoe chat --levels`")
    parser.add_argument("--idle", type=float, default=2.0, help="seconds before the prompt")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--prompt-tokens", type=positive, default=64)
    parser.add_argument("--new-tokens", type=positive, default=32)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(argv)
    try:
        report = measure(given)
    except EdgemoeError as error:
        return failed("tools.timing.heat", error)
    if given.json:
        print(json.dumps(report))
        return 0
    for name, of in report.items():
        print(
            f"{name} heat: first token after {of['ttft_s']:.2f} s, then {1000 * of['tpot_s']:.1f} ms a token, "
            f"{of['ssd_bytes'] / 1e6:.0f} MB read"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
