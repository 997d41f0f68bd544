"""Prints what layers with a window save in memory, and what dropping their old tokens takes.

    python -m tools.kv.windows [MODEL ...] [--context 4096 8192 32768 131072] [--tokens 3000] [--moving]

MODEL is a name of docs/models.md, Section What fits; no files are needed. A row has the most bytes of one sequence's
keys and values in bf16, if all tokens stay and as they are kept, and the time that a sequence takes to make a token
valid: the mean and the longest of `--tokens` tokens, after as many others. With `--moving` rows move as on a GPU, but
in RAM.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import torch

from edgemoe.families.table import family_of
from edgemoe.kv.sequence import SequenceKV
from edgemoe.models.published.announced import announced_checkpoint
from tools.command_line import make_parser, positive

MODELS = ("gpt-oss-20b", "Gemma-4-26B-A4B")


def commit_seconds(sequence: SequenceKV, tokens: int) -> list[float]:
    """Seconds to make each of the last `tokens` of twice as many tokens valid, all of which are written."""
    seconds = []
    rows = {
        layer: torch.ones(part.heads, 1, part.key_dim, dtype=torch.bfloat16)
        for layer, part in sequence.shapes.items()
    }
    for _ in range(2 * tokens):
        for layer, row in rows.items():
            sequence.write(layer, row, row)
        start = time.perf_counter()
        sequence.commit(1)
        seconds.append(time.perf_counter() - start)
    return seconds[tokens:]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a row for each model and context."""
    parser = make_parser("tools.kv.windows", __doc__)
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL")
    parser.add_argument("--context", type=positive, nargs="+", default=[4096, 8192, 32768, 131072])
    parser.add_argument("--tokens", type=positive, default=3000)
    parser.add_argument("--moving", action="store_true")
    given = parser.parse_args(argv)
    print("| model | context | all tokens, MB | as kept, MB | us per token | most, ms |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in given.models:
        shape = family_of(announced_checkpoint(name).config).kv
        shape = shape.moving() if given.moving else shape
        for context in given.context:
            sequence = SequenceKV(shape, context)
            seconds = commit_seconds(sequence, min(given.tokens, context // 2))
            times = f"{1e6 * sum(seconds) / len(seconds):.1f} | {1e3 * max(seconds):.2f}"
            sizes = (kv.bytes_for(context) / 1e6 for kv in (shape.without_windows(), shape))
            print(
                f"| {name} | {context} | {' | '.join(f'{size:.0f}' for size in sizes)} | {times} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
