"""Times tokens of several families with layers of the real models' sizes and random weights, all experts resident.

    python -m tools.timing.families [glm-4.5-air ...] [--layers 6] [--experts 16] [--after 64 512] [--tokens 60]

A layer has fewer experts than the model's, since a token reads its chosen ones alone, at 4 bits per weight, and the
dense weights at 8 bits with the vocabulary of --vocab. "By modules" are tokens that transformers' modules compute, in
turn with the others. The bound is the time in which this machine reads the bytes of a token from memory, at the best
rate of all rows, measured as in `edgemoe bench`. "Python" are the Python calls of a token, as tools.timing.count_calls
counts them. Stores are made in --place, and stay there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from edgemoe.bench.bandwidth import read_memory
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.experts.step import Study
from edgemoe.kernels.registry import compute
from edgemoe.kv.step import Segment, Step
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.store.manifest import DENSE_BITS
from tools.command_line import make_parser, positive
from tools.synthetic.family_sizes import MODELS, config_of
from tools.synthetic.family_writing import make_family_store
from tools.timing.count_calls import CallCounter

TURN = 5
"""Tokens of one way of computing before the other one's turn."""


def make_store(name: str, place: Path, layers: int, experts: int, vocab: int, dense_bits: int) -> Path:
    """Makes a store with random weights, unless it has been made before."""
    store = place / f"{name}-{layers}-{experts}-{vocab}-{dense_bits}"
    config = config_of(name, layers, experts, vocab)
    make_family_store(
        config, store, max_level=4, dense_bits=dense_bits, layout=compute().layout, update=lambda *_: None
    )
    return store


def measure(store: StoreModel, after: int, tokens: int) -> dict[str, float]:
    """Milliseconds a token after a prompt, as it runs and by transformers' modules in turn; bytes, and their rate."""
    settings = RunSettings(levels=(4,), exact=True)
    plan = store.plan(vram_limit=None, settings=settings, context=after + 4 * tokens + 8)
    rate = read_memory()
    arms: dict[str, list[float]] = {"ms": [], "by modules": []}
    with Engine(store, plan, settings) as engine:
        engine.fill()
        sequence = engine.sequences.new()
        engine.prefill(sequence, [(7 * i + 5) % store.shape.vocab for i in range(after)])
        for turn in range(2 * tokens // TURN + 2):
            name = ("ms", "by modules")[turn % 2]
            with engine.studied(Study(modules=name != "ms")):
                for i in range(TURN):
                    start = time.perf_counter()
                    engine.step(Step((Segment(sequence, ((11 * i + turn) % store.shape.vocab,)),)))
                    if turn > 1:
                        arms[name].append(1000 * (time.perf_counter() - start))
        rate, calls = max(rate, read_memory()), _calls(engine, Segment(sequence, (11,)))
    read = store.dense_bytes_per_token + store.form.bytes_at(4) * store.shape.top_k * _routed(store)
    times = {name: median(values) for name, values in arms.items()}
    return times | {"bytes": read, "rate": rate, "calls": calls}


def _calls(engine: Engine, segment: Segment) -> int:
    """Python calls of a token."""
    counter = CallCounter()
    threading.setprofile(None)
    counter.start()
    engine.step(Step((segment,)))
    return counter.stop().total()


def _routed(store: StoreModel) -> int:
    """Layers with experts."""
    return store.shape.experts // store.shape.experts_per_layer


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = make_parser("tools.timing.families", __doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--layers", type=positive, default=6)
    parser.add_argument("--experts", type=positive, default=16, help="experts of a layer")
    parser.add_argument("--after", type=positive, nargs="+", default=[64, 512], help="tokens of the prompt")
    parser.add_argument("--tokens", type=positive, default=60)
    parser.add_argument("--vocab", type=positive, default=32000)
    parser.add_argument("--dense-bits", type=int, choices=DENSE_BITS, default=8, help="of dense weights")
    parser.add_argument("--place", type=Path, required=True, help="where stores are made")
    given = parser.parse_args(argv)
    rows = list[tuple[str, int, dict[str, float]]]()
    for name in given.models or MODELS:
        place = make_store(name, given.place, given.layers, given.experts, given.vocab, given.dense_bits)
        for after in given.after:
            rows.append((name, after, measure(StoreModel.open(place), after, given.tokens)))
    rate = max(times["rate"] for _, _, times in rows)
    print(f"{rate / 1e9:.1f} GB/s from memory, {given.layers} layers", end="\n\n")
    print(
        "| model | after | MB | ms per token | by modules | bound | share of the bound | Python |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for name, after, times in rows:
        bound = 1000 * times["bytes"] / rate
        cells = " | ".join(f"{each:.2f}" for each in (times["ms"], times["by modules"], bound))
        share = 100 * bound / times["ms"]
        print(
            f"| {name} | {after} | {times['bytes'] / 1e6:.0f} | {cells} | {share:.0f} % | {times['calls']:.0f} |"
        )


if __name__ == "__main__":
    main()
