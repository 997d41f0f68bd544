"""Answers a request of tools/engines/compare.py by transformers, with compressed-tensors where the export needs it."""

from __future__ import annotations

import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tools.engines.protocol import Answers, Request, log_softmax, serve


def answer(request: Request) -> Answers:
    """Generates greedy answers, and the log-probabilities of the given ones."""
    torch.set_num_threads(request.threads)
    model = AutoModelForCausalLM.from_pretrained(request.model, dtype=torch.bfloat16).eval()
    texts, rows = [], []
    with torch.inference_mode():
        for prompt, given in zip(request.prompts, request.answers, strict=True):
            whole = model(torch.tensor([prompt + given]), use_cache=False).logits[0].float().numpy()
            rows.append(log_softmax(whole[len(prompt) - 1 : -1, : request.vocab]))
            tokens: list[int] = []
            state, step = None, prompt
            while len(tokens) < request.new_tokens and not (tokens and tokens[-1] in request.stop):
                out = model(torch.tensor([step]), past_key_values=state, use_cache=True)
                state, step = out.past_key_values, [int(out.logits[0, -1].argmax())]
                tokens += step
            texts.append(tokens)
    return Answers(texts, np.concatenate(rows))


if __name__ == "__main__":
    sys.exit(serve(answer))
