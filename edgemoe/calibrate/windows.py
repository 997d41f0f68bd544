"""Windows of tokens to calibrate on: spread over a text, or written by the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from edgemoe.console.text_files import read_text
from edgemoe.engine.engine import Engine
from edgemoe.engine.request import Request
from edgemoe.engine.sampling import Sampler, Sampling
from edgemoe.engine.scheduler import Scheduler
from edgemoe.errors import UserError
from edgemoe.kv.sequence import SequenceKV

Window = tuple[int, ...]

_MOST_CHARACTERS = 4_000_000
"""Characters of a text that are tokenized: some ten seconds."""


def spread_windows(tokenizer: Any, path: Path, tokens: int, window: int) -> list[Window]:
    """Cuts windows out of a text, evenly spaced from its start to its end.

    Args:
        tokenizer: the tokenizer of the model.
        path: a UTF-8 text file.
        tokens: number of tokens in all windows, rounded down to whole windows; a shorter text gives fewer.
        window: tokens of each.

    Raises:
        UserError: the text is missing, not UTF-8, or shorter than one window.
    """
    text = read_text(path, "--text", _MOST_CHARACTERS)
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    count = min(tokens, len(ids)) // window
    if not count:
        found = f"{min(tokens, len(ids))} tokens"
        raise UserError(
            f"at least {window} tokens from {path}", found, "give a longer --text, or more --tokens"
        )
    last = len(ids) - window
    starts = [last * i // max(count - 1, 1) for i in range(count)]
    return [tuple(ids[start : start + window]) for start in starts]


def written_window(
    engine: Engine, sequence: SequenceKV, number: int, advance: Callable[[], None] = lambda: None
) -> Window:
    """A window that the model writes: a random token, then each drawn from its distribution, up to the context.

    The same model and number give the same tokens.

    Args:
        engine: runs the steps.
        sequence: cropped to no tokens first.
        number: the number of the window.
        advance: called after every token.
    """
    sequence.crop(0)
    sampling = Sampling(
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        repetition_penalty=1.0,
        seed=number,
        max_new_tokens=sequence.context - 1,
        stop=frozenset(),
    )

    def count(token: int, logits: torch.Tensor) -> bool:
        advance()
        return False

    first = int(torch.randint(engine.shape.vocab, (1,), generator=torch.Generator().manual_seed(number)))
    request = Request([first], Sampler(sampling), on_token=count, sequence=sequence)
    Scheduler(engine).run(request)
    return tuple(request.tokens)
