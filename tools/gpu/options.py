"""The command line of gpu_bench.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tools.counts import positive
from tools.synthetic.workload import PRESETS


def parse(description: str | None, argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, described so."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--like", choices=sorted(PRESETS), default="qwen3-30b-a3b", help="whose shapes")
    parser.add_argument("--layers", type=positive, help="instead of the model's own number")
    parser.add_argument("--limits", default="12GB,16GB,24GB", help="of GPU memory")
    parser.add_argument("--dram-large", help="default: room for every expert")
    parser.add_argument("--dram-small", default="4GB")
    parser.add_argument("--prompt-tokens", type=positive, default=128)
    parser.add_argument("--new-tokens", type=_two_or_more, default=32)
    parser.add_argument("--runs", type=positive, default=1)
    parser.add_argument(
        "--offload-layers", type=positive, default=16, help="of the model that is offloaded, in bf16"
    )
    parser.add_argument("--offload-tokens", type=_two_or_more, default=8, help="it decodes")
    parser.add_argument("--minutes", type=float, default=7.0, help="after which no case is begun")
    parser.add_argument(
        "--work", type=Path, help="folder for the store; default: the system's for temporary files"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for everything that was measured")
    return parser.parse_args(argv)


def _two_or_more(text: str) -> int:
    """Tokens, of which there have to be two for the time between them."""
    number = positive(text)
    if number < 2:
        raise argparse.ArgumentTypeError(f"a whole number of 2 or more was wanted, got {text!r}")
    return number
