"""The parts of an answer as its text comes: reasoning, text and calls of tools, by transformers' response parser."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers.utils.chat_parsing import ResponseParser

from edgemoe.api.python_calls import read_calls

Kind = Literal["content", "reasoning_content"]

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that response templates give to reasoning."""


@dataclass(frozen=True)
class Call:
    """A call of a tool.

    Args:
        name: name of the tool that the model calls.
        arguments: the call's arguments, a JSON object.
        id: names the call in later messages.
    """

    name: str
    arguments: Mapping[str, object]
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def as_message(self) -> dict[str, Any]:
        """The call in a message, as chat templates take it."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": dict(self.arguments)},
        }


@dataclass(frozen=True)
class Delta:
    """A part of an answer: text of a kind, or a call."""

    kind: Kind
    text: str
    call: Call | None = None


class AnswerReader:
    """Finds the parts of one answer as its text comes. Text around a part is stripped of whitespace.

    A part that the parser cannot read, such as half a call, is content as it was written, and so is all text after it.

    Args:
        parser: has read the prompt to its end.
        special: the tokenizer's special tokens, which are no part of an answer's text.
        calls: whether calls are parts of their own; otherwise they are content.
        limit: number of calls after which the answer ends; None: no limit.
        closing: a compiled pattern that a whole call has, such as a closing tag; None: a call may end with the answer,
            and its JSON says whether it is whole.

    Attributes:
        calls: the tool calls that were read so far.
        texts: kind of text -> the text that was read so far.
    """

    def __init__(
        self,
        parser: ResponseParser,
        special: Sequence[str],
        *,
        calls: bool,
        limit: int | None = None,
        closing: Any = None,
    ) -> None:
        self._parser, self._special, self._with_calls, self._most = parser, special, calls, limit
        self._closing = closing
        self._raw = ""  # text after the last part that has gone out
        self._broken = False
        self._spaces: dict[str, str] = {}
        self.calls: list[Call] = []
        self.texts: dict[Kind, str] = {}

    @property
    def full(self) -> bool:
        """Whether there are as many calls as there may be."""
        return self._most is not None and len(self.calls) >= self._most

    def feed(self, text: str) -> list[Delta]:
        """Takes a piece of text; returns what it completes."""
        if self.full:
            return []
        if self._broken:
            return self._texts([("content", text)])
        found: list[tuple[Kind, str] | Call] = []
        for position, character in enumerate(text, 1):
            self._raw += character
            try:
                events = self._parser.feed(character)
            except Exception:  # of the parser, about the model's text
                return self._break(found, text[position:])
            self._take(events, found)
        return self._deltas(found)

    def end(self) -> list[Delta]:
        """Ends the answer; returns what is left of it."""
        found: list[tuple[Kind, str] | Call] = []
        if self._broken or self.full:
            return []
        try:
            _, events = self._parser.finalize()
        except Exception:
            return self._break(found, "")
        self._take(events, found)
        return self._deltas(found)

    def read(self, text: str) -> AnswerReader:
        """Takes a whole answer, and returns this reader with what it has found."""
        self.feed(text)
        self.end()
        return self

    def _take(self, events: Sequence[Mapping[str, Any]], parts: list[tuple[Kind, str] | Call]) -> None:
        for event in events:
            name, closed = event["field"], event["type"] == "region_close"
            kind: Kind = "reasoning_content" if name in REASONING else "content"
            if name == "tool_calls":
                if closed:
                    whole = self._with_calls and (self._closing is None or self._closing.search(self._raw))
                    calls = self._called(event["value"]) if whole else None
                    parts += [("content", self._raw)] if calls is None else calls
                    self._raw = ""
            elif event["type"] == "region_chunk":
                parts.append((kind, event["text"]))
                self._raw = ""
            elif event["type"] == "region_open" and name != "content":
                parts.append((kind, "\n"))  # between two parts of a kind; left out before the first
            elif closed and name in REASONING:
                self._raw = ""

    def _called(self, value: Any) -> list[Call] | None:
        """The calls of a region's value, a text as Python writes them; None: it is something else."""
        calls = []
        value = read_calls(value) if isinstance(value, str) else value
        for entry in value if isinstance(value, list) else [value]:
            function = entry.get("function", entry) if isinstance(entry, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                return None
            arguments = function.get("arguments", {})
            if isinstance(arguments, str):
                try:
                    arguments = json.loads(arguments)
                except ValueError:
                    return None
            if not isinstance(arguments, dict):
                return None
            calls.append(Call(function["name"], arguments))
        return calls

    def _break(self, parts: list[tuple[Kind, str] | Call], rest: str) -> list[Delta]:
        self._broken = True
        return self._deltas([*parts, ("content", self._raw + rest)])

    def _deltas(self, parts: Sequence[tuple[Kind, str] | Call]) -> list[Delta]:
        deltas: list[Delta] = []
        for part in _joined(parts):
            if self.full:
                break
            if isinstance(part, Call):
                self.calls.append(part)
                deltas.append(Delta("content", "", part))
            else:
                deltas += self._texts([part])
        return deltas

    def _texts(self, parts: Sequence[tuple[Kind, str]]) -> list[Delta]:
        """Deltas of texts; whitespace waits for text after it, and is left out before the first."""
        deltas = []
        for kind, text in parts:
            for token in self._special:
                text = text.replace(token, "")
            whole = self._spaces.pop(kind, "") + text
            shown = whole.rstrip()
            if not shown:
                self._spaces[kind] = whole
                continue
            self._spaces[kind] = whole[len(shown) :]
            if kind not in self.texts:
                shown = shown.lstrip()
            self.texts[kind] = self.texts.get(kind, "") + shown
            deltas.append(Delta(kind, shown))
        return deltas


def _joined(parts: Sequence[tuple[Kind, str] | Call]) -> list[tuple[Kind, str] | Call]:
    """Neighbouring texts of a kind as one."""
    joined: list[tuple[Kind, str] | Call] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, tuple) and isinstance(last, tuple) and last[0] == part[0]:
            joined[-1] = (part[0], last[1] + part[1])
        else:
            joined.append(part)
    return joined
