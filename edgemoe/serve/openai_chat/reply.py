"""The common part of OpenAI's shapes of chats and completions, whole and in chunks."""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgemoe.serve.openai_chat.costs import counts, timings, usage
from edgemoe.serve.protocol.reply import Reply, Shape, json_bytes

if TYPE_CHECKING:
    from edgemoe.api.answer_reader import Delta
    from edgemoe.api.status import Progress
    from edgemoe.engine.generate import Answer
    from edgemoe.engine.sampling import TokenLogprobs
    from edgemoe.engine.token_texts import TokenTexts

_REASONS = {"context": "length"}
"""finish_reason of an answer -> OpenAI's, where they differ."""


class OpenAIReply(Reply):
    """The common part of the shapes of OpenAI's chats and completions.

    Args:
        model: the model's name.
        prompts: token ids of each answer's prompt.
        texts: each token's text.
    """

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, model: str, prompts: Sequence[list[int]], texts: TokenTexts) -> None:
        self.prompts, self._texts = prompts, texts
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }

    def whole(self, answers: Sequence[Answer]) -> Shape:
        """The object of a request that is not streamed."""
        choices = [
            self._whole(index, answer) | {"index": index, "finish_reason": self._reason(index, answer)}
            for index, answer in enumerate(answers)
        ]
        return {**self._object(self.whole_object), "choices": choices, **self._costs(answers)}

    def piece(self, index: int, text: str, tokens: Sequence[TokenLogprobs]) -> list[Shape]:
        """A chunk of text."""
        return [self._chunk(index, self._piece(index, text, tokens))]

    def delta(self, index: int, delta: Delta, tokens: Sequence[TokenLogprobs]) -> list[Shape]:
        """A chunk of what a reader has found."""
        return self.piece(index, delta.text, tokens)

    def last(self, index: int, answer: Answer, tokens: Sequence[TokenLogprobs]) -> list[Shape]:
        """A chunk with the reason of the end, and costs."""
        end = self._chunk(index, self._piece(index, "", tokens), self._reason(index, answer))
        return [{**end, "timings": timings(answer), "edgemoe": counts(answer)}]

    def usage(self, answers: Sequence[Answer]) -> list[Shape]:
        """A chunk without choices."""
        return [{**self._object(self.chunk_object), "choices": [], "usage": usage(self.prompts, answers)}]

    def progress(self, index: int, now: Progress, seconds: float) -> list[Shape]:
        """The chunk of a prompt's progress, as llama.cpp names it."""
        progress = {"total": now.prompt_tokens, "cache": now.cached_tokens, "processed": now.done_tokens}
        chunk = self._chunk(index, self._piece(index, "", []))
        return [{**chunk, "prompt_progress": progress | {"time_ms": round(1000 * seconds)}}]

    def frame(self, shape: Shape) -> bytes:
        """An event of data alone."""
        return b"data: " + json_bytes(shape) + b"\n\n"

    def ping(self) -> bytes:
        """A comment."""
        return b": ping\n\n"

    def end(self) -> bytes:
        """OpenAI's end of a stream."""
        return b"data: [DONE]\n\n"

    def _costs(self, answers: Sequence[Answer]) -> Shape:
        every = [counts(answer) for answer in answers]
        return {
            "usage": usage(self.prompts, answers),
            "timings": timings(answers[0]),
            "edgemoe": every[0] if len(every) == 1 else {"answers": every},
        }

    def _object(self, name: str) -> Shape:
        return {**self._head, "object": name}

    def _chunk(self, index: int, body: Shape, reason: str | None = None) -> Shape:
        choice = {"index": index, **body, "finish_reason": reason}
        return {**self._object(self.chunk_object), "choices": [choice]}

    def _reason(self, index: int, answer: Answer) -> str:
        return _REASONS.get(answer.finish_reason, answer.finish_reason)

    @abstractmethod
    def _whole(self, index: int, answer: Answer) -> Shape:
        """An answer's text and log probabilities."""

    @abstractmethod
    def _piece(self, index: int, text: str, tokens: Sequence[TokenLogprobs]) -> Shape:
        """A piece's text and log probabilities, if there are any."""
