"""The shapes of OpenAI's completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgemoe.serve.openai_chat.logprobs import of_completion
from edgemoe.serve.openai_chat.reply import OpenAIReply
from edgemoe.serve.protocol.logprobs import TextOffsets
from edgemoe.serve.protocol.reply import Shape

if TYPE_CHECKING:
    from edgemoe.engine.generate import Answer
    from edgemoe.engine.sampling import TokenLogprobs
    from edgemoe.engine.token_texts import TokenTexts


@dataclass(frozen=True)
class Shown:
    """Says which part of completions is shown.

    Args:
        tokens: shown of each answer; None: all.
        best: (n, m): of each m answers the n with the highest mean log probability of a token.
        logprobs: whether they are shown.
    """

    tokens: int | None = None
    best: tuple[int, int] = (1, 1)
    logprobs: bool = True


class CompletionReply(OpenAIReply):
    """The shapes of /v1/completions.

    Args:
        model: the model's name.
        prompts: token ids of each answer's prompt.
        texts: each token's text.
        choices: the part of the answers that is shown.
        echo: the text of each answer's prompt, which comes before the answer; None: it does not.
    """

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        model: str,
        prompts: Sequence[list[int]],
        texts: TokenTexts,
        choices: Shown,
        *,
        echo: Sequence[str] | None = None,
    ) -> None:
        super().__init__(model, prompts, texts)
        self._echo, self._shown = echo, choices
        self._offsets = [TextOffsets(texts) for _ in prompts]

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
        text, logprobs = self._echo[index], None
        if tokens:
            offsets = TextOffsets(self._texts)
            logprobs = of_completion(self.prompts[index][0], tokens, self._texts, offsets, text)
        self._offsets[index] = TextOffsets(self._texts, len(text))
        return [self._chunk(index, {"text": text, "logprobs": logprobs})]

    def _whole(self, index: int, answer: Answer) -> Shape:
        text = "" if self._shown.tokens == 0 else answer.text
        tokens = [*(answer.prompt_logprobs or []), *(answer.logprobs or [])[: self._shown.tokens]]
        first = self.prompts[index][0] if answer.prompt_logprobs is not None else None
        echo = self._echo[index] if self._echo else ""
        text, logprobs = echo + text, None
        if self._shown.logprobs:
            logprobs = of_completion(first, tokens, self._texts, TextOffsets(self._texts), text)
        return {"text": text, "logprobs": logprobs}

    def _piece(self, index: int, text: str, tokens: Sequence[TokenLogprobs]) -> Shape:
        if self._shown.tokens == 0:
            return {"text": "", "logprobs": None}
        if not tokens:
            return {"text": text, "logprobs": None}
        logprobs = of_completion(None, tokens, self._texts, self._offsets[index])
        return {"text": text, "logprobs": logprobs}


def _mean(answer: Answer) -> float:
    """Mean log probability of an answer's tokens."""
    every = answer.logprobs or []
    return sum(each.logprob for each in every) / max(len(every), 1)
