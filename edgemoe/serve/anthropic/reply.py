"""The shapes of Anthropic's messages, whole and as events."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgemoe.serve.protocol.reply import Reply, Shape, json_bytes, named_event

if TYPE_CHECKING:
    from edgemoe.api.answer_reader import AnswerReader, Delta
    from edgemoe.engine.generate import Answer
    from edgemoe.engine.sampling import TokenLogprobs

_REASONS = {"length": "max_tokens", "context": "model_context_window_exceeded"}
"""finish_reason of an answer -> Anthropic's stop_reason, where it says it all."""


class MessageReply(Reply):
    """The shapes of one message, whole or as events.

    Args:
        model: the name that the request has.
        prompt_tokens: number of the prompt's tokens.
        reader: finds the answer's parts; None: the answer is text.
    """

    def __init__(self, model: str, prompt_tokens: int, reader: AnswerReader | None) -> None:
        self._prompt_tokens, self._reader = prompt_tokens, reader
        self._head = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._open, self._blocks = "", 0  # the kind of the block that is open, and blocks so far

    def whole(self, answers: Sequence[Answer]) -> Shape:
        """The message."""
        (answer,), reader = answers, self._reader
        texts = reader.texts if reader else {"content": answer.text}
        blocks: list[Shape] = []
        if thought := texts.get("reasoning_content"):
            blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
        if text := texts.get("content"):
            blocks.append({"type": "text", "text": text})
        for call in reader.calls if reader else ():
            blocks.append(
                {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)}
            )
        return {**self._head, "content": blocks, **self._stop(answer), "usage": _usage(answer)}

    def first(self, index: int) -> list[Shape]:
        """message_start. Tokens that are kept from earlier prompts are known at the end."""
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        message: Shape = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None}
        return [{"type": "message_start", "message": message | {"usage": usage}}]

    def piece(self, index: int, text: str, tokens: Sequence[TokenLogprobs]) -> list[Shape]:
        """Text, in the block that is open, or in a new one."""
        return self._text("text", text)

    def delta(self, index: int, delta: Delta, tokens: Sequence[TokenLogprobs]) -> list[Shape]:
        """Text, reasoning, or a block of a call."""
        call = delta.call
        if call is None:
            return self._text("thinking" if delta.kind == "reasoning_content" else "text", delta.text)
        begin = self._begin({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        arguments = json_bytes(call.arguments).decode()
        return [*begin, self._delta({"type": "input_json_delta", "partial_json": arguments}), *self._end()]

    def last(self, index: int, answer: Answer, tokens: Sequence[TokenLogprobs]) -> list[Shape]:
        """message_delta, with the end and the whole usage, and message_stop."""
        end = {"type": "message_delta", "delta": self._stop(answer), "usage": _usage(answer)}
        return [*self._end(), end, {"type": "message_stop"}]

    def frame(self, shape: Shape) -> bytes:
        """An event of its type's name."""
        return named_event(shape)

    def ping(self) -> bytes:
        """Anthropic's ping."""
        return self.frame({"type": "ping"})

    def end(self) -> bytes:
        """Nothing: message_stop is the end."""
        return b""

    def _text(self, kind: str, text: str) -> list[Shape]:
        if not text:
            return []
        empty = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
        begin = [] if self._open == kind else self._begin(empty)
        return [*begin, self._delta({"type": f"{kind}_delta", kind: text})]

    def _begin(self, block: Shape) -> list[Shape]:
        """Ends the block that is open, and begins another."""
        ended = self._end()
        self._open = block["type"]
        return [*ended, {"type": "content_block_start", "index": self._blocks, "content_block": block}]

    def _delta(self, delta: Shape) -> Shape:
        return {"type": "content_block_delta", "index": self._blocks, "delta": delta}

    def _end(self) -> list[Shape]:
        if not self._open:
            return []
        ended = {"type": "content_block_stop", "index": self._blocks}
        self._open, self._blocks = "", self._blocks + 1
        return [ended]

    def _stop(self, answer: Answer) -> Shape:
        reason = _REASONS.get(answer.finish_reason)
        if reason is None and answer.stop_string is not None:
            reason = "stop_sequence"
        if reason is None:
            reason = "tool_use" if self._reader and self._reader.calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": answer.stop_string}


def _usage(answer: Answer) -> Shape:
    """Tokens of a message. A prompt's tokens are divided into kept ones of earlier prompts, and the others."""
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": answer.new_tokens,
    }
