"""The command line of compare_peers.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from edgemoe.plan import PROCESS_BYTES
from edgemoe.sizes import parse_size

BESIDE_BYTES = PROCESS_BYTES + 100_000_000
"""What edgemoe's process needs of a limit beside its own: the interpreter and libraries, and page cache to run from."""


def parse(argv: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """The command line of compare_peers.py. Lists are of numbers or names joined by commas."""

    def limits(text: str) -> list[int | None]:
        return [None if part == "none" else parse_size(part) for part in text.split(",")]

    def counts(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--store", type=Path, required=True, help="edgemoe's model")
    add("--peer", choices=("llama.cpp", "accelerate"), default="llama.cpp", help="default: llama.cpp")
    add("--gguf", type=Path, help="llama.cpp's model")
    add("--checkpoint", type=Path, help="accelerate's model, as transformers saves it")
    add(
        "--llama-python",
        type=Path,
        metavar="PATH",
        help="a Python that has llama-cpp-python; default: this one",
    )
    add(
        "--settings",
        type=lambda text: text.split(","),
        default=["4", "4/2", "4/0"],
        help="edgemoe's rows: one level is exact, several are at retention 0.75; default: 4,4/2,4/0",
    )
    add(
        "--limits",
        type=limits,
        default=[3 * 10**9, 2 * 10**9, None],
        help="of RAM: 3GB is 3 * 10^9 bytes, 3GiB 3 * 2^30, none counts only; default: 3GB,2GB,none",
    )
    add(
        "--beside",
        type=parse_size,
        default=BESIDE_BYTES,
        help="what edgemoe's process takes beside its own limit; default: 600MB",
    )
    add("--prompt-tokens", type=counts, default=[64, 512], help="default: 64,512")
    add("--prompt-file", type=Path, help="text to cut prompts from; default: conversations")
    add("--new-tokens", type=int, default=64, help="default: 64")
    add("--rounds", type=int, default=3, help="runs of every row; default: 3")
    add("--threads", type=int, default=2, help="of every program; default: 2")
    add("--keep-cache", action="store_true", help="do not drop the page cache before a run: no run is cold")
    add("--seed", type=int, default=0, help="of prompts")
    add(
        "--popularity",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="count the experts chosen, in a run of each program after the others",
    )
    add("--quality", type=Path, help="report of `edgemoe eval --json`, whose KL is put beside the rows")
    add("--json", type=Path, help="file for raw samples and rows")
    add("--plot", type=Path, help="image file to draw the rows into")
    options = parser.parse_args(argv)
    if options.new_tokens < 2 or min(options.rounds, options.threads, *options.prompt_tokens) < 1:
        parser.error(
            "--new-tokens of 2 or more, and rounds, threads and prompt tokens of 1 or more are wanted"
        )
    return options
