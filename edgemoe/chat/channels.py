"""Answers in channels, as gpt-oss has them, or with tags of other spellings, as text with tags around reasoning."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgemoe.api.answer_form import AnswerForm
from edgemoe.api.answer_reader import AnswerReader, Delta
from edgemoe.console.answer_text import CLOSE, OPEN


def channel_form(form: AnswerForm | None) -> AnswerForm | None:
    """The form of a model's answers where channels have their text, or reasoning has other tags than a terminal knows;
    None: the text comes as it is.
    """
    return form if form and (form.lead or form.reasoning not in (None, (OPEN, CLOSE))) else None


class TaggedText:
    """Writes the parts of an answer as they come, with its reasoning between tags.

    Args:
        reader: reads the answer's text, special tokens included.
        on_text: gets each piece.

    Attributes:
        text: all that was written.
    """

    def __init__(self, reader: AnswerReader, on_text: Callable[[str], object]) -> None:
        self._reader, self._on_text = reader, on_text
        self._inside, self.text = False, ""

    @property
    def content(self) -> str:
        """The text without reasoning."""
        return self._reader.texts.get("content", "")

    def write(self, piece: str) -> None:
        """Takes a piece of the model's text."""
        self._show(self._reader.feed(piece))

    def end(self) -> None:
        """Ends the answer."""
        self._show(self._reader.end())

    def _show(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            inside = delta.kind == "reasoning_content"
            tag = "" if inside == self._inside else f"{OPEN}\n" if inside else f"\n{CLOSE}\n\n"
            self._inside = inside
            self.text += tag + delta.text
            self._on_text(tag + delta.text)
