"""OpenAI's shapes of answers: chats and completions, whole and in chunks, with usage, timings and our own counts."""

from __future__ import annotations

import json
import secrets
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from edgemoe.serve.logprob_shapes import Decode, of_chat, of_completion
from edgemoe.serve.protocols.base import Reply, Shape, json_bytes

if TYPE_CHECKING:
    from edgemoe.api.answer_reader import AnswerReader, Call, Delta
    from edgemoe.api.status import Progress
    from edgemoe.engine.generate import Answer
    from edgemoe.engine.sampling import TokenLogprobs

_REASONS = {"context": "length"}
"""finish_reason of an answer -> OpenAI's, where they differ."""

_OUTSIDE = {"text", "tokens", "stop_string", "logprobs", "prompt_logprobs"}
"""Fields of an answer that have places of their own."""


def usage(prompts: Sequence[Sequence[int]], answers: Sequence[Answer]) -> Shape:
    """Tokens of a whole request; a prompt with several answers counts once."""
    prompt = sum(len(tokens) for tokens in {tuple(tokens) for tokens in prompts})
    new = sum(answer.new_tokens for answer in answers)
    cached = max((answer.cached_tokens for answer in answers), default=0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": min(cached, prompt)},
    }


def timings(answer: Answer) -> Shape:
    """Times and counts of an answer, as llama.cpp names them; milliseconds."""
    prompt_n, predicted_n = answer.prompt_tokens - answer.cached_tokens, answer.new_tokens
    prompt_ms, predicted_ms = (
        1000 * (answer.ttft_s - answer.queue_s),
        1000 * (answer.total_s - answer.ttft_s),
    )
    return {
        "cache_n": answer.cached_tokens,
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / prompt_n if prompt_n else None,
        "prompt_per_second": 1000 * prompt_n / prompt_ms if prompt_ms else None,
        "predicted_n": predicted_n,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": 1000 * answer.tpot_s if answer.tpot_s is not None else None,
        "predicted_per_second": 1 / answer.tpot_s if answer.tpot_s else None,
    }


def counts(answer: Answer) -> Shape:
    """What an answer has cost, under the names of `edgemoe chat --json`."""
    names = [field.name for field in fields(answer)]
    return {name: getattr(answer, name) for name in names if name not in _OUTSIDE}


class OpenAIReply(Reply):
    """What the shapes of OpenAI's chats and completions have in common.

    Args:
        model: the model's name.
        prompts: token ids of each answer's prompt.
        text_of: each token's text.
    """

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, model: str, prompts: Sequence[list[int]], text_of: Decode) -> None:
        self.prompts, self._text_of = prompts, text_of
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


class ChatReply(OpenAIReply):
    """The shapes of /v1/chat/completions.

    Args:
        model, prompts, text_of: as in OpenAIReply.
        readers: of each answer; None: it is text.
    """

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        model: str,
        prompts: Sequence[list[int]],
        text_of: Decode,
        readers: Sequence[AnswerReader | None],
    ) -> None:
        super().__init__(model, prompts, text_of)
        self._readers, self._called = readers, [0] * len(prompts)

    def first(self, index: int) -> list[Shape]:
        """A chunk of the role."""
        return [self._chunk(index, {"delta": {"role": "assistant", "content": ""}, "logprobs": None})]

    def delta(self, index: int, delta: Delta, tokens: Sequence[TokenLogprobs]) -> list[Shape]:
        """A chunk of text, of reasoning, or of a call."""
        body: Shape = {delta.kind: delta.text}
        if delta.call:
            body = {"tool_calls": [{"index": self._called[index], **_called(delta.call)}]}
            self._called[index] += 1
        return [self._chunk(index, {"delta": body, "logprobs": self._logprobs(tokens)})]

    def _whole(self, index: int, answer: Answer) -> Shape:
        message: Shape = {"role": "assistant", "content": answer.text, "refusal": None}
        if reader := self._readers[index]:
            message["content"] = reader.texts.get("content", None if reader.calls else "")
            if "reasoning_content" in reader.texts:
                message["reasoning_content"] = reader.texts["reasoning_content"]
            if reader.calls:
                message["tool_calls"] = [_called(call) for call in reader.calls]
        logprobs = of_chat(answer.logprobs, self._text_of) if answer.logprobs is not None else None
        return {"message": message, "logprobs": logprobs}

    def _piece(self, index: int, text: str, tokens: Sequence[TokenLogprobs]) -> Shape:
        return {"delta": {"content": text} if text else {}, "logprobs": self._logprobs(tokens)}

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> Shape | None:
        return of_chat(tokens, self._text_of) if tokens else None

    def _reason(self, index: int, answer: Answer) -> str:
        reader, reason = self._readers[index], super()._reason(index, answer)
        return "tool_calls" if reason == "stop" and reader and reader.calls else reason


def _called(call: Call) -> Shape:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


@dataclass(frozen=True)
class Shown:
    """What is shown of completions.

    Args:
        tokens: of an answer; None: all.
        best: (n, m): of each m answers the n with the highest mean log probability of a token.
        logprobs: whether they are shown.
    """

    tokens: int | None = None
    best: tuple[int, int] = (1, 1)
    logprobs: bool = True


class CompletionReply(OpenAIReply):
    """The shapes of /v1/completions.

    Args:
        model, prompts, text_of: as in OpenAIReply.
        shown: of the answers.
        echo: the text of each answer's prompt, which comes before the answer; None: it does not.
    """

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        model: str,
        prompts: Sequence[list[int]],
        text_of: Decode,
        shown: Shown,
        *,
        echo: Sequence[str] | None = None,
    ) -> None:
        super().__init__(model, prompts, text_of)
        self._echo, self._shown = echo, shown
        self._offsets = [0] * len(prompts)

    def whole(self, answers: Sequence[Answer]) -> Shape:
        """The object of a request that is not streamed, with the likeliest answers to each prompt."""
        whole, (n, of) = super().whole(answers), self._shown.best
        best = [
            at
            for first in range(0, len(answers), of)
            for at in sorted(range(first, first + of), key=lambda i: -_mean(answers[i]) if of > n else 0)[:n]
        ]
        return whole | {"choices": [whole["choices"][at] | {"index": i} for i, at in enumerate(best)]}

    def echo(self, index: int, tokens: Sequence[TokenLogprobs]) -> list[Shape]:
        """A chunk of the prompt's text."""
        if self._echo is None:
            return []
        logprobs = of_completion(self.prompts[index][0], tokens, self._text_of) if tokens else None
        self._offsets[index] = len(self._echo[index])
        return [self._chunk(index, {"text": self._echo[index], "logprobs": logprobs})]

    def _whole(self, index: int, answer: Answer) -> Shape:
        text = "" if self._shown.tokens == 0 else answer.text
        tokens = [*(answer.prompt_logprobs or []), *(answer.logprobs or [])[: self._shown.tokens]]
        first = self.prompts[index][0] if answer.prompt_logprobs is not None else None
        echo = self._echo[index] if self._echo else ""
        logprobs = of_completion(first, tokens, self._text_of) if self._shown.logprobs else None
        return {"text": echo + text, "logprobs": logprobs}

    def _piece(self, index: int, text: str, tokens: Sequence[TokenLogprobs]) -> Shape:
        if self._shown.tokens == 0:
            return {"text": "", "logprobs": None}
        if not tokens:
            return {"text": text, "logprobs": None}
        logprobs = of_completion(None, tokens, self._text_of, self._offsets[index])
        self._offsets[index] += sum(map(len, logprobs["tokens"]))
        return {"text": text, "logprobs": logprobs}


def _mean(answer: Answer) -> float:
    """Mean log probability of an answer's tokens."""
    every = answer.logprobs or []
    return sum(each.logprob for each in every) / max(len(every), 1)
