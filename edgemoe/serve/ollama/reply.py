"""The shapes of ollama's answers, whole and as lines of JSON."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from edgemoe.serve.protocol.logprobs import entries
from edgemoe.serve.protocol.reply import Reply, Shape, json_bytes

if TYPE_CHECKING:
    from edgemoe.api.answer_reader import AnswerReader, Call, Delta
    from edgemoe.engine.generate import Answer
    from edgemoe.engine.sampling import TokenLogprobs
    from edgemoe.engine.token_texts import TokenTexts

_REASONS = {"context": "length"}
"""finish_reason of an answer -> ollama's done_reason, where they differ."""

_SECOND = 1_000_000_000


class GenerateShape:
    """The shape of /api/generate.

    Args:
        model: the name that the request has.
    """

    def __init__(self, model: str) -> None:
        self._model = model

    def head(self) -> Shape:
        """The fields of every object."""
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        return {"model": self._model, "created_at": now}

    def text(self, text: str, thought: str, calls: Sequence[Shape] = ()) -> Shape:
        """A part of an answer, or all of it; generated texts have no calls."""
        return {"response": text} | ({"thinking": thought} if thought else {})

    def loaded(self, *, unloads: bool) -> Shape:
        """The answer to a request without a prompt, which loads or unloads a model."""
        reason = "unload" if unloads else "load"
        return {**self.head(), **self.text("", ""), "done": True, "done_reason": reason}


class ChatShape(GenerateShape):
    """The shape of /api/chat."""

    def text(self, text: str, thought: str, calls: Sequence[Shape] = ()) -> Shape:
        """A part of an answer, or all of it."""
        message: Shape = {"role": "assistant", "content": text}
        message |= {"thinking": thought} if thought else {}
        return {"message": message | ({"tool_calls": list(calls)} if calls else {})}


class OllamaReply(Reply):
    """The shapes of one answer, whole or as lines of JSON.

    Args:
        shape: the shape of the endpoint.
        reader: finds the answer's parts; None: the answer is text.
        texts: each token's text.
    """

    media_type = b"application/x-ndjson"

    def __init__(self, shape: GenerateShape, reader: AnswerReader | None, texts: TokenTexts) -> None:
        self._shape, self._reader, self._texts = shape, reader, texts
        self._calls = 0

    def whole(self, answers: Sequence[Answer]) -> Shape:
        """The object of a request that is not streamed."""
        (answer,), reader = answers, self._reader
        texts = reader.texts if reader else {"content": answer.text}
        calls = [_called(call, index) for index, call in enumerate(reader.calls if reader else ())]
        text = self._shape.text(texts.get("content", ""), texts.get("reasoning_content", ""), calls)
        return {**self._shape.head(), **text, **self._logprobs(answer.logprobs or ()), **_end(answer)}

    def piece(self, index: int, text: str, tokens: Sequence[TokenLogprobs]) -> list[Shape]:
        """A line of text."""
        return [self._line(text, "", tokens)] if text or tokens else []

    def delta(self, index: int, delta: Delta, tokens: Sequence[TokenLogprobs]) -> list[Shape]:
        """A line of text, of reasoning, or of a call."""
        if delta.call:
            self._calls += 1
            return [self._line("", "", tokens, [_called(delta.call, self._calls - 1)])]
        thinks = delta.kind == "reasoning_content"
        return [self._line("" if thinks else delta.text, delta.text if thinks else "", tokens)]

    def last(self, index: int, answer: Answer, tokens: Sequence[TokenLogprobs]) -> list[Shape]:
        """A line with the reason of the end, counts and times."""
        return [{**self._line("", "", tokens), **_end(answer)}]

    def frame(self, shape: Shape) -> bytes:
        """A line of JSON."""
        return json_bytes(shape) + b"\n"

    def ping(self) -> bytes:
        """A line without text: clients parse every line."""
        return self.frame(self._line("", "", ()))

    def end(self) -> bytes:
        """Nothing: the line that is done is the end."""
        return b""

    def _line(
        self, text: str, thought: str, tokens: Sequence[TokenLogprobs], calls: Sequence[Shape] = ()
    ) -> Shape:
        part = self._shape.text(text, thought, calls)
        return {**self._shape.head(), **part, **self._logprobs(tokens), "done": False}

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> Shape:
        return {"logprobs": entries(tokens, self._texts)} if tokens else {}


def _called(call: Call, index: int) -> Shape:
    function = {"index": index, "name": call.name, "arguments": dict(call.arguments)}
    return {"id": call.id, "function": function}


def _end(answer: Answer) -> Shape:
    """The fields of an answer's end; times in nanoseconds. The model was loaded before."""
    reason = answer.finish_reason
    return {
        "done": True,
        "done_reason": _REASONS.get(reason, reason),
        "total_duration": round(answer.total_s * _SECOND),
        "load_duration": 0,
        "prompt_eval_count": answer.prompt_tokens,
        "prompt_eval_duration": round((answer.ttft_s - answer.queue_s) * _SECOND),
        "eval_count": answer.new_tokens,
        "eval_duration": round((answer.total_s - answer.ttft_s) * _SECOND),
    }
