"""Writes a store with a real model's shapes and random weights (edgemoe.bench.synthetic), in a directory of its own.

    python -m tools.synthetic.store --like qwen3-30b-a3b --layers 16 --vocab 32000 DST
    python -m tools.synthetic.store --from-gguf FILE DST      shapes, dense weights and routers from a qwen3moe GGUF

`edgemoe bench --synthetic NAME` makes a store of a known name in the cache. The experts of a GGUF are not read, so
answers are gibberish too. `--like tiny` (2 layers of 8 experts) is for tests.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from edgemoe.bench.synthetic.store import Synthetic, source_of, synthesize
from edgemoe.bench.synthetic.workload import PRESETS, random_dense
from edgemoe.console.progress import ByteProgress
from edgemoe.errors import EdgemoeError
from edgemoe.storage.record.layout import LAYOUTS
from edgemoe.storage.store.manifest import DENSE_BITS
from tools.command_line import failed, make_parser
from tools.synthetic.gguf_dense import Gguf
from tools.synthetic.sizes import add_sizes, shape_of


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = make_parser("tools.synthetic.store", __doc__)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--like", choices=sorted(PRESETS), help="model of the shapes")
    model.add_argument("--from-gguf", type=Path, metavar="FILE", help="a qwen3moe GGUF: all but the experts")
    add_sizes(parser)
    parser.add_argument("--max-level", type=int, choices=(8, 4), default=8, help="bits of an expert weight")
    parser.add_argument(
        "--dense-bits", type=int, choices=DENSE_BITS, default=16, help="of the other matrices"
    )
    parser.add_argument("--layout", choices=sorted(LAYOUTS), help="of the records; default: this CPU's")
    parser.add_argument("destination", type=Path, metavar="DST", help="the store's directory")
    options = parser.parse_args(argv)
    for name in ("layers", "vocab"):
        if getattr(options, name) is not None and options.from_gguf:
            parser.error(f"expected --from-gguf without --{name}, got both: the file determines it")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    options = parse(argv)
    try:
        if options.from_gguf:
            gguf = Gguf(options.from_gguf)
            shape, dense, origin = gguf.shape(), gguf.dense, gguf.fingerprint()
        else:
            shape = shape_of(options)
            dense, origin = partial(random_dense, shape, options.seed), "random"
        with ByteProgress(f"synthesizing {options.destination.name}") as progress:
            synthesize(
                options.destination,
                Synthetic(shape, options.max_level, options.dense_bits),
                dense,
                source=source_of(shape, origin, options.seed),
                seed=options.seed,
                update=progress.update,
                layout=LAYOUTS[options.layout] if options.layout else None,
            )
    except EdgemoeError as error:
        return failed("tools.synthetic.store", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
