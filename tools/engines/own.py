"""edgemoe's own side of a comparison: prompts, an engine at one level, and its greedy answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgemoe.api.template import encode_chat
from edgemoe.engine.engine import Engine
from edgemoe.evaluate.tasks import KINDS, held_out_tasks
from edgemoe.models.options.run_settings import run_settings
from edgemoe.models.store_model import StoreModel
from tools.engines.protocol import Answers, log_softmax


def prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Token ids of the first questions of held-out tasks, the kinds in turn."""
    each = -(-count // len(KINDS))
    tasks = zip(*(held_out_tasks(kind, each) for kind in KINDS), strict=True)
    questions = [task.turns[0].question for some in tasks for task in some][:count]
    return [encode_chat(tokenizer, [{"role": "user", "content": text}]) for text in questions]


@contextmanager
def opened(store: Path, level: int, context: int, threads: int) -> Iterator[Engine]:
    """Yields an engine with all experts of a store at one level."""
    torch.set_num_threads(threads)
    model = StoreModel.open(store)
    settings = run_settings(model.manifest.max_level, exact=level)
    plan = model.plan(vram_limit=None, settings=settings, context=context, parallel=1)
    with Engine(model, plan, settings) as engine:
        engine.fill()
        yield engine


def answers(engine: Engine, request: Sequence[Sequence[int]], new_tokens: int, stop: set[int]) -> Answers:
    """edgemoe's greedy answers, with the log-probabilities before each of their tokens."""
    sequence = engine.sequences.new()
    texts, rows = [], []
    for prompt in request:
        sequence.crop(0)
        logits = engine.prefill(sequence, list(prompt))
        tokens: list[int] = []
        while True:
            rows.append(logits.float().numpy().copy())
            tokens.append(int(rows[-1].argmax()))
            if len(tokens) == new_tokens or tokens[-1] in stop:
                break
            logits = engine.all_logits(sequence, tokens[-1:], decode=True)[0]
        texts.append(tokens)
    return Answers(texts, log_softmax(np.stack(rows)))
