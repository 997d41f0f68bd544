"""The command line of tools.gpu.bench."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from edgemoe.bench.synthetic.workload import PRESETS
from tools.command_line import make_parser, positive, two_or_more


def parse(description: str | None, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = make_parser("tools.gpu.bench", description)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument(
        "--like", choices=sorted(PRESETS), default="qwen3-30b-a3b", help="model of the shapes"
    )
    parser.add_argument("--layers", type=positive, help="layers, instead of the model's number")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limits", default="12GB,16GB,24GB", help="of GPU memory")
    parser.add_argument("--dram-large", help="default: as large as all experts")
    parser.add_argument("--dram-small", default="4GB")
    parser.add_argument("--prompt-tokens", type=positive, default=128)
    parser.add_argument("--new-tokens", type=two_or_more, default=32)
    parser.add_argument("--runs", type=positive, default=1)
    parser.add_argument(
        "--offload-layers", type=positive, default=16, help="of the model that is offloaded, in bf16"
    )
    parser.add_argument("--offload-tokens", type=two_or_more, default=8, help="decoded by that model")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="TEXT",
        help='measures rows whose name has it, such as "16 GB", "from SSD" or "accelerate"; several add up',
    )
    parser.add_argument("--minutes", type=float, default=7.0, help="time after which no case starts")
    parser.add_argument(
        "--work", type=Path, help="folder for the store; default: the system's for temporary files"
    )
    parser.add_argument(
        "--trace", type=Path, help="file for a Perfetto trace of new tokens, .json or .json.gz"
    )
    parser.add_argument("--json", type=Path, help="file for the whole report")
    return parser.parse_args(argv)
