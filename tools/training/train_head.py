"""Trains a head for further tokens on a trained model, which stays as it is (docs/decisions/0075).

    python -m tools.training.train_head --corpus BOOKS --out DIR [--model edgemoe/demo] [--minutes 15]
    python -m tools.training.train_head --corpus BOOKS --out DIR --resume

MODEL is a checkpoint of a family whose heads `edgemoe convert` reads, or of qwen3_moe. The latter becomes a checkpoint
of mellum, whose layers compute the same and which may have a head. BOOKS is a directory of .txt files or a tar of them;
Python and chats are the data of tools.training.train_demo. Every checkpoint writes DIR/model with the tensors of the
model and of its head, under the names of published checkpoints. DIR/run contains the state for resuming and the log.
The log has how often guesses are the model's likeliest token on held-out texts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from edgemoe.errors import EdgemoeError, UserError
from tools.command_line import failed, make_parser
from tools.training.batches import Batch
from tools.training.data import Data, prepare
from tools.training.head_checkpoint import carried, head_of, save_head, write_start
from tools.training.head_model import TrainedHead, agreement, head_loss
from tools.training.loop import Recipe, Run
from tools.training.model import EXPERTS_NAME, Size, experts_forward
from tools.training.report import held_out_batches
from tools.training.train_demo import compute_dtype, mixture


def load_model(directory: Path) -> Any:
    """The checkpoint's model in training form, float32."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface().register(EXPERTS_NAME, experts_forward)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.set_experts_implementation(EXPERTS_NAME)
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def report(data: Data, rows: int) -> Any:
    """Makes the function that measures how often a head's guesses are right on held-out texts."""
    batches: dict[str, list[Batch]] = held_out_batches(data.tokenizer, data.held_out, rows)
    return lambda trained: {name: agreement(trained, each) for name, each in batches.items()}


def train(options: argparse.Namespace) -> None:
    """Prepares the data, trains, and writes the checkpoint.

    Raises:
        UserError: no corpus, a run in the way or none to resume, or a model without a form of heads.
        ModelRefused: edgemoe does not run the model.
    """
    directory, written = options.out / "run", options.out / "model"
    if (directory / "state.pt").exists() != options.resume:
        found, action = ("none", "leave out") if options.resume else ("one", "give")
        raise UserError(f"--resume where {directory} has a run", found, f"{action} --resume")
    torch.set_num_threads(1)
    if not options.resume:
        config = carried(json.loads((options.model / "config.json").read_text()))
        head_of(config, options.model)
        write_start(options.model, config, written)
    family = head_of(json.loads((written / "config.json").read_text()), written)
    data = prepare(options.corpus, directory, Size(), again=options.resume, start=written)
    run = Run(
        TrainedHead(load_model(written)),
        mixture(data, options),
        Recipe(seconds=60 * options.minutes, rate=options.rate),
        directory,
        report=report(data, rows=8),
        save=partial(save_head, written, family),
        dtype=compute_dtype(options.dtype),
        clock=time.process_time,
        loss=head_loss,
    )
    if options.resume:
        run.resume()
    run.train(options.steps)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = make_parser("tools.training.train_head", __doc__)
    demo = Path(__file__).parents[2] / "edgemoe/demo"
    parser.add_argument("--model", type=Path, default=demo, help="checkpoint; default: the demo model")
    parser.add_argument(
        "--corpus", type=Path, required=True, help="books: a directory of .txt, or a tar of them"
    )
    parser.add_argument("--out", type=Path, required=True, help="directory for model/ and run/")
    parser.add_argument("--minutes", type=float, default=15.0, help="of computing time")
    parser.add_argument("--steps", type=int, help="maximum steps; the run may stop before --minutes")
    parser.add_argument("--chat-tokens", type=int, default=1024, help="of chat in a step")
    parser.add_argument("--text-tokens", type=int, default=2048, help="of prose and Python in a step")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of products"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the data")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    try:
        train(parse(argv))
    except EdgemoeError as error:
        return failed("tools.training.train_head", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
