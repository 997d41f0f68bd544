"""Chats of one model for programs that send all messages each time: tokens, the grammar of the answer, its reader."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from edgemoe.api.answer_form import AnswerForm
from edgemoe.api.answer_reader import AnswerReader
from edgemoe.api.model import Model
from edgemoe.api.replay import Replays
from edgemoe.api.template import Message, encode_chat
from edgemoe.api.thinking import ReasoningTags
from edgemoe.api.tool_use import (
    ToolUse,
    call_form,
    described,
    reasoning_of,
    require_tools,
    with_tools,
    writes_tools,
)
from edgemoe.errors import ModelRefused
from edgemoe.grammar.confined import Cancellation
from edgemoe.grammar.lark import Form, Reasoning
from edgemoe.grammar.matcher import Grammar
from edgemoe.kv.pictures import pictures_of
from edgemoe.storage.files.untrusted import foreign_code


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation whose answer comes next.

    Args:
        tokens: ids of the prompt.
        reader: makes the reader of an answer; None: answers are plain text.
        grammar: compiles the grammar of the answer, which takes a while and can be cancelled; None: it has none.
        reasoning: tags of the answer's reasoning; None: they are not known.

    Raises:
        UserError: by `grammar`: a schema cannot be enforced.
    """

    tokens: list[int]
    reader: Callable[[], AnswerReader] | None = None
    grammar: Callable[[Cancellation], Grammar] | None = None
    reasoning: Reasoning | None = None

    @property
    def picture_bytes(self) -> int:
        """Bytes of the files of its pictures, which stay in memory as long as the prompt."""
        pictures = pictures_of(self.tokens)
        return pictures.nbytes if pictures else 0


def capabilities_of(tokenizer: Any) -> list[str]:
    """The capabilities of a model's chats: `tools` and `thinking`, where the form of its answers shows them."""
    form = _form_of(tokenizer)
    if form is None:
        return []
    found = {"tools": form.reads_calls, "thinking": form.reasoning is not None}
    return [name for name, has in found.items() if has]


def _form_of(tokenizer: Any) -> AnswerForm | None:
    try:
        return AnswerForm.of(tokenizer)
    except ModelRefused as error:
        logging.getLogger("edgemoe").warning("answers are plain text: %s", error)
        return None


class ChatPrompts:
    """Makes the prompts of a model's chats, and keeps its answers with calls (Replays). Thread-safe.

    Args:
        model: answers the chats.
        replays: answers with calls of the same model, when it was open before; None: no such answers.
    """

    def __init__(self, model: Model, replays: Replays | None = None) -> None:
        self._model, self.replays = model, replays or Replays()

    @cached_property
    def _form(self) -> AnswerForm | None:
        """The form of the model's answers; None: plain text, also where the declared form is broken."""
        return _form_of(self._model.tokenizer)

    @cached_property
    def _tags(self) -> ReasoningTags:
        return ReasoningTags(self._model.tokenizer, self._form)

    def make(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, object],
        tools: ToolUse | None = None,
        answer_form: Form | None = None,
    ) -> ChatPrompt:
        """Makes the prompt of a conversation.

        Args:
            messages: the conversation.
            variables: the variables of the chat template.
            tools: functions that the answer may call.
            answer_form: the form that the answer must have.

        Raises:
            UserError: the messages are refused, fill the context by pictures alone, or no calls can be read here.
            ModelRefused: the model's template or tokenizer is broken.
        """
        tokenizer, form, ends = self._model.tokenizer, self._form, self._ends
        messages, pictures = self._model.prompts.pictures.split(messages, self._model.engine.plan.context)
        if tools:
            form = require_tools(tokenizer, form, variables)
            listed = described(tools.tools) if form.knows_tools else list(tools.tools)
            if form.knows_tools and not writes_tools(tokenizer, variables):
                messages = with_tools(messages, listed)
            variables = {**variables, "tools": listed}
        if form is None:
            compiled = None if answer_form is None else partial(self._formed, answer_form, None)
            tokens = encode_chat(tokenizer, messages, variables)
            return ChatPrompt(self._model.prompts.pictures.placed(tokens, pictures), None, compiled)
        text, tokens = self.replays.encode(tokenizer, messages, variables, form, ends)
        offered = list(tools.tools) if tools else None
        most = 1 if tools and not tools.several else None
        return ChatPrompt(
            self._model.prompts.pictures.placed(tokens, pictures),
            lambda: form.reader(text, offered, most),
            self._grammar(text, form, variables, tools, answer_form),
            self._tags.after(text),
        )

    def _grammar(
        self,
        prompt: str,
        form: AnswerForm,
        variables: Mapping[str, object],
        tools: ToolUse | None,
        answer_form: Form | None,
    ) -> Callable[[Cancellation], Grammar] | None:
        reasoning, model = reasoning_of(form, prompt), self._model
        if answer_form is not None:
            return partial(self._formed, answer_form, reasoning)
        if tools is None or not tools.enforced:
            return None
        written = call_form(model.tokenizer, form, variables, self._ends)

        def compiled(cancellation: Cancellation) -> Grammar:
            grammars = model.grammars()
            return grammars.compile(tools.grammar(grammars.vocabulary, written, reasoning), cancellation)

        return compiled

    def _formed(self, form: Form, reasoning: Reasoning | None, cancellation: Cancellation) -> Grammar:
        """The grammar of a form, which is compiled without reasoning first: its errors come before any text."""
        grammars = self._model.grammars()
        grammar = grammars.formed(form, None, cancellation)
        return grammars.formed(form, reasoning, cancellation) if reasoning else grammar

    @cached_property
    def _ends(self) -> list[str]:
        """Texts of the tokens that end an answer."""
        with foreign_code("a tokenizer that decodes the model's tokens"):
            ends = [self._model.tokenizer.decode([token]) for token in sorted(self._model.sampling.stop)]
        return [text for text in ends if text]
