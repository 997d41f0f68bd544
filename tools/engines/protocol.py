"""Messages between tools/engines/compare.py and an engine's process: one directory of two files.

    request.json    the request, as Request
    answers.npz     tokens and log-probabilities, as Answers

Imports numpy alone, as engines' environments have no edgemoe.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Request:
    """The task of an engine.

    Args:
        model: path of the export.
        prompts: token ids.
        answers: token ids of the answers whose log-probabilities are compared, one of each prompt, none empty.
        new_tokens: most tokens of a greedy answer.
        stop: tokens that end an answer.
        context: tokens of a prompt with its answer.
        vocab: width of the logits.
        threads: number of threads that compute.
    """

    model: str
    prompts: list[list[int]]
    answers: list[list[int]]
    new_tokens: int
    stop: list[int]
    context: int
    vocab: int
    threads: int

    def save(self, directory: Path) -> None:
        """Writes the request for an engine's process."""
        (directory / "request.json").write_text(json.dumps(asdict(self)))


@dataclass(frozen=True)
class Answers:
    """The results of an engine.

    Args:
        tokens: the number of tokens of each prompt's greedy answer, maybe with the token that ended it.
        logprobs: float32 [tokens of all given answers, vocab], each row before its token.
    """

    tokens: list[list[int]]
    logprobs: np.ndarray

    def save(self, directory: Path) -> None:
        """Writes the answers for compare."""
        lengths = np.array([len(each) for each in self.tokens])
        flat = np.array([token for each in self.tokens for token in each], np.int64)
        np.savez(directory / "answers.npz", lengths=lengths, tokens=flat, logprobs=self.logprobs)

    @classmethod
    def load(cls, directory: Path) -> Answers:
        """Reads the answers of an engine's process."""
        with np.load(directory / "answers.npz") as found:
            ends = np.cumsum(found["lengths"])
            tokens = [part.tolist() for part in np.split(found["tokens"], ends[:-1])]
            return cls(tokens, found["logprobs"])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities, float32 [n, vocab], of logits."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    out: np.ndarray = (shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))).astype(np.float32)
    return out


def serve(answer: Callable[[Request], Answers]) -> int:
    """The main function of an engine's process: its one argument is the directory of the two files."""
    directory = Path(sys.argv[1])
    answer(Request(**json.loads((directory / "request.json").read_text()))).save(directory)
    return 0
