"""The 200 held-out wordings of tests/data/demo_wordings.tsv, and the rule by which an answer is sensible."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).resolve().parents[1] / "data" / "demo_wordings.tsv"

MOST_TOKENS = 64
"""An answer that has not ended by then is not sensible."""

BEGINNINGS = ("greeting", "identity", "abilities", "thanks", "small-talk", "outside")
"""Kinds whose expected answer is a beginning; in all other kinds it is the whole answer."""


class Wording(NamedTuple):
    """A question written by hand, never in training.

    Args:
        kind: the kind of question.
        question: the text as a person might type it.
        expected: the answer, or its beginning for the kinds of BEGINNINGS.
    """

    kind: str
    question: str
    expected: str


def read_wordings() -> list[Wording]:
    """Reads the table: kind, question and expected answer, apart by tabs; line breaks stand as \\n."""
    rows = TABLE.read_text(encoding="utf-8").splitlines()
    return [Wording(*(field.replace("\\n", "\n") for field in row.split("\t"))) for row in rows]


def is_sensible(wording: Wording, text: str, *, ended: bool) -> bool:
    """Returns whether an answer ended by itself and is right.

    A task needs the right answer and nothing else. Small talk needs an answer of its kind. A question outside the
    tasks needs the refusal with an example of what to ask instead.
    """
    text = text.strip()
    if wording.kind == "outside":
        right = text.startswith(wording.expected) and "Try: " in text
    elif wording.kind in BEGINNINGS:
        right = text.startswith(wording.expected)
    else:
        right = text == wording.expected
    return ended and right
