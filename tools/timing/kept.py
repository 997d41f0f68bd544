"""Times questions behind a beginning that they share, with nothing kept between them and with its KV kept.

    python -m tools.timing.kept [--model demo] [--vram-limit 30MB] [--context 1024] [--shared 300] [--questions 9]
        [--json]

Each question comes once a round, two rounds a side, the two sides in turn; the first question of a round, which has
nothing to share, is not counted. Prints medians of the time to the first token, of bytes read until the end, and of
tokens that were not computed again. Then two conversations with that beginning take turns in the memory of one context;
printed are the tokens of each prompt, and those of them that were not computed again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import edgemoe
from edgemoe.api.model import Model
from edgemoe.api.template import Message
from edgemoe.engine.generate import Answer
from edgemoe.errors import EdgemoeError
from tools.command_line import failed, make_parser, positive, two_or_more
from tools.training.tasks import training_tasks

ROUNDS, ANSWER_TOKENS = 2, 24


def questions_of(count: int) -> list[str]:
    """Returns the first questions of the demo's tasks."""
    return [task.turns[0].question for task in islice(training_tasks(1), count)]


def beginning(model: Model, tokens: int) -> str:
    """Returns a text of about so many tokens."""
    text = ""
    for question in questions_of(4 * tokens):
        if len(model.encode(text)) >= tokens:
            break
        text += question + " "
    return text


def one_round(model: Model, shared: str, questions: Sequence[str], *, keep: bool) -> list[Answer]:
    """Asks every question behind the shared text; returns all answers but the first."""
    answers = []
    model.forget()
    for question in questions:
        if not keep:
            model.forget()
        answers.append(ask(model, [{"role": "user", "content": shared + question}]))
    return answers[1:]


def ask(model: Model, messages: Sequence[Message]) -> Answer:
    """Answers greedily."""
    return model.generate(messages, temperature=0, max_new_tokens=ANSWER_TOKENS)


def conversations(model: Model, shared: str, questions: Sequence[str]) -> list[tuple[int, int]]:
    """Lets two conversations take turns; returns (cached tokens, tokens of the prompt) of each turn."""
    model.forget()
    talks: list[list[Message]] = [[{"role": "user", "content": shared + talk}] for talk in questions[:2]]
    found = []
    for question in questions[2:5]:
        for talk in talks:
            answer = ask(model, talk)
            found.append((answer.cached_tokens, answer.prompt_tokens))
            talk += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": question}]
    return found


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Runs both parts.

    Raises:
        EdgemoeError: the model cannot be opened, or the context does not hold the questions.
    """
    with edgemoe.load(given.model, vram_limit=given.vram_limit, context=given.context, exact=4) as model:
        shared, questions = beginning(model, given.shared), questions_of(given.questions + 1)
        answers: dict[bool, list[Answer]] = {False: [], True: []}
        for number in range(2 * ROUNDS):
            keep = bool(number % 2)
            answers[keep] += one_round(model, shared, questions, keep=keep)
        report: dict[str, Any] = {"turns": conversations(model, shared, questions_of(5))}
    for keep, name in ((False, "nothing_kept"), (True, "kept")):
        report[name] = {
            "ttft_ms": round(1000 * median(each.ttft_s for each in answers[keep]), 2),
            "ssd_bytes": median(each.bytes_read["ssd"] for each in answers[keep]),
            "cached_tokens": median(each.cached_tokens for each in answers[keep]),
            "prompt_tokens": median(each.prompt_tokens for each in answers[keep]),
        }
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = make_parser("tools.timing.kept", __doc__)
    parser.add_argument("--model", type=Path, default=Path("demo"))
    parser.add_argument("--vram-limit", default="30MB")
    parser.add_argument("--context", type=positive, default=1024)
    parser.add_argument("--shared", type=positive, default=300, help="tokens of the shared beginning")
    parser.add_argument("--questions", type=two_or_more, default=9, help="of a round that are counted")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(argv)
    try:
        report = measure(given)
    except EdgemoeError as error:
        return failed("tools.timing.kept", error)
    if given.json:
        print(json.dumps(report))
        return 0
    for name in ("nothing_kept", "kept"):
        of = report[name]
        print(
            f"{name.replace('_', ' ')}: first token after {of['ttft_ms']:.1f} ms, {of['ssd_bytes'] / 1e6:.1f} MB read, "
            f"{of['cached_tokens']:g} of {of['prompt_tokens']:g} tokens not computed"
        )
    print("two conversations in turn:", ", ".join(f"{cached} of {all_}" for cached, all_ in report["turns"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
