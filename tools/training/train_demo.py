"""Trains the demo model: a small Qwen3-MoE that chats about sums, words and capitals, and reads prose and Python.

    python -m tools.training.train_demo --corpus BOOKS --out DIR [--minutes 85]
    python -m tools.training.train_demo --corpus BOOKS --out DIR --resume
    python -m tools.training.train_demo --corpus BOOKS --out DIR --from MODEL
    python -m tools.training.train_demo --corpus BOOKS --out DIR --family deepseek_v2 --words edgemoe/demo --count 0

BOOKS is a directory of .txt files or a tar of them. Chat tasks are generated (edgemoe/evaluate/tasks.py); Python is the
running interpreter's standard library. Every checkpoint writes DIR/model, a Hugging Face checkpoint in bf16 with its
tokenizer and chat template. DIR/run contains the state for resuming, the log and the loss curve. --from starts from a
model that was trained before, in place of random weights, and takes its tokenizer. --words takes only the tokenizer and
the embeddings of a model of any family with the same hidden size, so that another family learns sooner.

The learning rate follows running time, so that a run takes `--minutes` on any machine; time in which the process is
stopped does not count. Products are in bf16 on machines with fast bf16 instructions, otherwise in float32; weights and
their updates are always in float32.
"""

from __future__ import annotations

import argparse
import copy
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from edgemoe.errors import EdgemoeError, UserError
from tools.command_line import failed, make_parser
from tools.training.batches import Mixture
from tools.training.curve import draw_curve
from tools.training.data import Data, prepare
from tools.training.description import check_start, write_description
from tools.training.loop import Recipe, Run
from tools.training.model import DEMO_FAMILY, FAMILIES, Size, build
from tools.training.report import accuracy, held_out_batches, losses

INTRODUCTION = {
    "name": "edgemoe demo",
    "note": "a very small model that knows only a few things.",
    "examples": ["What is the capital of France?", "Spell garden.", "What is 17 + 25?"],
}
"""The first lines of a chat with the model, by edgemoe/models/introduction.py."""


def mixture(data: Data, options: argparse.Namespace) -> Mixture:
    """The batches that the command line configures."""
    return Mixture(
        data.tokenizer,
        prose=data.training["prose"],
        python=data.training["python"],
        paragraphs=data.paragraphs,
        seed=options.seed,
        chat_tokens=options.chat_tokens,
        text_tokens=options.text_tokens,
    )


def save_checkpoint(directory: Path, tokenizer: Any, model: Any) -> None:
    """Writes the model in bf16 as transformers does, one tensor for each expert's matrix."""
    config = copy.deepcopy(model.config)
    config.dtype = torch.bfloat16
    shipped = type(model)(config).to(torch.bfloat16)
    shipped.load_state_dict(model.state_dict())
    shipped.generation_config.update(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    shipped.generation_config.introduction = INTRODUCTION
    shipped.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def compute_dtype(name: str) -> torch.dtype:
    """The dtype of products: float32, bfloat16, or with "auto" the one that this machine computes faster."""
    if name != "auto":
        return torch.float32 if name == "float32" else torch.bfloat16
    fast = torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def report(data: Data, rows: int, count: int) -> Any:
    """Makes the function that measures a model's held-out losses and accuracies."""
    batches = held_out_batches(data.tokenizer, data.held_out, rows)

    def measure(model: Any) -> dict[str, Any]:
        return {"loss": losses(model, batches), "accuracy": accuracy(model, data.tokenizer, count)}

    return measure


def load_weights(model: Any, directory: Path) -> None:
    """Loads the weights of the model in a directory.

    Raises:
        UserError: it has other sizes.
    """
    loaded = type(model).from_pretrained(directory, dtype=torch.float32)
    try:
        model.load_state_dict(loaded.state_dict())
    except RuntimeError as error:
        raise UserError(
            "a model of the trained sizes", f"another one in {directory}", "leave out --from"
        ) from error


def load_words(model: Any, directory: Path) -> None:
    """Copies the token embeddings of the model in a directory, of any family.

    Raises:
        UserError: its embeddings have another shape.
    """
    from transformers import AutoModelForCausalLM

    given = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).get_input_embeddings().weight
    own = model.get_input_embeddings().weight
    if given.shape != own.shape:
        expected, got = (f"embeddings [{rows}, {columns}]" for rows, columns in (own.shape, given.shape))
        raise UserError(expected, f"{got} in {directory}", "leave out --words")
    with torch.no_grad():
        own.copy_(given)


def train(options: argparse.Namespace, size: Size) -> None:
    """Prepares the data, trains, and writes the model and the loss curve.

    Raises:
        UserError: no corpus, a run in the way, no run to resume, or a run with other data.
    """
    check_start(options)
    directory, threads = options.out / "run", torch.get_num_threads()
    # One thread an operator, also in the run's own threads: generated answers take many small operators, and threads
    # that synchronize in each of them are slow on a busy machine.
    torch.set_num_threads(1)
    data = prepare(
        options.corpus, directory, size, again=options.resume, start=options.start or options.words
    )
    recipe = Recipe(seconds=60 * options.minutes, rate=options.rate)
    write_description(directory / "run.json", options, size, recipe, data.files, threads)
    special = {
        f"{kind}_token_id": getattr(data.tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")
    }
    model = build(size, seed=options.seed, special=special, family=options.family)
    if options.start:
        load_weights(model, options.start)
    if options.words:
        load_words(model, options.words)
    run = Run(
        model.to("cuda" if torch.cuda.is_available() else "cpu"),
        mixture(data, options),
        recipe,
        directory,
        report=report(data, rows=8, count=options.count),
        save=partial(save_checkpoint, options.out / "model", data.tokenizer),
        threads=threads,
        dtype=compute_dtype(options.dtype),
    )
    if options.resume:
        run.resume()
    else:
        run.log_file.unlink(missing_ok=True)
    run.train(options.steps)
    draw_curve(run.log(), directory / "loss.png")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = make_parser("tools.training.train_demo", __doc__)
    parser.add_argument(
        "--corpus", type=Path, required=True, help="books: a directory of .txt, or a tar of them"
    )
    parser.add_argument("--out", type=Path, required=True, help="directory for model/ and run/")
    parser.add_argument("--minutes", type=float, default=85.0, help="of running time")
    parser.add_argument("--steps", type=int, help="maximum steps; the run may stop before --minutes")
    parser.add_argument("--chat-tokens", type=int, default=2048, help="of chat in a step")
    parser.add_argument("--text-tokens", type=int, default=1024, help="of prose and Python in a step")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of products"
    )
    parser.add_argument(
        "--count", type=int, default=10, help="held-out tasks of each kind in a report; 0: no answers"
    )
    parser.add_argument(
        "--family",
        choices=FAMILIES,
        default=DEMO_FAMILY,
        help="architecture; the demo model is %(default)s",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and data")
    parser.add_argument("--from", dest="start", type=Path, help="a trained model to start from")
    parser.add_argument("--words", type=Path, help="a model whose tokenizer and embeddings to start from")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    options = parser.parse_args(argv)
    # The command goes into the model card, which must not contain the paths of a machine.
    named = {
        str(options.corpus): "BOOKS",
        str(options.out): "DIR",
        str(options.start or options.words): "MODEL",
    }
    given = [named.get(word, word) for word in (sys.argv[1:] if argv is None else argv)]
    options.command = shlex.join(["python", "-m", "tools.training.train_demo", *given])
    return options


def main(argv: Sequence[str] | None = None, size: Size | None = None) -> int:
    """Runs the command line; returns the exit code."""
    try:
        options = parse(argv)
        train(options, size or FAMILIES[options.family])
    except EdgemoeError as error:
        return failed("tools.training.train_demo", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
