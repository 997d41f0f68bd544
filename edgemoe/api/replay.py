"""Answers with calls as the model has written them, so that later turns keep their tokens.

A client sends a call back as JSON, and the chat template writes it in its own way: other spaces, other escapes, other
tokens. Where it writes the same message as the model did, the model's own tokens take the place of the template's.
"""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgemoe.api.answer_form import AnswerForm
from edgemoe.api.answer_reader import AnswerReader, Call, Kind
from edgemoe.api.template import Message, encode_text, render_chat

MOST_TURNS = 1024

MOST_REPLAYED = 256
"""Answers of one conversation, each of which is rendered to find its place."""

MOST_TOKENS = 1 << 20
"""Most tokens of all turns together."""


@dataclass(frozen=True)
class Turn:
    """One answer with calls.

    Args:
        tokens: ids, without the one that ended it; an array of C's int.
        texts: kind -> text.
        calls: one or more.
    """

    tokens: array[int]
    texts: Mapping[Kind, str]
    calls: tuple[Call, ...]

    def equals(self, reader: AnswerReader) -> bool:
        """Whether a reader has found the same texts and calls, ids aside."""
        own = [(call.name, call.arguments) for call in self.calls]
        return dict(self.texts) == reader.texts and own == [(c.name, c.arguments) for c in reader.calls]


class Replays:
    """The latest answers with calls, by the ids of these, which only their own client knows. Thread-safe."""

    def __init__(self) -> None:
        self._turns = OrderedDict[str, Turn]()
        self._alike = dict[str, str]()  # what an answer says -> the id of the latest that says it
        self._tokens, self._lock = 0, threading.Lock()

    def add(self, tokens: Sequence[int], reader: AnswerReader) -> None:
        """Keeps an answer that has ended; without a call, nothing."""
        if not reader.calls:
            return
        turn = Turn(array("i", tokens), dict(reader.texts), tuple(reader.calls))
        with self._lock:
            self._turns[turn.calls[0].id] = turn
            self._alike[_said(turn.texts, turn.calls)] = turn.calls[0].id
            self._tokens += len(tokens)
            while len(self._turns) > MOST_TURNS or self._tokens > MOST_TOKENS:
                name, oldest = self._turns.popitem(last=False)
                self._tokens -= len(oldest.tokens)
                said = _said(oldest.texts, oldest.calls)
                if self._alike[said] == name:
                    del self._alike[said]

    def of(self, message: Message) -> Turn | None:
        """The answer that a message repeats; None: it is not known.

        Calls without ids, as ollama's clients send them, are known by what the whole message says.
        """
        calls = message.get("tool_calls") or []
        ids = [call.get("id") for call in calls]
        if not any(ids):
            return self._of_same(message, calls) if calls else None
        with self._lock:
            turn = self._turns.get(ids[0])
        return turn if turn and [call.id for call in turn.calls] == ids else None

    def _of_same(self, message: Message, calls: Sequence[Mapping[str, Any]]) -> Turn | None:
        texts = {kind: message.get(kind) or "" for kind in _KINDS}
        said = _said(texts, [Call(**call["function"]) for call in calls])
        with self._lock:
            return self._turns.get(self._alike.get(said, ""))

    def encode(
        self,
        tokenizer: Any,
        messages: Sequence[Message],
        variables: Mapping[str, object],
        form: AnswerForm,
        ends: Sequence[str],
    ) -> tuple[str, list[int]]:
        """Encodes a conversation, with the model's own tokens of answers that the chat template writes alike.

        Args:
            tokenizer: the tokenizer of the model.
            messages: the conversation; an answer's reasoning is put back where the client has left it out.
            variables: the variables of the template.
            form: finds the parts of the model's answers.
            ends: texts of the tokens that end an answer.

        Returns:
            the template's text, and token ids.

        Raises:
            UserError, ModelRefused: as render_chat.
        """
        known = [self.of(message) for message in messages]
        places = [number for number, turn in enumerate(known) if turn and number][:MOST_REPLAYED]
        given = [_completed(message, turn) for message, turn in zip(messages, known, strict=True)]
        text = render_chat(tokenizer, given, variables)
        tokens, done, tools = list[int](), 0, variables.get("tools")
        for number in places:
            turn, prompt = known[number], render_chat(tokenizer, given[:number], variables)
            if turn is None or len(prompt) < done or not text.startswith(prompt):
                continue
            rest = text[len(prompt) :]
            end = min((at for end in ends if (at := rest.find(end)) >= 0), default=-1)
            reader = form.reader(prompt, tools if isinstance(tools, list) else None)
            if end >= 0 and turn.equals(reader.read(rest[:end])):
                tokens += [*encode_text(tokenizer, text[done : len(prompt)]), *turn.tokens]
                done = len(prompt) + end
        return text, tokens + encode_text(tokenizer, text[done:])


_KINDS: tuple[Kind, ...] = ("content", "reasoning_content")


def _said(texts: Mapping[Kind, str], calls: Sequence[Call]) -> str:
    """Names an answer by its texts and calls, ids aside."""
    said = [[texts.get(kind, "") for kind in _KINDS], [[call.name, dict(call.arguments)] for call in calls]]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _completed(message: Message, turn: Turn | None) -> Message:
    reasoning = turn.texts.get("reasoning_content") if turn else None
    if reasoning and not message.get("reasoning_content"):
        return {**message, "reasoning_content": reasoning}
    return message
