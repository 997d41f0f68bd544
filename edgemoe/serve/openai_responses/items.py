"""The items of a response's input, and the messages that they become."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Discriminator, Tag

from edgemoe.serve.errors import ApiError
from edgemoe.serve.protocol.reply import Shape
from edgemoe.serve.request.fields import Fields, Name

INPUT = "input"
"""The field of the conversation."""

_TEXTS = ("input_text", "output_text", "reasoning_text", "summary_text", "text")


class TextPart(Fields):
    """A part of a message, of a tool's output, or of reasoning. Annotations and the like say nothing to a model."""

    type: Name
    text: str | None = None
    image_url: str | None = None
    detail: Name | None = None


def _content(parts: str | Sequence[TextPart]) -> str | list[Shape]:
    """The content of a client's message: its text, or parts where it has pictures.

    Raises:
        ApiError: a part that is neither text nor a picture.
    """
    if isinstance(parts, str) or not any(part.type == "input_image" for part in parts):
        return _joined(parts)
    return [
        {"type": "image_url", "image_url": {"url": part.image_url or ""}}
        if part.type == "input_image"
        else {"type": "text", "text": _joined([part])}
        for part in parts
    ]


def _joined(parts: str | Sequence[TextPart] | None, between: str = "\n") -> str:
    """The text of parts.

    Raises:
        ApiError: one that is no text.
    """
    if parts is None or isinstance(parts, str):
        return parts or ""
    other = next((part.type for part in parts if part.type not in _TEXTS), None)
    if other is not None:
        message = (
            f"expected parts of type input_text, output_text or input_image, got {other!r}: leave it out"
        )
        raise ApiError(400, message, param=INPUT, code="unsupported_content")
    return between.join(part.text or "" for part in parts)


class Item(Fields):
    """An item of a conversation. Its id, status and the like, which clients send back, say nothing to a model."""


class MessageItem(Item):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[TextPart]

    def add_to(self, messages: list[Shape]) -> None:
        """Adds the message of a chat."""
        if self.role == "user":
            messages.append({"role": "user", "content": _content(self.content)})
            return
        text = _joined(self.content)
        if self.role == "assistant":
            answer = _answer(messages)
            answer["content"] = f"{answer['content']}\n{text}" if answer["content"] else text
            return
        role = "system"
        first = messages[0] if len(messages) == 1 else None
        if first and first["role"] == role:  # templates have a place for one of them
            first["content"] += f"\n\n{text}"
        else:
            messages.append({"role": role, "content": text})


class ReasoningItem(Item):
    """Reasoning of an answer, which the client sends back. Encrypted reasoning of other servers is not read."""

    type: Literal["reasoning"]
    content: list[TextPart] | None = None
    summary: list[TextPart] | None = None

    def add_to(self, messages: list[Shape]) -> None:
        """Adds it to the answer of a chat."""
        if text := _joined(self.content or self.summary):
            answer = _answer(messages)
            before = answer.get("reasoning_content")
            answer["reasoning_content"] = f"{before}\n{text}" if before else text


class CallItem(Item):
    """A call of an answer, which the client sends back."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str

    def add_to(self, messages: list[Shape]) -> None:
        """Adds it to the answer of a chat."""
        function = {"name": self.name, "arguments": self.arguments}
        calls = _answer(messages).setdefault("tool_calls", [])
        calls.append({"id": self.call_id, "type": "function", "function": function})


class OutputItem(Item):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Name
    output: str | list[TextPart]

    def add_to(self, messages: list[Shape]) -> None:
        """Adds the message of a chat."""
        messages.append({"role": "tool", "tool_call_id": self.call_id, "content": _joined(self.output)})


def _answer(messages: list[Shape]) -> Shape:
    """The assistant's message at the end, in which the items of one answer come together."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _kind(item: object) -> str | None:
    return item.get("type") or "message" if isinstance(item, dict) else getattr(item, "type", None)


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")],
    Discriminator(_kind),
]
