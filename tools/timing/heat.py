"""Times the first answer of a start with the heat of an earlier run and without it.

    python -m tools.timing.heat --model STORE --text BOOK --vram-limit 3GB [--idle 2] [--rounds 3] [--json]

An earlier run answers some prompts of the text and leaves how hot each expert was. Then starts with and without that
heat take turns: each fills free memory for --idle seconds, as a chat does while its user types, and answers another
prompt of the text. Prints medians of time to the first token, time per later token, and bytes read for the answer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from edgemoe.errors import EdgemoeError, UserError
from edgemoe.evaluate.score import text_windows
from edgemoe.models.heat import mixed
from edgemoe.models.open import open_store
from edgemoe.models.options.groups import Opening
from edgemoe.models.options.run_settings import run_settings
from edgemoe.models.tokenizer import load_tokenizer
from tools.command_line import failed, make_parser, positive
from tools.timing.starts import Start

EARLIER = 4
"""Prompts of the earlier run."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the earlier run, then the starts.

    Raises:
        UserError: the text is too short. EdgemoeError: the model cannot be opened.
    """

    def choose(max_level: int, *, fits: bool, hot: bool = False) -> Any:
        return run_settings(max_level, fits=fits, hot=hot, levels=options.levels)

    opening = Opening(options.model, vram_limit=options.vram_limit, device="cpu", context=1024)
    store, plan, settings = open_store(opening, choose)
    needed = EARLIER + options.rounds
    prompts = text_windows(
        load_tokenizer(store.directory), options.text, needed * options.prompt_tokens, options.prompt_tokens
    )
    if len(prompts) < needed:
        raise UserError(f"{needed} prompts in {options.text}", f"{len(prompts)}", "give a longer text")

    start = Start(store, plan, settings, options.new_tokens)
    _, used = start.answers({}, prompts[:EARLIER], 0.0)
    kept = mixed({}, used)
    found: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    for prompt in prompts[EARLIER:needed]:
        for name, heat in (("without", {}), ("with", kept)):
            found[name] += start.answers(heat, [prompt], options.idle)[0]
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
            f"{name} heat: first token after {of['ttft_s']:.2f} s, then {1000 * of['tpot_s']:.1f} ms per token, "
            f"{of['ssd_bytes'] / 1e6:.0f} MB read"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
