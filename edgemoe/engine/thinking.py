"""The reasoning of an answer: its tokens are counted, and its tag is closed once a budget is spent."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from edgemoe.engine.text import StopString, TextStream
from edgemoe.grammar.lark import Reasoning
from edgemoe.storage.files.untrusted import foreign_code


class Thinking:
    """Follows the tokens of one answer. Used by the thread that chooses them.

    Reasoning lies between tags, which a tokenizer may have as tokens of their own or write in parts, so that tags are
    found in text. An answer may have several parts of reasoning; the budget is for all of them together.

    Args:
        tokenizer: a fast tokenizer of transformers.
        reasoning: the tags, and the text that closes reasoning.
        prompt: token ids before the answer.
        budget: most tokens of reasoning, 0 for none; None: no limit.

    Attributes:
        tokens: tokens of reasoning so far, without its tags.

    """

    def __init__(
        self, tokenizer: Any, reasoning: Reasoning, prompt: Sequence[int], budget: int | None = None
    ) -> None:
        self._tokenizer, self._reasoning, self._budget = tokenizer, reasoning, budget
        self._text = TextStream(tokenizer, special_tokens=True, after=prompt)
        self._open, self._close = StopString(reasoning.open), StopString(reasoning.close)
        self._inside, self.tokens = reasoning.begun, 0
        self._starts = deque[int](maxlen=len(reasoning.close))
        """Characters of the answer's text before each of the last tokens of reasoning."""
        self._closing = deque[int]()
        self._tag_is_token = len(self._encoded(reasoning.close)) == 1
        self._reopening = self._first_token_of_its_own() if budget is not None else ([], None)

    def forced(self) -> int | None:
        """Returns the token that must come next, where the budget is spent within reasoning; None: any token may."""
        if not self._closing and self._inside and self._spent:
            self._closing.extend(self._encoded(self._rest_of_closing()))
        return self._closing[0] if self._closing else None

    def masked(self, tokens: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Returns logits that open no further reasoning, once the budget is spent.

        Args:
            tokens: ids of the prompt and of the answer so far.
            logits: float32 [vocab]; not changed.
        """
        before, token = self._reopening
        if token is None or not self._spent or list(tokens[len(tokens) - len(before) :]) != before:
            return logits
        return logits.index_fill(0, torch.tensor([token]), -torch.inf)

    def take(self, token: int) -> None:
        """Takes the next token of the answer, after `forced`.

        Raises:
            ModelRefused: the tokenizer cannot decode it.
        """
        closing = bool(self._closing)
        if closing:
            self._closing.popleft()
        start = len(self._text.text)
        piece = self._text.add(token)
        if not self._inside:
            if end := self._open.find(piece):
                self._inside, piece = True, piece[end:]
                self._close.find(piece)
            return
        if not closing:
            self.tokens += 1
            self._starts.append(start)
        if end := self._close.find(piece):
            self._inside = False
            tag = start + end - len(self._reasoning.close)
            self.tokens -= sum(each >= tag for each in self._starts)
            self._starts.clear()
            self._open.find(piece[end:])

    @property
    def _spent(self) -> bool:
        return self._budget is not None and self.tokens >= self._budget

    def _rest_of_closing(self) -> str:
        """The text that closes reasoning, without what the answer's text already has of it at its end."""
        whole, text = self._reasoning.closing or self._reasoning.close, self._text.text
        # Half a tag is completed only where the tag is no token of its own.
        begun = len(whole) - len(whole.lstrip())
        most = begun if self._tag_is_token else len(whole) - 1
        for closing in (whole, whole.lstrip()):
            done = next((n for n in range(most, 0, -1) if text.endswith(closing[:n])), 0)
            if done:
                return closing[done:]
            most -= begun
        return whole

    def _encoded(self, text: str) -> list[int]:
        with foreign_code("a tokenizer that encodes text"):
            return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _first_token_of_its_own(self) -> tuple[list[int], int | None]:
        """The tokens that the opening tag begins with as the answer's opening text does, and its first other token.

        Without such a text a tag of several tokens is known at its last one, since its first may begin any text.
        """
        tag, lead = self._encoded(self._reasoning.open), self._encoded(self._reasoning.lead)
        same = next((i for i, (a, b) in enumerate(zip(tag, lead, strict=False)) if a != b), len(tag) - 1)
        return (tag[:same], tag[same]) if tag else ([], None)
