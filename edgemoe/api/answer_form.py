"""The form of a model's answers: reasoning, text and calls of tools, as transformers' response parser finds them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from edgemoe.errors import ModelRefused
from edgemoe.machine.confined import confined
from edgemoe.storage.files.untrusted import CHECK_ORIGIN, foreign_code

Kind = Literal["content", "reasoning_content"]

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that response templates give to reasoning."""

_CHATML = {"start_anchor": "<|im_start|>assistant\n"}
_THOUGHT = {"open": "<think>", "close": "</think>"}
_TEXT = {"close": ["<|im_end|>", "<|endoftext|>"]}

CALLS_AS_JSON = _CHATML | {
    "fields": {
        "reasoning_content": _THOUGHT,
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"(?<=[}\]])\s*</tool_call>",
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
            "repeats": True,
        },
        "content": _TEXT,
    }
}
"""Response template of ChatML with calls as JSON between <tool_call> tags: Hermes, Qwen 2.5 and 3."""

_ARGUMENT = r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))"
"""One argument between tags, which its own text may contain too."""

CALLS_AS_TAGS = _CHATML | {
    "fields": {
        "reasoning_content": _THOUGHT,
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]{1,64})>",
            "close_pattern": r"</function>\s*</tool_call>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": _ARGUMENT},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            "repeats": True,
        },
        "content": _TEXT,
    }
}
"""The same with a tag for each argument: Qwen 3 Coder, Qwen 3.5."""

_OURS = (
    (("<|im_start|>", "<tool_call>", "<function=", "<parameter="), CALLS_AS_TAGS),
    (("<|im_start|>", "<tool_call>", '"arguments"'), CALLS_AS_JSON),
)
"""What a chat template writes -> the response template of its answers, for tokenizers that have none."""

CPU_SECONDS = 5.0
"""For reading sample texts by a response template of a model."""

MEMORY_BYTES = 512 << 20
"""For the same, beside the program's own."""

_SAMPLES = ("a" * 3000, "<" * 1000, " " * 1000, "\n" * 1000, '{"a": ' * 200, "<a>" * 500, "0" * 1000)


@dataclass(frozen=True)
class Call:
    """A call of a tool.

    Args:
        name: of the tool.
        arguments: JSON object.
        id: names the call in later messages.
    """

    name: str
    arguments: Mapping[str, object]
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def as_message(self) -> dict[str, Any]:
        """The call in a message, as chat templates take it."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": dict(self.arguments)},
        }


@dataclass(frozen=True)
class Delta:
    """A part of an answer: text of a kind, or a call."""

    kind: Kind
    text: str
    call: Call | None = None


class AnswerForm:
    """A response template that can be used.

    Args:
        template: see transformers' ResponseParser.
        special: texts of special tokens, which are no part of an answer's texts.

    Attributes:
        reads_calls: whether it has a field of calls.
        mark: the text that opens a call, where it is one text.
        reasoning: (open, close) tags of reasoning, where each is one text.
    """

    def __init__(self, template: Mapping[str, Any], special: Sequence[str] = ()) -> None:
        fields = template["fields"]
        self.reads_calls = "tool_calls" in fields
        opens = fields.get("tool_calls", {}).get("open")
        self.mark = opens if isinstance(opens, str) else ""
        tags = [
            (fields[name].get("open"), fields[name].get("close")) for name in _REASONING if name in fields
        ]
        self.reasoning: tuple[str, str] | None = next(
            (tag for tag in tags if isinstance(tag[0], str) and isinstance(tag[1], str)), None
        )
        self._template, self._special = load_response_template(dict(template)), tuple(special)

    @classmethod
    def of(cls, tokenizer: Any) -> AnswerForm | None:
        """The form that a tokenizer declares, or one of ours that its chat template writes; None: neither.

        Raises:
            ModelRefused: the declared one is broken, or takes too long to read a sample.
        """
        template = getattr(tokenizer, "response_template", None)
        if template is not None:
            wanted = "a response_template in tokenizer_config.json that works"
            wrong = confined(lambda: _try(template), seconds=CPU_SECONDS, memory=MEMORY_BYTES)
            if wrong is not None:
                raise ModelRefused(wanted, wrong, CHECK_ORIGIN)
        else:
            if not tokenizer.chat_template:
                return None
            with foreign_code("a chat template that transformers finds"):
                written = tokenizer.get_chat_template(tools=[{}])
            template = next((form for marks, form in _OURS if all(m in written for m in marks)), None)
            if template is None:
                return None
        return cls(template, tokenizer.all_special_tokens)

    def reader(
        self, prompt: str, tools: Sequence[Mapping[str, Any]] | None, most: int | None = None
    ) -> AnswerReader:
        """A reader of one answer.

        Args:
            prompt: text behind which the answer comes, special tokens included.
            tools: that may be called; None: calls are text.
            most: calls, behind which the answer is read no further; None: any number.
        """
        anchored = self._template.start_anchor_re.search(prompt) is not None
        parser = ResponseParser(self._template, prefix=prompt if anchored else "", tools=list(tools or []))
        return AnswerReader(parser, self._special, calls=tools is not None, most=most)

    def begins_in_reasoning(self, prompt: str) -> bool:
        """Whether a prompt ends within reasoning, which the answer goes on with."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning[0])


def _try(template: Any) -> None:
    """Reads samples, also within every region that the template opens. Whatever transformers raises passes."""
    spec = load_response_template(template)
    opens = [text for each in spec.fields.values() for text in each.open_literals or ()]
    for sample in _SAMPLES:
        for text in (sample, *(f"{open}{sample}" for open in opens)):
            reader = AnswerReader(ResponseParser(template, prefix=sample, tools=[]), (), calls=True)
            reader.feed(text)
            reader.end()


class AnswerReader:
    """Finds the parts of one answer as its text comes. Text around a part is stripped of whitespace.

    A part that the parser cannot read, such as half a call, is content as it was written, and so is all text behind it.

    Args:
        parser: at the end of the prompt.
        special: as in AnswerForm.
        calls: whether calls are parts of their own; otherwise they are content.
        most: as in AnswerForm.reader.

    Attributes:
        calls: so far.
        texts: kind -> text so far.
    """

    def __init__(
        self, parser: ResponseParser, special: Sequence[str], *, calls: bool, most: int | None = None
    ) -> None:
        self._parser, self._special, self._with_calls, self._most = parser, special, calls, most
        self._raw = ""  # behind the last part that has gone out
        self._broken = False
        self._spaces: dict[str, str] = {}
        self.calls: list[Call] = []
        self.texts: dict[Kind, str] = {}

    @property
    def full(self) -> bool:
        """Whether there are as many calls as there may be."""
        return self._most is not None and len(self.calls) >= self._most

    def feed(self, text: str) -> list[Delta]:
        """Takes a piece of text; returns what it completes."""
        if self.full:
            return []
        if self._broken:
            return self._texts([("content", text)])
        found: list[tuple[Kind, str] | Call] = []
        for position, character in enumerate(text, 1):
            self._raw += character
            try:
                events = self._parser.feed(character)
            except Exception:  # of the parser, about the model's text
                return self._break(found, text[position:])
            self._take(events, found)
        return self._deltas(found)

    def end(self) -> list[Delta]:
        """Ends the answer; returns what is left of it."""
        found: list[tuple[Kind, str] | Call] = []
        if self._broken or self.full:
            return []
        try:
            _, events = self._parser.finalize()
        except Exception:
            return self._break(found, "")
        self._take(events, found)
        return self._deltas(found)

    def _take(self, events: Sequence[Mapping[str, Any]], found: list[tuple[Kind, str] | Call]) -> None:
        for event in events:
            name, closed = event["field"], event["type"] == "region_close"
            if name == "tool_calls":
                if closed:
                    calls = self._called(event["value"]) if self._with_calls else None
                    found += [("content", self._raw)] if calls is None else calls
                    self._raw = ""
            elif event["type"] == "region_chunk":
                found.append(("reasoning_content" if name in _REASONING else "content", event["text"]))
                self._raw = ""
            elif closed and name in _REASONING:
                self._raw = ""

    def _called(self, value: Any) -> list[Call] | None:
        """The calls of a region's value; None: it is something else."""
        calls = []
        for entry in value if isinstance(value, list) else [value]:
            function = entry.get("function") if isinstance(entry, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                return None
            arguments = function.get("arguments", {})
            if isinstance(arguments, str):
                try:
                    arguments = json.loads(arguments)
                except ValueError:
                    return None
            if not isinstance(arguments, dict):
                return None
            calls.append(Call(function["name"], arguments))
        return calls

    def _break(self, found: list[tuple[Kind, str] | Call], rest: str) -> list[Delta]:
        self._broken = True
        return self._deltas([*found, ("content", self._raw + rest)])

    def _deltas(self, found: Sequence[tuple[Kind, str] | Call]) -> list[Delta]:
        deltas: list[Delta] = []
        for part in _joined(found):
            if self.full:
                break
            if isinstance(part, Call):
                self.calls.append(part)
                deltas.append(Delta("content", "", part))
            else:
                deltas += self._texts([part])
        return deltas

    def _texts(self, parts: Sequence[tuple[Kind, str]]) -> list[Delta]:
        """Deltas of texts; whitespace waits for text behind it, and is left out before the first."""
        deltas = []
        for kind, text in parts:
            for token in self._special:
                text = text.replace(token, "")
            whole = self._spaces.pop(kind, "") + text
            shown = whole.rstrip()
            if not shown:
                self._spaces[kind] = whole
                continue
            self._spaces[kind] = whole[len(shown) :]
            if kind not in self.texts:
                shown = shown.lstrip()
            self.texts[kind] = self.texts.get(kind, "") + shown
            deltas.append(Delta(kind, shown))
        return deltas


def _joined(found: Sequence[tuple[Kind, str] | Call]) -> list[tuple[Kind, str] | Call]:
    """Neighbouring texts of a kind as one."""
    joined: list[tuple[Kind, str] | Call] = []
    for part in found:
        last = joined[-1] if joined else None
        if isinstance(part, tuple) and isinstance(last, tuple) and last[0] == part[0]:
            joined[-1] = (part[0], last[1] + part[1])
        else:
            joined.append(part)
    return joined
