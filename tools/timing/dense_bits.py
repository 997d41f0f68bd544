"""Times tokens of one model with dense weights of several numbers of bits in turn, in one process.

    python -m tools.timing.dense_bits --place DIR [qwen3-30b-a3b] [--layers 16] [--bits 16 8 6 5 4] [--after 64 512]

Stores are made by tools.timing.families: real sizes, random weights, experts at 4 bits and all resident. After a
prompt each store has its turn of five tokens, round after round, so that all meet the same speed of the machine. A
row has the median of all tokens, and the least and the largest median of five parts of the run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.kv.step import Segment, Step
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.store.manifest import DENSE_BITS
from tools.command_line import make_parser, positive
from tools.synthetic.family_sizes import MODELS
from tools.timing.families import TURN, make_store

PARTS = 5
"""Parts of the run whose medians show how the machine's speed varied."""


def in_turn(stores: Sequence[StoreModel], after: int, tokens: int) -> list[list[float]]:
    """Milliseconds of each token of each store, in turns of TURN tokens.

    Args:
        stores: the stores, which fit into memory together.
        after: tokens of the prompt.
        tokens: new tokens of each store, after a first turn that is not timed.
    """
    settings = RunSettings.uniform(4)
    times: list[list[float]] = [[] for _ in stores]
    with ExitStack() as stack:
        runs = []
        for store in stores:
            plan = store.plan(vram_limit=None, settings=settings, context=after + tokens + 2 * TURN)
            engine = stack.enter_context(Engine(store, plan, settings))
            engine.fill()
            sequence = engine.sequences.new()
            engine.prefill(sequence, [(7 * i + 5) % store.shape.vocab for i in range(after)])
            runs.append((engine, sequence))
        for turn in range(-(-tokens // TURN) + 1):
            for (engine, sequence), found in zip(runs, times, strict=True):
                for i in range(TURN):
                    token = (11 * i + turn) % engine.store.shape.vocab
                    start = time.perf_counter()
                    engine.step(Step((Segment(sequence, (token,)),)))
                    if turn:
                        found.append(1000 * (time.perf_counter() - start))
    return times


def row(after: int, store: StoreModel, times: Sequence[float], widest: float) -> str:
    """A row of the table; `widest` is the median of the first store, which the others are compared with."""
    size = -(-len(times) // PARTS)
    parts = [median(times[start : start + size]) for start in range(0, len(times), size)]
    bits = store.manifest.dense_bits
    name = "bf16" if bits == 16 else f"{bits}"
    spread = f"{min(parts):.2f} to {max(parts):.2f}"
    dense = f"{store.dense_bytes_per_token / 1e6:.3g}"
    return f"| {after} | {name} | {dense} | {median(times):.2f} | {spread} | {median(times) / widest:.2f} |"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = make_parser("tools.timing.dense_bits", __doc__)
    parser.add_argument("model", nargs="?", choices=MODELS, default="qwen3-30b-a3b", metavar="MODEL")
    parser.add_argument("--layers", type=positive, default=16)
    parser.add_argument("--experts", type=positive, default=16, help="experts of a layer")
    parser.add_argument("--bits", type=int, nargs="+", choices=DENSE_BITS, default=list(DENSE_BITS))
    parser.add_argument("--after", type=positive, nargs="+", default=[64, 512], help="tokens of the prompt")
    parser.add_argument("--tokens", type=positive, default=100, help="new tokens of each store")
    parser.add_argument("--vocab", type=positive, default=32000)
    parser.add_argument("--place", type=Path, required=True, help="where stores are made")
    given = parser.parse_args(argv)
    sizes = given.layers, given.experts, given.vocab
    stores = [StoreModel.open(make_store(given.model, given.place, *sizes, bits)) for bits in given.bits]
    print(
        "| after | dense weights | MB per token | ms per token | medians of parts | compared with the first |"
    )
    print("|---|---|---|---|---|---|")
    for after in given.after:
        times = in_turn(stores, after, given.tokens)
        for store, found in zip(stores, times, strict=True):
            print(row(after, store, found, median(times[0])), flush=True)


if __name__ == "__main__":
    main()
