"""Prints held-out chat tasks in a chat template, one of each kind in turn: a text for `eval --study hotness`.

python -m tools.task_text [--model edgemoe/demo] [--count 12] [--seed 0] > chat.txt
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from edgemoe.errors import EdgemoeError
from edgemoe.evaluate.tasks import KINDS, held_out_tasks
from edgemoe.models.tokenizer import load_tokenizer
from tools.command_line import failed, make_parser, positive


def chats(tokenizer: Any, count: int, seed: int) -> Iterator[str]:
    """Yields the text of each chat: `count` of every kind, their questions and right answers."""
    for tasks in zip(*(held_out_tasks(kind, count, seed) for kind in KINDS), strict=True):
        for task in tasks:
            turns = [
                {"role": role, "content": content}
                for turn in task.turns
                for role, content in (("user", turn.question), ("assistant", turn.answer))
            ]
            yield tokenizer.apply_chat_template(turns, tokenize=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser: argparse.ArgumentParser = make_parser("tools.task_text", __doc__)
    parser.add_argument("--model", type=Path, default=Path("edgemoe/demo"), help="default: the demo")
    parser.add_argument("--count", type=positive, default=12, help="tasks of each kind; default: 12")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    options = parser.parse_args(argv)
    try:
        sys.stdout.writelines(chats(load_tokenizer(options.model), options.count, options.seed))
    except EdgemoeError as error:
        return failed("tools.task_text", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
