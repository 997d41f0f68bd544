"""The shapes of OpenAI's chats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgemoe.serve.openai_chat.logprobs import of_chat
from edgemoe.serve.openai_chat.reply import OpenAIReply
from edgemoe.serve.protocol.reply import Shape

if TYPE_CHECKING:
    from edgemoe.api.answer_reader import AnswerReader, Call, Delta
    from edgemoe.engine.generate import Answer
    from edgemoe.engine.sampling import TokenLogprobs
    from edgemoe.engine.token_texts import TokenTexts


class ChatReply(OpenAIReply):
    """The shapes of /v1/chat/completions.

    Args:
        model: the model's name.
        prompts: token ids of each answer's prompt.
        texts: each token's text.
        readers: each finds one answer's parts; None: the answer is text.
    """

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        model: str,
        prompts: Sequence[list[int]],
        texts: TokenTexts,
        readers: Sequence[AnswerReader | None],
    ) -> None:
        super().__init__(model, prompts, texts)
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
        logprobs = of_chat(answer.logprobs, self._texts) if answer.logprobs is not None else None
        return {"message": message, "logprobs": logprobs}

    def _piece(self, index: int, text: str, tokens: Sequence[TokenLogprobs]) -> Shape:
        return {"delta": {"content": text} if text else {}, "logprobs": self._logprobs(tokens)}

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> Shape | None:
        return of_chat(tokens, self._texts) if tokens else None

    def _reason(self, index: int, answer: Answer) -> str:
        reader, reason = self._readers[index], super()._reason(index, answer)
        return "tool_calls" if reason == "stop" and reader and reader.calls else reason


def _called(call: Call) -> Shape:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
