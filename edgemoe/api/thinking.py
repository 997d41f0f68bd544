"""The tags of a model's reasoning, and the text by which its chat template closes it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from edgemoe.api.answer_form import AnswerForm
from edgemoe.api.choices import Choices
from edgemoe.api.template import render_chat
from edgemoe.errors import ModelRefused, UserError
from edgemoe.grammar.lark import Reasoning
from edgemoe.kv.pictures import words_of
from edgemoe.storage.files.untrusted import foreign_code

WITHOUT_THINKING: dict[str, object] = {"enable_thinking": False, "thinking": False}
"""Variables of chat templates that turn reasoning off: templates have either name."""

_THOUGHT, _ANSWER = "edgemoe_thought", "edgemoe_answer"
"""Texts of a sample answer, which no template writes itself."""

_TAIL = 32
"""Last tokens of a prompt in which its answer's reasoning may begin."""


def template_of(choices: Choices) -> dict[str, object]:
    """Variables of the chat template for an answer with these choices: a budget of 0 turns reasoning off there too."""
    return WITHOUT_THINKING if choices.get("thinking_budget") == 0 else {}


class ReasoningTags:
    """How the reasoning of a model's answers begins and ends. Thread-safe.

    Args:
        tokenizer: the model's tokenizer.
        form: the form of the model's answers; None: it is not known.
    """

    def __init__(self, tokenizer: Any, form: AnswerForm | None) -> None:
        self._tokenizer, self.form = tokenizer, form

    @classmethod
    def of(cls, tokenizer: Any) -> ReasoningTags:
        """The tags by the form that a tokenizer has (AnswerForm.of); a form that is broken counts as none."""
        try:
            return cls(tokenizer, AnswerForm.of(tokenizer))
        except ModelRefused:
            return cls(tokenizer, None)

    @property
    def known(self) -> bool:
        """Whether the model has reasoning between two texts."""
        return self.form is not None and self.form.reasoning is not None

    def require(self) -> None:
        """Refuses a model whose reasoning cannot be found in its answers.

        Raises:
            UserError: saying so.
        """
        if not self.known:
            found = "one without such tags in its chat template or tokenizer"
            raise UserError("a model with tags of reasoning, for a budget", found, "leave the budget out")

    def after(self, prompt: str) -> Reasoning | None:
        """The reasoning of an answer; None where the tags are not known.

        Args:
            prompt: text before the answer, special tokens included, or its end.
        """
        if self.form is None or self.form.reasoning is None:
            return None
        form, (opening, close) = self.form, self.form.reasoning
        begun = form.begins_in_reasoning(prompt)
        return Reasoning(opening, close, begun, form.after_reasoning, form.lead, self._closing)

    def after_tokens(self, tokens: Sequence[int]) -> Reasoning | None:
        """The reasoning of an answer, as `after`, by the token ids of its prompt."""
        with foreign_code("a tokenizer that decodes the model's tokens"):
            end = str(self._tokenizer.decode(words_of(tokens[-_TAIL:])))
        return self.after(end)

    @cached_property
    def _closing(self) -> str:
        """The text between an answer's reasoning and its text, as the chat template writes it.

        The closing tag alone where the template leaves reasoning out, or writes more than spaces around the tag.
        """
        assert self.form is not None
        assert self.form.reasoning is not None
        close = self.form.reasoning[1]
        usual = close + self.form.after_reasoning
        answer = {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT}
        variables = dict.fromkeys(WITHOUT_THINKING, True)
        try:
            sample = [{"role": "user", "content": "x"}, answer]
            text = render_chat(self._tokenizer, sample, variables, to_answer=False)
        except (UserError, ModelRefused):
            return usual
        written = text.partition(_THOUGHT)[2].partition(_ANSWER)[0]
        return written if written.strip() == close and not self.form.after_reasoning else usual
