"""Compares quantized keys and values with bf16 ones: KL of the next token, the likeliest token, and copying.

    python -m tools.kv.quality STORE --text FILE [--window 2048] [--windows 4] [--formats q8_0 q4_0 ...]

A format is one of edgemoe's, or two with a slash, of keys and of values; with "-" after it keys are not rotated.
Each window of the text is a prompt in steps of 512 tokens, whose last tokens are decoded one by one. All experts are
exact at the store's highest level, so that the rows differ by their keys and values alone.

The last column is a task of copying over the whole window: its first half comes a second time, and the tokens of the
second half that were the likeliest ones are counted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import torch
from transformers import AutoTokenizer

from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.errors import EdgemoeError, UserError
from edgemoe.kv.blocks import BLOCK_ROWS
from edgemoe.kv.formats import KVFormat
from edgemoe.kv.step import Segment, Step
from edgemoe.policy.settings import RunSettings
from tools.command_line import failed, make_parser, positive

DECODED = 64
"""Tokens of a window that are decoded one by one."""

FORMATS = ("q8_0", "q4_0", "q4_0-", "bf16/q4_0", "q4_0/bf16", "q4_0-/bf16")


def format_of(text: str) -> KVFormat:
    """The format of a name as on the command line.

    >>> str(format_of("q4_0-/bf16"))
    'q4_0 keys, bf16 values, not rotated'
    """
    keys, _, values = text.partition("/")
    plain = keys.rstrip("-")
    return KVFormat(plain, (values or plain).rstrip("-"), rotates=not keys.endswith("-"))


def window_logits(engine: Engine, window: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log probabilities [n, vocab] after the tokens of a prompt, and after the tokens decoded next."""
    sequence = engine.sequences.new()
    prompt, rest = window[:-DECODED], window[-DECODED:]
    try:
        parts = [
            engine.all_logits(sequence, prompt[at : at + BLOCK_ROWS], decode=False)
            for at in range(0, len(prompt), BLOCK_ROWS)
        ]
        tokens = [engine.step(Step((Segment(sequence, (token,)),))) for token in rest]
    finally:
        engine.sequences.end(sequence)
    return torch.cat(parts).log_softmax(-1), torch.cat(tokens).log_softmax(-1)


def copied(engine: Engine, window: Sequence[int]) -> float:
    """The fraction of right tokens of a window's first half that comes a second time."""
    half = list(window[: len(window) // 2])
    likeliest = torch.cat(window_logits(engine, 2 * half)).argmax(-1)
    # Row i has the token after i. The start of the second copy cannot be known.
    return float((likeliest[len(half) : -1] == torch.tensor(half[1:])).float().mean())


def compared(want: torch.Tensor, logits: torch.Tensor) -> tuple[float, float, float]:
    """The mean and the largest KL in nats, and the fraction of rows with the same likeliest token."""
    kl = (want.exp() * (want - logits)).sum(-1)
    return float(kl.mean()), float(kl.max()), float((want.argmax(-1) == logits.argmax(-1)).float().mean())


def cells_of(
    want: Sequence[tuple[torch.Tensor, torch.Tensor]], pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> list[str]:
    """Cells of a row: mean and largest KL, and the fraction of equal likeliest tokens, of prompts and decoded tokens.

    Args:
        want, pairs: log-probabilities per window, of the prompt and of the decoded tokens, each [tokens, vocabulary].
    """
    rows = [[compared(a[i], b[i]) for a, b in zip(want, pairs, strict=True)] for i in range(len(pairs[0]))]
    return [
        f"{mean(r[0] for r in row):.6f} | {max(r[1] for r in row):.4f} | {100 * mean(r[2] for r in row):.2f} %"
        for row in rows
    ]


def compare(directory: Path, text: Path, size: int, count: int, formats: Sequence[str]) -> None:
    """Prints the table of a store's formats over `count` windows of `size` tokens.

    Raises:
        UserError: another format, or a text of less than a window.
    """
    store = StoreModel.open(directory)
    settings = RunSettings.uniform(store.manifest.max_level)
    tokens = AutoTokenizer.from_pretrained(store.directory).encode(text.read_text(encoding="utf-8"))
    starts = range(0, size * count, size)
    windows = [part for start in starts if len(part := tokens[start : start + size]) == size]
    if size <= DECODED:
        raise UserError(
            f"a --window of more than the {DECODED} tokens that are decoded", f"{size}", "choose 2048"
        )
    if not windows:
        raise UserError(
            f"a text of at least {size} tokens", f"{len(tokens)} in {text}", "choose a smaller --window"
        )
    print(f"{len(windows)} windows of {size} tokens of {text.name}, {store.directory.name}\n")
    print(
        "| keys and values | bytes/token | KL, prompt | largest | same | KL, decoded | largest | same | copied |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    want: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name in ("bf16", *formats):
        chosen = store.with_kv(format_of(name))
        plan = chosen.plan(vram_limit=None, settings=settings, context=size)
        with Engine(chosen, plan, settings) as engine:
            found = [window_logits(engine, window) for window in windows]
            right = mean(copied(engine, window) for window in windows)
        want = want or found
        cells = cells_of(want, found)
        each = chosen.shape.kv.bytes_for(2) - chosen.shape.kv.bytes_for(1)
        copy = f"{100 * right:.2f} %"
        print(f"| {chosen.shape.kv.format} | {each} | {' | '.join(cells)} | {copy} |", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit code."""
    parser = make_parser("tools.kv.quality", __doc__)
    parser.add_argument("store", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--window", type=positive, default=2048, help="tokens; at most the model's context")
    parser.add_argument("--windows", type=positive, default=4)
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    given = parser.parse_args(argv)
    try:
        compare(given.store, given.text, given.window, given.windows, given.formats)
    except (EdgemoeError, OSError) as error:
        return failed("tools.kv.quality", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
