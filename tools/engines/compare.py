"""Compares an export in another engine with edgemoe on the export's store, at the same level.

    python -m tools.engines.compare --store STORE --level 8 --engine vllm --python VENV/bin/python EXPORT
    python -m tools.engines.compare --store STORE --level 4 --engine llama --python VENV/bin/python EXPORT/model.gguf

The prompts are held-out task questions, as token ids, so that both sides read the same tokens. Prints a line of JSON:

- `export`, `engine`, `level`: the directory's name, and as given;
- `same`: prompts whose greedy answers are equal, token for token;
- `near_ties`: of the others, those whose first different token has in edgemoe a log-probability at most TIE nats below
  edgemoe's own token; `gaps` lists these differences for all others;
- `kl`: mean KL divergence of the engine from edgemoe in nats, over the tokens of edgemoe's answers; `kl_max` the
  largest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgemoe.errors import EdgemoeError
from edgemoe.models.tokenizer import load_tokenizer
from tools.command_line import failed, make_parser, positive
from tools.engines.own import answers, opened, prompts
from tools.engines.protocol import Answers, Request

ENGINES = ("vllm", "llama", "transformers")
TIE = 0.125
"""Nats: a step of bf16 between logits of 16 and 32."""

ROOT = Path(__file__).resolve().parents[2]


def compare(ours: Answers, theirs: Answers) -> dict[str, Any]:
    """The numbers of the module's docstring; both have the log-probabilities of edgemoe's answers."""
    same, gaps, at = 0, [], 0
    for mine, other in zip(ours.tokens, theirs.tokens, strict=True):
        pairs = enumerate(zip(mine, other, strict=False))
        first = next((i for i, (a, b) in pairs if a != b), None)
        if first is None and len(mine) == len(other):
            same += 1
        else:
            place = min(len(mine), len(other)) - 1 if first is None else first
            row = ours.logprobs[at + place]
            gaps.append(float(row[mine[place]] - row[other[place]]))
        at += len(mine)
    p, q = ours.logprobs.astype(np.float64), theirs.logprobs.astype(np.float64)
    kl = (np.exp(p) * (p - np.maximum(q, -100))).sum(-1)
    return {
        "prompts": len(ours.tokens),
        "same": same,
        "near_ties": sum(gap <= TIE for gap in gaps),
        "gaps": sorted(round(gap, 3) for gap in gaps if gap > TIE),
        "tokens": len(kl),
        "kl": float(kl.mean()),
        "kl_max": float(kl.max()),
    }


def ask(engine: str, python: Path, request: Request) -> Answers:
    """Runs an engine's process on a request.

    Raises:
        subprocess.CalledProcessError: it failed; its output is on stderr.
    """
    with tempfile.TemporaryDirectory() as name:
        request.save(Path(name))
        command = [str(python), "-m", f"tools.engines.{engine}_child", name]
        subprocess.run(command, check=True, stdout=sys.stderr, env=os.environ | {"PYTHONPATH": str(ROOT)})
        return Answers.load(Path(name))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Compares as the command line says."""
    tokenizer = load_tokenizer(options.store)
    given = prompts(tokenizer, options.prompts)
    context = max(map(len, given)) + options.new_tokens
    with opened(options.store, options.level, context, options.threads) as engine:
        ends = (tokenizer.eos_token_id, engine.store.config.get("eos_token_id"))
        stop = {token for token in ends if type(token) is int}
        ours = answers(engine, given, options.new_tokens, stop)
    request = Request(
        model=str(options.export.resolve()),
        prompts=given,
        answers=ours.tokens,
        new_tokens=options.new_tokens,
        stop=sorted(stop),
        context=context + 1,
        vocab=ours.logprobs.shape[1],
        threads=options.threads,
    )
    found = ask(options.engine, options.python, request)
    directory = options.export if options.export.is_dir() else options.export.parent
    given_by = {"export": directory.name, "engine": options.engine, "level": options.level}
    return given_by | compare(ours, found)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = make_parser("tools.engines.compare", __doc__)
    parser.add_argument("--store", type=Path, required=True, help="the store that was exported")
    parser.add_argument("--level", type=int, choices=(8, 4), required=True, help="level of all experts")
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument(
        "--python", type=Path, default=Path(sys.executable), help="of the engine's environment"
    )
    parser.add_argument("--prompts", type=positive, default=100, help="number of questions")
    parser.add_argument("--new-tokens", type=positive, default=24, help="most tokens of an answer")
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("export", type=Path, metavar="EXPORT", help="directory, or the GGUF file")
    options = parser.parse_args(argv)
    try:
        print(json.dumps(run(options)))
    except EdgemoeError as error:
        return failed("tools.engines.compare", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
