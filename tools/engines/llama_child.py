"""Answers a request of tools/engines/compare.py by llama.cpp, in an environment with llama-cpp-python."""

from __future__ import annotations

import sys
from typing import Any

import llama_cpp
import numpy as np

from tools.engines.protocol import Answers, Request, log_softmax, serve


def answer(request: Request) -> Answers:
    """Generates greedy answers, and the log-probabilities of the given ones."""
    model: Any = llama_cpp.Llama(
        request.model,
        n_ctx=request.context,
        n_batch=request.context,
        n_threads=request.threads,
        n_threads_batch=request.threads,
        logits_all=True,
        verbose=False,
    )
    texts, rows = [], []
    for prompt, given in zip(request.prompts, request.answers, strict=True):
        model.reset()
        model.eval(prompt)
        tokens: list[int] = []
        while len(tokens) < request.new_tokens and not (tokens and tokens[-1] in request.stop):
            tokens.append(int(np.argmax(model.scores[model.n_tokens - 1])))
            model.eval(tokens[-1:])
        texts.append(tokens)
        model.reset()
        model.eval(prompt + given)
        rows.append(
            log_softmax(model.scores[len(prompt) - 1 : len(prompt) + len(given) - 1, : request.vocab])
        )
    return Answers(texts, np.concatenate(rows))


if __name__ == "__main__":
    sys.exit(serve(answer))
