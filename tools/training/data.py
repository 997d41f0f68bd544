"""Prepares the data of a training run: the tokenizer, and training and held-out texts in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tools.training.batches import paragraphs_of
from tools.training.corpus import Domain, encode, read_books, read_stdlib
from tools.training.model import Size
from tools.training.tasks import training_tasks
from tools.training.tokenizer import train_tokenizer

TOKENIZER_SAMPLE = {"prose": 120_000, "python": 8_000}
"""Characters of each file that the tokenizer's merges are learned from."""

TOKENIZER_TASKS = 40_000
"""Tasks that the tokenizer's merges are learned from."""

Files = dict[str, dict[str, int]]
"""Domain -> {"training": number of files, "held_out": number of files}."""


@dataclass(frozen=True)
class Data:
    """The data of a run.

    Args:
        tokenizer: a fast transformers tokenizer.
        training: domain -> uint16 [tokens].
        held_out: domain -> uint16 [tokens].
        paragraphs: prose to continue in chats.
        files: numbers of files of each domain.
    """

    tokenizer: Any
    training: dict[str, np.ndarray]
    held_out: dict[str, np.ndarray]
    paragraphs: list[str]
    files: Files


def make_tokenizer(domains: Sequence[Domain], size: Size) -> Any:
    """Trains the tokenizer on a part of every training file and on tasks."""
    texts = [text[: TOKENIZER_SAMPLE[d.name]] for d in domains for text in d.training]
    for task in islice(training_tasks(1), TOKENIZER_TASKS):
        texts += [text for turn in task.turns for text in (turn.question, turn.answer)]
    return train_tokenizer(texts, size.vocabulary, size.context)


def prepare(corpus: Path, run: Path, size: Size, *, again: bool, start: Path | None = None) -> Data:
    """Reads and encodes all texts.

    Args:
        corpus: books: a directory of .txt files, or a tar of them.
        run: directory for the tokenizer and the tokens, which resuming and the model card read.
        size: size of the model.
        again: load tokenizer and tokens from `run` instead of making them.
        start: a model to take the tokenizer of; None: train one.

    Raises:
        UserError: `corpus` has fewer than two texts.
    """
    from transformers import AutoTokenizer

    domains = (read_books(corpus), read_stdlib())
    files = {
        f"{d.name}-{part}": run / f"{d.name}-{part}.npy" for d in domains for part in ("training", "held")
    }
    paragraphs = paragraphs_of(domains[0].training, 20_000, seed=0)
    if again:
        tokenizer = AutoTokenizer.from_pretrained(run / "tokenizer")
        tokens = {name: np.load(path) for name, path in files.items()}
    else:
        run.mkdir(parents=True, exist_ok=True)
        tokenizer = AutoTokenizer.from_pretrained(start) if start else make_tokenizer(domains, size)
        tokenizer.save_pretrained(run / "tokenizer")
        tokens = {}
        for d in domains:
            tokens |= {f"{d.name}-training": encode(tokenizer, d.training)}
            tokens |= {f"{d.name}-held": encode(tokenizer, d.held_out)}
        for name, path in files.items():
            np.save(path, tokens[name])
    training = {d.name: tokens[f"{d.name}-training"] for d in domains}
    counted = {d.name: {"training": len(d.training), "held_out": len(d.held_out)} for d in domains}
    return Data(tokenizer, training, {d.name: tokens[f"{d.name}-held"] for d in domains}, paragraphs, counted)
