"""The form of a model's answers: the response template by which reasoning, text and calls are found in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from edgemoe.api.answer_reader import REASONING, AnswerReader
from edgemoe.api.built_in_forms import BuiltInForm, built_in_form
from edgemoe.errors import ModelRefused
from edgemoe.machine.confined import confined
from edgemoe.storage.files.untrusted import CHECK_ORIGIN, foreign_code

CPU_SECONDS = 5.0
"""Time in which a model's response template must read the sample texts."""

MEMORY_BYTES = 512 << 20
"""Memory that it may take for that, next to the program's own."""

_SAMPLES = ("a" * 3000, "<" * 1000, " " * 1000, "\n" * 1000, '{"a": ' * 200, "<a>" * 500, "0" * 1000)


class AnswerForm:
    """A response template that can be used.

    Args:
        template: see transformers' ResponseParser.
        special: texts of special tokens, which are no part of an answer's texts.
        ours: the form that has the template, where it is a built-in one.

    Attributes:
        reads_calls: whether it has a field of calls.
        mark: the text that opens a call, where it is one text.
        reasoning: (open, close) tags of reasoning, where each is one text.
        after_reasoning: text between reasoning and the rest of the answer; "" without a built-in form.
        lead: text that opens the answer itself; "" where nothing opens it.
        calls: how tool calls are written in the prompt; None: the chat template writes them.
        knows_tools: whether tools are put into the system message when the chat template leaves them out.
    """

    def __init__(
        self, template: Mapping[str, Any], special: Sequence[str] = (), ours: BuiltInForm | None = None
    ) -> None:
        fields = template["fields"]
        self.reads_calls = "tool_calls" in fields
        opens = fields.get("tool_calls", {}).get("open")
        self.mark = opens if isinstance(opens, str) else ""
        tags = [(fields[name].get("open"), fields[name].get("close")) for name in REASONING if name in fields]
        self.reasoning: tuple[str, str] | None = next(
            (tag for tag in tags if isinstance(tag[0], str) and isinstance(tag[1], str)), None
        )
        if ours:
            self.mark, self.reasoning = ours.mark, ours.reasoning
        self.after_reasoning, self.lead = (ours.after_reasoning, ours.lead) if ours else ("", "")
        self.calls, self.knows_tools = (ours.calls, ours.knows_tools) if ours else (None, False)
        self._template, self._special = load_response_template(dict(template)), tuple(special)

    @classmethod
    def of(cls, tokenizer: Any, cpu_seconds: float = CPU_SECONDS) -> AnswerForm | None:
        """The form that a tokenizer declares, or the built-in one that its chat template writes; None: neither.

        Args:
            tokenizer: the tokenizer of the model.
            cpu_seconds: limit on the time that a declared one takes to read a sample.

        Raises:
            ModelRefused: the declared one is broken, or takes too long to read a sample.
        """
        template = getattr(tokenizer, "response_template", None)
        if template is not None:
            wanted = "a response_template in tokenizer_config.json that works"
            wrong = confined(lambda: _try(template), seconds=cpu_seconds, memory=MEMORY_BYTES)
            if wrong is not None:
                raise ModelRefused(wanted, wrong, CHECK_ORIGIN)
        else:
            if not tokenizer.chat_template:
                return None
            with foreign_code("a chat template that transformers finds"):
                written = tokenizer.get_chat_template(tools=[{}])
                ours = built_in_form(written, tokenizer.get_added_vocab())
            return cls(ours.template, tokenizer.all_special_tokens, ours) if ours else None
        return cls(template, tokenizer.all_special_tokens)

    def reader(
        self, prompt: str, tools: Sequence[Mapping[str, Any]] | None, limit: int | None = None
    ) -> AnswerReader:
        """A reader of one answer.

        Args:
            prompt: text after which the answer comes, special tokens included.
            tools: functions that may be called; None: calls are text.
            limit: number of calls after which the answer is read no further; None: any number.
        """
        prefix = prompt if self._template.start_anchor_re.search(prompt) else ""
        if not prefix and self.reasoning and self.begins_in_reasoning(prompt):
            prefix = self.reasoning[0]
        parser = ResponseParser(self._template, prefix=prefix, tools=list(tools or []))
        field = self._template.fields.get("tool_calls")
        closing = None if field is None or field.content == "json" else field.close_re
        return AnswerReader(parser, self._special, calls=tools is not None, limit=limit, closing=closing)

    def begins_in_reasoning(self, prompt: str) -> bool:
        """Whether a prompt ends within reasoning, which the answer goes on with."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning[0])


def _try(template: Any) -> None:
    """Reads samples, also within every region that the template opens. Whatever transformers raises passes."""
    spec = load_response_template(template)
    opens = [text for each in spec.fields.values() for text in each.open_literals or ()]
    for sample in _SAMPLES:
        for text in (sample, *(f"{open}{sample}" for open in opens)):
            AnswerReader(ResponseParser(template, prefix=sample, tools=[]), (), calls=True).read(text)
