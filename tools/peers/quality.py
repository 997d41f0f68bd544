"""Compares the quality of edgemoe's stores with llama.cpp's types, at their sizes.

    edgemoe convert CHECKPOINT STORE --calibrate self --dense-bits 6 && edgemoe calibrate STORE
    python -m tools.peers.quality CHECKPOINT --store STORE --text BOOK.txt --imatrix-text OTHER.txt \\
        --place DIR --llama-python VENV/bin/python --llama-bin BIN --json quality.json --plot quality.png

Every row has the KL divergence from the bf16 model, as transformers runs it, in nats per token, over the same tokens of
the text. llama.cpp's own tools make its files of a 16-bit GGUF of the checkpoint: llama-quantize, without and with an
importance matrix that llama-imatrix measured on --imatrix-text. edgemoe's rows are new tokens one by one, by
`edgemoe eval`: experts of one level each, and mixed levels by damage (--bits) where the store is calibrated.

Bits per weight count every tensor of a program and every weight of the checkpoint: embedding, attention and routers
too. Experts count with the mean bits that a token reads and their group parameters, without the padding of records to
4 KiB.
Files go to --place, and stay there for the next run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path

from edgemoe.console.output_files import require_folders, require_plot
from edgemoe.errors import EdgemoeError, UserError
from edgemoe.evaluate.reference import LogitFile, Reference
from edgemoe.evaluate.score import reference_quality, text_windows
from edgemoe.models.tokenizer import load_tokenizer
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.store.manifest import Manifest
from tools.command_line import failed, make_parser, positive, two_or_more
from tools.peers.llama_types import TYPES, Llama
from tools.peers.quality_rows import Row, bits_of_store, draw, table

BITS = (2.5, 3.0, 3.5, 4.0, 4.5, 5.5, 6.5)


def store_rows(store: Path, options: argparse.Namespace, weights: int) -> list[Row]:
    """Measures a store: each level, and the mean bits of --bits where the store is calibrated.

    Args:
        store: directory of the store.
        options: the command line.
        weights: all weights of the checkpoint.
    """
    manifest = Manifest.load(store)
    levels = [level for level in (8, 4, 2) if level <= manifest.max_level]
    words = [word for level in levels for word in ("--levels", str(level))]
    if (store / "calibration.safetensors").exists():
        words += ["--levels", "/".join(map(str, [*levels, 0]))]
        words += [word for bits in options.bits for word in ("--bits", str(bits))]
    sizes = {"--tokens": options.tokens, "--window": options.window, "--threads": options.threads}
    command = [sys.executable, "-m", "edgemoe", "eval", "--model", store, "--reference", options.checkpoint]
    command += ["--text", options.text, "--task-count", 0, "--batch", 1, *words, "--json"]
    command += [word for pair in sizes.items() for word in pair]
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise UserError(f"rows of `edgemoe eval` of {store}", f"exit code {done.returncode}", "see above")
    report = json.loads(done.stdout.splitlines()[-1])
    rows = [row for row in report["rows"] if row["phase"] == "decode"]
    return [
        Row(
            f"edgemoe, {store.name}",
            f"{row['bits']:g} bits" if row["bits"] else f"level {row['levels']}",
            bits_of_store(store, manifest, row["bits_per_weight_read"], weights),
            row["kl"],
            row["kl_stderr"],
            mixed=row["bits"] is not None,
        )
        for row in rows
    ]


def run(options: argparse.Namespace) -> list[Row]:
    """Measures everything; prints each row when it is measured."""
    require_folders(options.json)
    require_plot(options.plot)
    options.place.mkdir(exist_ok=True)
    checkpoint = Checkpoint.open(options.checkpoint)
    vocab = checkpoint.config["vocab_size"]
    windows = text_windows(load_tokenizer(options.checkpoint), options.text, options.tokens, options.window)
    weights = sum(prod(checkpoint[name].shape) for name in checkpoint.names())
    with LogitFile(sum(map(len, windows)), vocab) as logits:
        reference = Reference(options.checkpoint, vocab, checkpoint.fingerprint())
        reference_quality(reference, windows, logits, lambda: None)
        del reference
        rows = Llama(options, windows, logits, vocab).rows()
    for store in options.store:
        rows += store_rows(store, options, weights)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = make_parser("tools.peers.quality", __doc__)
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="directory of the bf16 model")
    add("--store", type=Path, action="append", default=[], help="a store of it; repeat for more")
    add("--text", type=Path, required=True, help="UTF-8 text to measure on")
    add("--imatrix-text", type=Path, help="another text, for importance matrices; default: none are made")
    add("--imatrix-tokens", type=positive, default=32768, help="most tokens of it; default: 32768")
    add("--place", type=Path, required=True, help="folder for llama.cpp's files")
    add("--llama-python", type=Path, required=True, help="a Python that has llama-cpp-python")
    add("--llama-bin", type=Path, required=True, help="folder of llama-quantize and llama-imatrix")
    add("--types", nargs="*", default=TYPES, help=f"llama.cpp's types; default: {' '.join(TYPES)}")
    add("--bits", nargs="+", type=float, default=BITS, help="mean bits of edgemoe's mixed levels")
    add("--tokens", type=two_or_more, default=4096, help="most tokens of the text; default: 4096")
    add("--window", type=two_or_more, default=128, help="tokens of a window; default: 128")
    add("--threads", type=positive, default=2)
    add("--json", type=Path, help="file for the rows")
    add("--plot", type=Path, help="image of KL over bits per weight")
    options = parser.parse_args(argv)
    try:
        rows = run(options)
        print(table(rows))
        if options.json:
            options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        if options.plot:
            draw(rows, options.plot)
    except EdgemoeError as error:
        return failed("tools.peers.quality", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
