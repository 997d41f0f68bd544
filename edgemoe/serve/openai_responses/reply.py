"""The shapes of OpenAI's responses, whole and as events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edgemoe.serve.errors import ApiError
from edgemoe.serve.protocol.reply import Reply, Shape, named_event

if TYPE_CHECKING:
    from edgemoe.api.answer_reader import AnswerReader, Call, Delta, Kind
    from edgemoe.engine.generate import Answer
    from edgemoe.engine.sampling import TokenLogprobs

_CUT = ("length", "context")
"""finish_reason of an answer that goes no further though the model would."""

_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}
"""Status -> OpenAI's code of a response that has failed; the others are the server's."""


class ResponseReply(Reply):
    """The shapes of one response, whole or as events.

    Args:
        echo: fields of the request that the response repeats.
        reader: finds the answer's parts; None: the answer is text.
        count: tokens of a text.
        namespaces: function -> its namespace, where it has one.
    """

    def __init__(
        self,
        echo: Shape,
        reader: AnswerReader | None,
        count: Callable[[str], int],
        namespaces: Mapping[str, str],
    ) -> None:
        self._reader, self._count, self._namespaces = reader, count, namespaces
        self._head = {"id": _named("resp"), "object": "response", "created_at": int(time.time()), **echo}
        self._events = 0
        self._output: list[Shape] = []
        self._open: _Open | None = None

    def whole(self, answers: Sequence[Answer]) -> Shape:
        """The response."""
        (answer,), reader = answers, self._reader
        texts = reader.texts if reader else {"content": answer.text}
        calls = reader.calls if reader else []
        kinds = [kind for kind in _ITEMS if texts.get(kind)]
        status = _status(answer)
        items = [_item(_Open(kind, texts[kind]), status if not calls else "completed") for kind in kinds]
        return self._end(answer, [*items, *(self._called(call) for call in calls)])

    def first(self, index: int) -> list[Shape]:
        """response.created and response.in_progress."""
        begun = self._response("in_progress")
        return [self._event(f"response.{name}", response=begun) for name in ("created", "in_progress")]

    def piece(self, index: int, text: str, tokens: Sequence[TokenLogprobs]) -> list[Shape]:
        """Text, in the item that is open, or in a new one."""
        return self._text("content", text)

    def delta(self, index: int, delta: Delta, tokens: Sequence[TokenLogprobs]) -> list[Shape]:
        """Text, reasoning, or an item of a call."""
        if delta.call is None:
            return self._text(delta.kind, delta.text)
        closed, done = self._close("completed"), self._called(delta.call)
        arguments, place = done["arguments"], {"item_id": done["id"], "output_index": len(self._output)}
        begun = {**done, "arguments": "", "status": "in_progress"}
        name = "response.function_call_arguments"
        return [
            *closed,
            self._added(begun),
            self._event(f"{name}.delta", **place, delta=arguments),
            self._event(f"{name}.done", **place, name=delta.call.name, arguments=arguments),
            self._done(done),
        ]

    def _called(self, call: Call) -> Shape:
        """The item of a call, which is complete."""
        namespace = self._namespaces.get(call.name)
        return {
            "type": "function_call",
            "id": _named("fc"),
            "call_id": call.id,
            "name": call.name,
            **({"namespace": namespace} if namespace else {}),
            "arguments": json.dumps(call.arguments, ensure_ascii=False),
            "status": "completed",
        }

    def last(self, index: int, answer: Answer, tokens: Sequence[TokenLogprobs]) -> list[Shape]:
        """The end of the open item, and response.completed or response.incomplete with all items."""
        closed = self._close(_status(answer))
        name = f"response.{_status(answer)}"
        return [*closed, self._event(name, response=self._end(answer, self._output))]

    def error(self, error: ApiError, body: Shape) -> bytes:
        """response.failed."""
        found = {"code": _CODES.get(error.status, "server_error"), "message": str(error)}
        failed = self._response("failed", error=found)
        return self.frame(self._event("response.failed", response=failed))

    def frame(self, shape: Shape) -> bytes:
        """An event of its type's name."""
        return named_event(shape)

    def ping(self) -> bytes:
        """A comment."""
        return b": ping\n\n"

    def end(self) -> bytes:
        """Nothing: response.completed is the end."""
        return b""

    def _event(self, kind: str, **fields: Any) -> Shape:
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1, **fields}

    def _response(self, status: str, **fields: Any) -> Shape:
        given = {"output": [], "usage": None, "error": None, "incomplete_details": None, **fields}
        return {**self._head, "status": status, **given}

    def _end(self, answer: Answer, output: Sequence[Shape]) -> Shape:
        status = _status(answer)
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._response(status, output=list(output), usage=self._usage(answer), incomplete_details=cut)

    def _usage(self, answer: Answer) -> Shape:
        thought, counted = (
            self._reader.texts.get("reasoning_content", "") if self._reader else "",
            answer.reasoning_tokens,
        )
        if counted is None:  # tags that are no texts of their own
            counted = self._count(thought) if thought else 0
        return {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens},
            "output_tokens": answer.new_tokens,
            "output_tokens_details": {"reasoning_tokens": counted},
            "total_tokens": answer.prompt_tokens + answer.new_tokens,
        }

    def _text(self, kind: Kind, text: str) -> list[Shape]:
        if not text:
            return []
        begun = []
        if self._open is None or self._open.kind != kind:
            begun = self._close("completed")
            self._open = _Open(kind)
            empty = _item(self._open, "in_progress")
            part = empty["content"][0]
            begun += [self._added({**empty, "content": []}), self._of_part("content_part.added", part=part)]
        self._open.text += text
        return [*begun, self._of_part(f"{_ITEMS[kind]}.delta", delta=text, **_logprobs(kind))]

    def _close(self, status: str) -> list[Shape]:
        """Ends the item that is open."""
        if self._open is None:
            return []
        done = _item(self._open, status)
        text = {"text": self._open.text, **_logprobs(self._open.kind)}
        ended = [
            self._of_part(f"{_ITEMS[self._open.kind]}.done", **text),
            self._of_part("content_part.done", part=done["content"][0]),
            self._done(done),
        ]
        self._open = None
        return ended

    def _of_part(self, name: str, **fields: Any) -> Shape:
        """An event of the open item's one part."""
        place = {"item_id": self._open.id if self._open else "", "output_index": len(self._output)}
        return self._event(f"response.{name}", **place, content_index=0, **fields)

    def _added(self, item: Shape) -> Shape:
        return self._event("response.output_item.added", output_index=len(self._output), item=item)

    def _done(self, item: Shape) -> Shape:
        self._output.append(item)
        return self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)


_ITEMS: dict[Kind, str] = {"reasoning_content": "reasoning_text", "content": "output_text"}
"""Kind of text -> the type of its part, and of its events."""


class _Open:
    """An item of text that grows."""

    def __init__(self, kind: Kind, text: str = "") -> None:
        self.kind, self.text = kind, text
        self.id = _named("rs" if kind == "reasoning_content" else "msg")


def _item(of: _Open, status: str) -> Shape:
    part: Shape = {"type": _ITEMS[of.kind], "text": of.text}
    if of.kind == "reasoning_content":
        return {
            "type": "reasoning",
            "id": of.id,
            "status": status,
            "summary": [],
            "content": [part],
            "encrypted_content": None,
        }
    part |= {"annotations": [], "logprobs": []}
    return {"type": "message", "id": of.id, "status": status, "role": "assistant", "content": [part]}


def _logprobs(kind: Kind) -> Shape:
    """The field that events of an answer's text have, and reasoning's have not."""
    return {"logprobs": []} if kind == "content" else {}


def _status(answer: Answer) -> str:
    return "incomplete" if answer.finish_reason in _CUT else "completed"


def _named(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
