"""The contract of a reply: answers as one JSON object, or as the parts of a stream."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from edgemoe.serve.errors import ApiError

if TYPE_CHECKING:
    from edgemoe.api.answer_reader import Delta
    from edgemoe.api.status import Progress
    from edgemoe.engine.generate import Answer
    from edgemoe.engine.sampling import TokenLogprobs

Shape = dict[str, Any]
"""A JSON object."""


class Reply(ABC):
    """The shapes of one request's answers, and their bytes in a stream.

    A request that is not streamed is answered by `whole`. A stream has for each answer `first`, `echo`, any number of
    `piece` and `delta`, and `last`; then `usage`, and `end` or `error`. Each shape passes `frame`; `ping` fills pauses.

    `index` is the number of an answer in its request. `tokens` are log probabilities that earlier chunks lack.

    Attributes:
        media_type: the stream's content-type.
    """

    media_type = b"text/event-stream; charset=utf-8"

    @abstractmethod
    def whole(self, answers: Sequence[Answer]) -> Shape:
        """The object of a request that is not streamed."""

    def first(self, index: int) -> Sequence[Shape]:
        """Chunks of an answer that come before its prompt runs."""
        return ()

    def echo(self, index: int, tokens: Sequence[TokenLogprobs]) -> Sequence[Shape]:
        """Chunks of an echoed prompt, with the log probabilities of its tokens."""
        return ()

    @abstractmethod
    def piece(self, index: int, text: str, tokens: Sequence[TokenLogprobs]) -> Sequence[Shape]:
        """Chunks of text."""

    @abstractmethod
    def delta(self, index: int, delta: Delta, tokens: Sequence[TokenLogprobs]) -> Sequence[Shape]:
        """Chunks of a part that a reader has found."""

    @abstractmethod
    def last(self, index: int, answer: Answer, tokens: Sequence[TokenLogprobs]) -> Sequence[Shape]:
        """Chunks at the end of an answer."""

    def usage(self, answers: Sequence[Answer]) -> Sequence[Shape]:
        """Chunks after the last answer, for requests that want tokens counted there."""
        return ()

    def progress(self, index: int, now: Progress, seconds: float) -> Sequence[Shape]:
        """Chunks of a prompt's progress, for requests that want them."""
        return ()

    @abstractmethod
    def frame(self, shape: Shape) -> bytes:
        """A chunk, or an error, in a stream."""

    def error(self, error: ApiError, body: Shape) -> bytes:
        """An error that ends a stream which has begun; `body` is the error object of the protocol."""
        return self.frame(body)

    @abstractmethod
    def ping(self) -> bytes:
        """A sign of life in a stream without news."""

    @abstractmethod
    def end(self) -> bytes:
        """The end of a stream without an error."""


def named_event(shape: Shape) -> bytes:
    """A server-sent event of its type's name."""
    return b"event: %s\ndata: %s\n\n" % (str(shape["type"]).encode(), json_bytes(shape))


def json_bytes(value: object) -> bytes:
    """A JSON text in one line."""
    return _ENCODER.encode(value).encode()


def large_json_bytes(value: object) -> bytes:
    """Like `json_bytes`, but written piece by piece: other threads run meanwhile."""
    return "".join(_ENCODER.iterencode(value)).encode()


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
