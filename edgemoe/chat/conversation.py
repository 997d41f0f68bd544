"""A conversation: the turns of a chat."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from edgemoe.api.model import Model
from edgemoe.api.pictures import picture_part
from edgemoe.api.status import Progress
from edgemoe.api.template import Message, render_chat
from edgemoe.api.thinking import WITHOUT_THINKING
from edgemoe.chat.channels import TaggedText, channel_form
from edgemoe.chat.saved_kv import SavedKV
from edgemoe.console.answer_text import OPEN
from edgemoe.console.streams import require_text
from edgemoe.engine.generate import Answer, Generation
from edgemoe.engine.sampling import Sampler, Sampling
from edgemoe.errors import ContextExceeded, UserError
from edgemoe.kv.pictures import words_of

_TAIL = 16
"""Tokens of a prompt that may end in an opened reasoning."""


class Conversation:
    """Turns of a chat. Each is a request to the model, which keeps the KV that they share (Model's `keep`).

    An error or Ctrl-C inside a method leaves the messages unchanged: an incomplete answer is dropped together with its
    question. For one thread.

    Args:
        model: computes the answers; its sampling is the first.
        system: a system message.

    Raises:
        UserError: the model's chat template takes no system message, and `system` is given.
    """

    def __init__(self, model: Model, system: str | None = None) -> None:
        self._model, self._tokenizer = model, model.tokenizer
        self._tags = model.tags()
        self._channels = channel_form(self._tags.form)
        self._sampler = Sampler(replace(model.sampling, special_tokens=self._channels is not None))
        self._system: list[Message] = []
        self._turns: list[Message] = []
        self._left, self._attached = 0, list[dict[str, Any]]()
        self.reasons = False
        """Whether the prompt of the last turn has opened the model's reasoning."""
        self.set_system(system)
        self._generation: Generation | None = None

    @property
    def sampling(self) -> Sampling:
        """The sampling of the next answer."""
        return self._sampler.sampling

    def set_sampling(self, sampling: Sampling) -> None:
        """Changes the sampling of later answers; the random state continues where the seed is the same.

        Raises:
            UserError: a budget of reasoning, and a model whose tags of reasoning are not known.
        """
        if sampling.thinking_budget is not None:
            self._tags.require()
        self._sampler = self._sampler.changed(sampling)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages so far: {"role": system, user or assistant, "content": text, or text and pictures}."""
        return (*self._system, *self._turns)

    @property
    def system(self) -> str | None:
        """The system message, or None."""
        return self._system[0]["content"] if self._system else None

    def prompt_read(self) -> tuple[int, int]:
        """Tokens of the running turn's prompt that are computed, and all of them, without the reused ones.

        For any thread.
        """
        if self._generation is None:
            return 0, 0
        now = Progress.of(self._generation.request)
        return now.done_tokens - now.cached_tokens, now.prompt_tokens - now.cached_tokens

    def set_system(self, text: str | None) -> None:
        """Replaces the system message; None removes it.

        Raises:
            UserError: it is no text, or the chat template refuses it or leaves it out.
        """
        system: list[Message] = []
        if text:
            require_text(text, "a system message")
            system = [{"role": "system", "content": text}]
            written = render_chat(self._tokenizer, [*system, {"role": "user", "content": "x"}])
            if text.strip() not in written:
                raise UserError(
                    "a chat template that writes system messages",
                    "this model's, which leaves it out",
                    "write the message as a turn",
                )
        self._system = system

    def clear(self) -> None:
        """Removes every turn; a system message stays."""
        self._turns, self._left, self._attached = [], 0, []

    @property
    def attached(self) -> int:
        """Number of pictures that go with the next turn."""
        return len(self._attached)

    def attach(self, data: bytes) -> int:
        """Adds a picture to the next turn; returns its number among this turn's pictures, from 1.

        Args:
            data: the bytes of its file.

        Raises:
            UserError: it cannot be decoded or is too large, the model takes none, or the turn would have too many.
        """
        parts = [*self._attached, picture_part(data)]
        earlier = self._turns[self._left :]
        _, pictures = self._model.prompts.pictures.split([*earlier, {"role": "user", "content": parts}])
        tokens, context = sum(one.tokens for one in pictures[-len(parts) :]), self._model.engine.plan.context
        if tokens >= context:
            wanted = f"pictures of fewer than {context} tokens in one turn, as the context holds no more"
            raise ContextExceeded(wanted, f"{tokens}", "attach fewer or smaller ones, or raise --context")
        self._attached = parts
        return len(parts)

    def restore(self, messages: Sequence[Message]) -> int:
        """Replaces all messages by saved ones; returns their length in tokens, which may exceed the context.

        Raises:
            UserError: the chat template refuses them.
        """
        length = len(self._model.prompts.encode(messages)) if messages else 0
        self._left, self._attached = 0, []
        self._system = [message for message in messages[:1] if message["role"] == "system"]
        self._turns = list(messages[len(self._system) :])
        return length

    def saved_kv(self, *, write: bool = False) -> tuple[SavedKV | None, int]:
        """Returns what the KV of the conversation is of, and how many of its tokens have theirs on disk.

        Args:
            write: writes it first, with the KV of all later turns; otherwise the tokens are not counted.

        Returns:
            (None, 0) where no KV is kept on disk.
        """
        tokens = self._shown(self._turns[self._left :]) if write and self._turns else []
        if write:
            self._model.save(tokens)
        found = self._model.saved_kv(tokens)
        return (SavedKV(self._kv_format, found[0]), found[1]) if found else (None, 0)

    def kv_note(self, saved_kv: SavedKV | None) -> str:
        """Says where the KV of a conversation that was just restored comes from; "" where the file says nothing.

        Args:
            saved_kv: the KV that the conversation's file names.
        """
        now, tokens = self.saved_kv(write=True)
        if saved_kv is None:
            return ""
        if now is None:
            return "its KV is computed again: this chat keeps none on disk"
        if saved_kv.format != now.format:
            return (
                f"its KV is computed again: it was saved as {saved_kv.format}, and this chat has {now.format}"
            )
        if saved_kv.root != now.root:
            return "its KV is computed again: it was saved with another model or other settings"
        if not tokens:
            return "its KV is computed again: no block of it is on disk"
        return f"the KV of {tokens} tokens comes from disk"

    @property
    def _kv_format(self) -> str:
        return str(self._model.engine.shape.kv.format)

    def ask(
        self, prompt: str, on_text: Callable[[str], None], on_shift: Callable[[int], None] = lambda left: None
    ) -> Answer:
        """Answers one turn. Where the context is full, the oldest messages leave it until half of it is free.

        Args:
            prompt: the user's message, which the attached pictures come before.
            on_text: called with each piece of the answer.
            on_shift: called with the number of messages that leave the context for this turn.

        Raises:
            ContextExceeded: with both counts.
            UserError, ModelRefused: the chat template refuses the conversation, or cannot be run. A UserError drops
                the attached pictures, which later turns would fail by too.
        """
        content: Any = [*self._attached, {"type": "text", "text": prompt}] if self._attached else prompt
        try:
            answer = self._answer([*self._turns, {"role": "user", "content": content}], on_text, on_shift)
        except UserError:
            self._attached = []
            raise
        self._attached = []
        return answer

    def regenerate(
        self, on_text: Callable[[str], None], on_shift: Callable[[int], None] = lambda left: None
    ) -> Answer:
        """Answers the last question again and replaces its answer; arguments as of ask.

        Raises:
            UserError: there is no answer yet.
        """
        if not self._turns:
            raise UserError("an answer to replace", "none: nothing has been answered yet", "enter a turn")
        return self._answer(self._turns[:-1], on_text, on_shift)

    def _answer(
        self, turns: list[Message], on_text: Callable[[str], None], on_shift: Callable[[int], None]
    ) -> Answer:
        start = time.perf_counter()
        tokens, left = self._fitting(turns)
        if left > self._left:
            on_shift(left - self._left)
        end = self._tokenizer.decode(words_of(tokens[-_TAIL:]))
        self.reasons = end.rstrip().endswith(OPEN)
        tagged = TaggedText(self._channels.reader(end, None), on_text) if self._channels else None
        on_piece = tagged.write if tagged else on_text
        self._generation = self._model.begin(
            tokens, self._sampler, start, on_piece, reasoning=self._tags.after(end)
        )
        answer = self._model.run(self._generation)
        content = answer.text
        if tagged:
            tagged.end()
            answer, content = replace(answer, text=tagged.text), tagged.content
        self._turns, self._left = [*turns, {"role": "assistant", "content": content}], left
        return answer

    def _shown(self, turns: Sequence[Message]) -> list[int]:
        """Encodes some turns with the system message."""
        more = WITHOUT_THINKING if self.sampling.thinking_budget == 0 else {}
        return self._model.prompts.encode([*self._system, *turns], more)

    def _fitting(self, turns: list[Message]) -> tuple[list[int], int]:
        """Encodes the turns that the context holds, with the system message.

        Where an answer has less than a quarter of the context, or fewer than its most tokens, the oldest turns leave
        until half of the context is free; the last question always stays.

        Returns:
            token ids, and the number of turns left out.
        """
        context = self._model.engine.plan.context
        answer = min(self.sampling.max_new_tokens, context // 4)
        questions = [i for i, turn in enumerate(turns) if turn["role"] == "user"]
        left = self._left if self._left in questions else 0
        tokens = self._shown(turns[left:])
        if len(tokens) + answer > context:
            for later in [i for i in questions if i > left]:
                left = later
                tokens = self._shown(turns[left:])
                if len(tokens) <= context // 2:
                    break
        return tokens, left
