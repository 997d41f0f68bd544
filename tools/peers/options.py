"""The command line of compare_peers.py."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from edgemoe.console.sizes import parse_size
from edgemoe.memory.plan import PROCESS_BYTES
from tools.counts import positive

Item = TypeVar("Item")

BESIDE_BYTES = PROCESS_BYTES + 100_000_000
"""What edgemoe's process needs of a limit beside its own: the interpreter and libraries, and page cache to run from."""


def parse(argv: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """The command line of compare_peers.py. Lists are of numbers or names joined by commas."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_programs(parser)
    _add_cases(parser)
    _add_runs(parser)
    _add_reports(parser)
    options = parser.parse_args(argv)
    if options.new_tokens < 2:
        parser.error(f"--new-tokens of 2 or more was wanted, got {options.new_tokens}")
    return options


def _add_programs(parser: argparse.ArgumentParser) -> None:
    """What is compared with what."""
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
        type=_list_of(str),
        default=["4", "4/2", "4/0"],
        help="edgemoe's rows: one level is exact, several are at retention 0.75; with -empty behind them room is not "
        "filled before the prompt; default: 4,4/2,4/0",
    )


def _add_cases(parser: argparse.ArgumentParser) -> None:
    """Under which limits, on what."""
    add = parser.add_argument
    add(
        "--limits",
        type=_list_of(lambda part: None if part == "none" else parse_size(part)),
        default=[3 * 10**9, 2 * 10**9, None],
        help="of RAM: 3GB is 3 * 10^9 bytes, 3GiB 3 * 2^30, none counts only; default: 3GB,2GB,none",
    )
    add(
        "--beside",
        type=parse_size,
        default=BESIDE_BYTES,
        help="what edgemoe's process takes beside its own limit; default: 600MB",
    )
    add("--prompt-tokens", type=_list_of(positive), default=[64, 512], help="default: 64,512")
    add("--prompt-file", type=Path, help="text to cut prompts from; default: conversations")
    add("--new-tokens", type=int, default=64, help="default: 64")
    add("--seed", type=int, default=0, help="of prompts")


def _add_runs(parser: argparse.ArgumentParser) -> None:
    """How often, and how."""
    add = parser.add_argument
    add("--rounds", type=positive, default=3, help="runs of every row; default: 3")
    add("--threads", type=positive, default=2, help="of every program; default: 2")
    add("--keep-cache", action="store_true", help="do not drop the page cache before a run: no run is cold")
    add(
        "--popularity",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="count the experts chosen, in a run of each program after the others",
    )


def _add_reports(parser: argparse.ArgumentParser) -> None:
    """What becomes of it."""
    add = parser.add_argument
    add("--quality", type=Path, help="report of `edgemoe eval --json`, whose KL is put beside the rows")
    add("--json", type=Path, help="file for raw samples and rows")
    add("--plot", type=Path, help="image file to draw the rows into")


def _list_of(kind: Callable[[str], Item]) -> Callable[[str], list[Item]]:
    """Reads several of a kind, joined by commas."""
    return lambda text: [kind(part) for part in text.split(",")]
