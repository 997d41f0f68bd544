"""The command line of tools.gpu.under_limit."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from edgemoe.bench.rows import PAPER_RETENTION
from edgemoe.console.sizes import parse_size
from edgemoe.engine.engine import StoreModel
from edgemoe.machine.devices import open_device
from edgemoe.policy.settings import RunSettings
from tools.command_line import make_parser, positive


def parse(description: str | None, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = make_parser("tools.gpu.under_limit", description)
    parser.add_argument("store", type=Path, help="the store's directory, in the layout of the device")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--vram-limit", type=parse_size, help="default: none, everything is resident")
    parser.add_argument("--dram-limit", type=parse_size, help="default: as large as all experts")
    parser.add_argument("--levels", default="4", help="levels in bits, such as 4 or 4/2; default: 4")
    parser.add_argument("--in-place", choices=("on", "off"), default="on")
    parser.add_argument(
        "--prefill-rows", type=positive, help="tokens of a prompt in one step; default: the plan's choice"
    )
    parser.add_argument("--prompts", default="128,512,2048", help="tokens of the prompts that are timed")
    parser.add_argument("--new-tokens", type=positive, default=64, help="new tokens in a block")
    parser.add_argument("--blocks", type=positive, default=3)
    parser.add_argument("--batches", default="1,2,4,8", help="sequences in a step; '' measures no batch")
    parser.add_argument(
        "--warm", action="store_true", help="nothing is measured while experts are on the disk"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file that has every row so far, after each")
    return parser.parse_args(argv)


def numbers(text: str) -> list[int]:
    """The numbers of an option such as 1,2,4; none of an empty one."""
    return [int(each) for each in text.split(",") if each]


def open_store(options: argparse.Namespace) -> StoreModel:
    """Opens the store for the device.

    Raises:
        EdgemoeError: no such device, or no such store.
    """
    return StoreModel.open(options.store, open_device(options.device))


def settings_of(options: argparse.Namespace, store: StoreModel) -> RunSettings:
    """The settings that the options stand for: one level for all experts, or the paper's mean retention of several."""
    levels = tuple(int(each) for each in options.levels.split("/"))
    several = RunSettings(levels=levels, retention=PAPER_RETENTION, speculate="auto")
    settings = several if len(levels) > 1 else RunSettings.uniform(levels[0], speculate="auto")
    return settings.with_(in_place=options.in_place) if store.device else settings
