"""Measures a model on held-out data: the loss of each domain, and the fraction of tasks answered exactly right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from edgemoe.evaluate.tasks import KINDS, Task, held_out_tasks, is_right
from tools.training.batches import CHAT_WINDOW, TEXT_WINDOW, Batch, Chats, as_batch, pack, windows
from tools.training.loop import total_loss

TASKS = 100
"""Maximum held-out tasks of a kind in a loss: the smallest kind has few more."""


def held_out_batches(tokenizer: Any, texts: dict[str, np.ndarray], rows: int) -> dict[str, list[Batch]]:
    """The batches of each domain's held-out loss.

    Args:
        tokenizer: the model's tokenizer.
        texts: domain -> uint16 [tokens].
        rows: windows of each domain; also 8 tasks of each kind for every row, at most TASKS.
    """
    out = {name: list(windows(tokens, rows, TEXT_WINDOW)) for name, tokens in texts.items()}
    chats = Chats(tokenizer)
    tasks = [
        chats.encode(t.turns) for kind in KINDS for t in held_out_tasks(kind, min(8 * rows, TASKS), seed=1)
    ]
    return out | {"tasks": [as_batch(pack(iter(tasks), 4 * rows, CHAT_WINDOW), CHAT_WINDOW, apart=True)]}


@torch.no_grad()
def losses(model: Any, batches: dict[str, list[Batch]]) -> dict[str, float]:
    """The mean loss of each domain in nats per token."""
    out = {}
    for name, each in batches.items():
        total = sum(total_loss(model, batch).item() for batch in each)
        out[name] = total / sum(batch.targets() for batch in each)
    return out


def answers(model: Any, tokenizer: Any, tasks: Sequence[Task]) -> list[str]:
    """Answers the last question of each task greedily, after the expected answers to its earlier questions.

    Answers are cut two tokens after the length of the longest expected answer: an answer that is cut is wrong.
    """
    prompts = []
    for task in tasks:
        messages = []
        for turn in task.turns:
            messages += [
                {"role": "user", "content": turn.question},
                {"role": "assistant", "content": turn.answer},
            ]
        prompts.append(
            tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False)
        )
    given = tokenizer(
        prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
    )
    expected = tokenizer([task.turns[-1].answer for task in tasks], add_special_tokens=False)["input_ids"]
    given = {name: given[name].to(model.device) for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        out = model.generate(
            **given,
            max_new_tokens=max(map(len, expected)) + 2,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    new = out[:, given["input_ids"].shape[1] :]
    return [str(text) for text in tokenizer.batch_decode(new, skip_special_tokens=True)]


def accuracy(model: Any, tokenizer: Any, count: int, kinds: Sequence[str] = KINDS) -> dict[str, float]:
    """The fraction of `count` held-out tasks of each kind whose last answer is exactly right; none for 0."""
    out = {}
    for kind in kinds if count else ():
        tasks = held_out_tasks(kind, count)
        texts = answers(model, tokenizer, tasks)
        right = sum(is_right(task.turns[-1], text) for task, text in zip(tasks, texts, strict=True))
        out[kind] = right / count
    return out
