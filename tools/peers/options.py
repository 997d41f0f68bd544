"""The command line of tools.peers.compare."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from edgemoe.console.sizes import parse_size
from edgemoe.kernels.registry import AUTO, NAMES
from edgemoe.kv.formats import KINDS
from edgemoe.memory.overhead import PROCESS_BYTES
from tools.command_line import make_parser, positive, two_or_more

Item = TypeVar("Item")

BESIDE_BYTES = PROCESS_BYTES + 100_000_000
"""Bytes that edgemoe's process takes outside --vram-limit: interpreter, libraries, and page cache to run from."""

BESIDE_HELP = "bytes that edgemoe's process takes outside --vram-limit; default: 600MB"


def parse(argv: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """Parses the command line; a list is numbers or names joined by commas."""
    parser = make_parser("tools.peers.compare", description)
    _add_programs(parser)
    _add_cases(parser)
    _add_runs(parser)
    return parser.parse_args(argv)


def _add_programs(parser: argparse.ArgumentParser) -> None:
    """Adds the options that name the programs and their models."""
    add = parser.add_argument
    add(
        "--store",
        type=Path,
        action="append",
        required=True,
        help="edgemoe's model; give it again to run several stores of one model in turn",
    )
    add("--peer", choices=("llama.cpp", "accelerate"), default="llama.cpp", help="default: llama.cpp")
    add("--gguf", type=Path, help="llama.cpp's model")
    add("--checkpoint", type=Path, help="accelerate's model, as transformers saves it")
    add("--llama-python", type=Path, help="a Python that has llama-cpp-python; default: this one")
    add(
        "--settings",
        type=_list_of(str),
        default=["4", "4/2", "4/0"],
        help="edgemoe's rows: one level is exact, several use retention 0.75; the suffix -empty leaves free blocks "
        "unfilled before the prompt; default: 4,4/2,4/0",
    )
    add("--kernel", choices=NAMES, default=AUTO, help="instructions of edgemoe, as `edgemoe chat --kernel`")


def _add_cases(parser: argparse.ArgumentParser) -> None:
    """Adds limits and prompts."""
    add = parser.add_argument
    add(
        "--limits",
        type=_list_of(lambda part: None if part == "none" else parse_size(part)),
        default=[3 * 10**9, 2 * 10**9, None],
        help="limits of RAM: 3GB is 3 * 10^9 bytes, 3GiB 3 * 2^30, none only counts; default: 3GB,2GB,none",
    )
    add("--beside", type=parse_size, default=BESIDE_BYTES, help=BESIDE_HELP)
    add("--prompt-tokens", type=_list_of(positive), default=[64, 512], help="default: 64,512")
    add("--batch", type=_list_of(positive), default=[1], help="prompts that decode together; default: 1")
    add("--prompt-file", type=Path, help="text to cut prompts from; default: conversations")
    add(
        "--context",
        type=positive,
        help="tokens of KV that programs set aside; default: the tokens of prompt and answer",
    )
    add(
        "--kv-cache", choices=KINDS, help="format of keys and values; default: each program's own, of 16 bits"
    )
    add(
        "--peer-states",
        type=Path,
        help="directory of llama.cpp's states after a prompt, which it computes once, without a limit and in pieces, "
        "and loads inside it, so that a long prompt counts in its later tokens alone; its TTFT is not measured",
    )
    add(
        "--no-repacking",
        action="store_false",
        dest="repacking",
        help="llama.cpp multiplies weights as they lie in its file, without a limit too",
    )
    add("--new-tokens", type=two_or_more, default=64, help="default: 64")
    add("--seed", type=int, default=0, help="of prompts")


def _add_runs(parser: argparse.ArgumentParser) -> None:
    """Adds how runs are made and where their results go."""
    add = parser.add_argument
    add("--rounds", type=positive, default=3, help="runs of every row; default: 3")
    add("--threads", type=positive, default=2, help="of every program; default: 2")
    add("--keep-cache", action="store_true", help="do not drop the page cache before a run: no run is cold")
    add(
        "--popularity",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="count the experts chosen, in one more run of each program at the end",
    )
    add(
        "--quality",
        type=Path,
        help="report of `edgemoe eval --json` on the same store, whose KL is shown with the rows",
    )
    add("--json", type=Path, help="file for raw samples and rows")
    add("--plot", type=Path, help="image file to draw the rows into")


def _list_of(kind: Callable[[str], Item]) -> Callable[[str], list[Item]]:
    """A parser of several items joined by commas."""
    return lambda text: [kind(part) for part in text.split(",")]
