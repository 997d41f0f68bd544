"""Writes a store of a model of any family with random weights, without a checkpoint: a whole model in a minute or two.

    python -m tools.synthetic.family_store qwen3.6-35b-a3b --layout cuda DST
    python -m tools.synthetic.family_store glm-4.5-air --layers 6 --experts 16 --vocab 32000 DST

The names and sizes of its tensors come from transformers' modules on the meta device. Experts are drawn as in
tools.synthetic.store; dense weights repeat a few million random numbers. Answers are gibberish.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from edgemoe.console.progress import ByteProgress
from edgemoe.errors import EdgemoeError
from edgemoe.storage.record.layout import LAYOUTS
from edgemoe.storage.store.manifest import DENSE_BITS
from tools.command_line import failed, make_parser, positive
from tools.synthetic.family_sizes import MODELS, WHOLE, config_of
from tools.synthetic.family_writing import make_family_store


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = make_parser("tools.synthetic.family_store", __doc__)
    parser.add_argument("model", choices=sorted(MODELS), help="model of the sizes")
    parser.add_argument("destination", type=Path, metavar="DST", help="the store's directory")
    parser.add_argument("--layers", type=positive, help="default: the model's, where it is known, else 6")
    parser.add_argument("--experts", type=positive, help="in a layer; default: the model's, else 16")
    parser.add_argument("--vocab", type=positive, default=151936, help="tokens; default: 151936")
    parser.add_argument("--max-level", type=int, choices=(8, 4), default=4, help="bits of an expert weight")
    parser.add_argument("--dense-bits", type=int, choices=DENSE_BITS, default=8, help="of the other matrices")
    parser.add_argument(
        "--distinct",
        type=positive,
        metavar="N",
        help="draw the experts of N layers, which stay in memory, and repeat them; default: all are drawn",
    )
    parser.add_argument("--layout", choices=sorted(LAYOUTS), default="cuda", help="of the records")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    given = parse(argv)
    layers, experts = WHOLE.get(given.model, (6, 16))
    config = config_of(given.model, given.layers or layers, given.experts or experts, given.vocab)
    try:
        with ByteProgress(f"synthesizing {given.destination.name}") as progress:
            make_family_store(
                config,
                given.destination,
                max_level=given.max_level,
                dense_bits=given.dense_bits,
                layout=LAYOUTS[given.layout],
                update=progress.update,
                distinct=given.distinct,
            )
    except EdgemoeError as error:
        return failed("tools.synthetic.family_store", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
