"""The texts of grammars, in llguidance's form of Lark: a JSON answer, and calls of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from edgemoe.grammar.schema import MOST_BYTES, enforceable, refused

_SPACES = r"WS: /[ \n]{0,8}/"

_ANY = r"/(.|\n)+/"

_BOUNDED = {"whitespace_pattern": r"( |\n {0,24})"}
"""Whitespace between a JSON answer's parts, indentation included: a model cannot go on with it for ever."""

_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The spaces that `tojson` of chat templates writes."""


_ONE_LINE = {"/": r"\/", "\n": r"\n", "\r": r"\r"}
"""Characters of a pattern that end it in a grammar -> how they are written there."""


@dataclass(frozen=True)
class TextForm:
    """The form of an answer that is plain text: one of some texts, or what a regular expression matches as a whole.

    Args:
        texts: the texts; empty: `pattern` is given.
        pattern: the regular expression, in the syntax of Rust's crate regex, without lookaround.
    """

    texts: tuple[str, ...] = ()
    pattern: str = ""

    def written(self) -> str:
        """The form in a grammar.

        Raises:
            UserError: it is too long.
        """
        size = sum(len(text.encode(errors="replace")) for text in (*self.texts, self.pattern))
        if size > MOST_BYTES:
            raise refused(f"texts or a pattern of at most {MOST_BYTES} bytes", f"{size}", "send shorter ones")
        if self.texts:
            return f"({' | '.join(map(_json, self.texts))})"
        return (
            "/"
            + re.sub(r"\\?[\s\S]", lambda c: _ONE_LINE.get(c[0].removeprefix("\\"), c[0]), self.pattern)
            + "/"
        )


Form = Mapping[str, object] | TextForm
"""The form of an answer: JSON that a schema describes, or plain text."""


class Words(Protocol):
    """The part of a vocabulary that a grammar's text needs."""

    @property
    def specials(self) -> Mapping[str, int]:
        """Text -> id of the tokens that plain text does not match."""

    def is_end(self, token: int) -> bool:
        """Whether the token ends an answer."""


@dataclass(frozen=True)
class CallForm:
    """How a chat template writes calls of tools: `before`, calls with `between` in between, `after`.

    Args:
        begin, middle, end: the texts around a call's name and its arguments as JSON: begin, name, middle, JSON, end.
        before, between, after: see above.
        mark: the text that opens a call for the parser of answers, a prefix of `before` and `begin`; "": unknown.
        alone: an answer has one call at most.
    """

    begin: str
    middle: str
    end: str
    before: str = ""
    between: str = ""
    after: str = ""
    mark: str = ""
    alone: bool = False


@dataclass(frozen=True)
class Reasoning:
    """Reasoning that may come before an answer.

    Args:
        open, close: the tags around it.
        begun: whether the prompt ends within it.
        after: text after reasoning, before the rest of the answer.
        lead: text that opens the answer itself, where it is no call.
        closing: text that ends reasoning where its budget is spent, as the chat template writes it; "": `close` alone.
    """

    open: str
    close: str
    begun: bool = False
    after: str = ""
    lead: str = ""
    closing: str = ""


def formed_answer(words: Words, form: Form, reasoning: Reasoning | None = None) -> str:
    """The grammar of an answer that has a form.

    Raises:
        UserError: see enforceable and TextForm.
    """
    if isinstance(form, TextForm):
        written = form.written()
    else:
        written = f"%json {_json(enforceable(form) | {'x-guidance': _BOUNDED})}"
    lead = f"{_literal(words, reasoning.lead)} " if reasoning and reasoning.lead else ""
    return _after_reasoning(words, reasoning, f"{lead}{written}")


def calls_answer(
    words: Words,
    form: CallForm,
    tools: Sequence[tuple[str, Mapping[str, object]]],
    reasoning: Reasoning | None = None,
    *,
    several: bool = True,
) -> str:
    """The grammar of an answer that consists of calls.

    Args:
        words: the words of the model.
        form: the form of the calls.
        tools: (name, JSON schema of the arguments) of the tools that may be called.
        reasoning: the reasoning that may come before the calls; None: none may.
        several: any number of calls; otherwise exactly one.

    Raises:
        UserError: see enforceable.
    """
    more = f" ({_literal(words, form.between)} call)*" if several else ""
    start = f"{_literal(words, form.before)} call{more} {_literal(words, form.after)}"
    return _after_reasoning(words, reasoning, start) + _calls(words, form, tools, form.begin)


def text_and_calls(
    words: Words, form: CallForm, tools: Sequence[tuple[str, Mapping[str, object]]], *, several: bool = True
) -> str:
    """The grammar of any text with calls in it: each has the form that it must have, from `form.mark` on.

    Args as of calls_answer.

    Raises:
        UserError: see enforceable.
    """
    times, rest = "*" if several else "?", form.begin.removeprefix(form.mark)
    if form.before.startswith(form.mark):  # the calls are one list
        more = f" ({_literal(words, form.between)} call)*" if several else ""
        listed = (
            f"{_literal(words, form.before.removeprefix(form.mark))} call{more} {_literal(words, form.after)}"
        )
        calls, call, times = _calls(words, form, tools, form.begin) + f"list: {listed}\n", "list", "?"
    else:
        calls, call = _calls(words, form, tools, rest), "call"
    if form.mark in words.specials:
        mark = words.specials[form.mark]
        others = sorted(i for i in words.specials.values() if i != mark and not words.is_end(i))
        text = f"(TEXT | <[{','.join(map(str, others))}]>)*" if others else "TEXT?"
        return f"start: text (<[{mark}]> {call} text){times}\ntext: {text}\nTEXT: {_ANY}\n{calls}"
    opening = f"opening[lazy]: /(.|\\n)*{_regex(form.mark)}/\n"
    return f"start: (opening {call}){times} TEXT?\n{opening}TEXT: {_ANY}\n{calls}"


def led_text_or_call(
    words: Words, form: CallForm, tools: Sequence[tuple[str, Mapping[str, object]]], reasoning: Reasoning
) -> str:
    """The grammar of either text after `reasoning.lead`, or a call.

    Args as of calls_answer.

    Raises:
        UserError: see enforceable.
    """
    start = f"({_literal(words, reasoning.lead)} TEXT? | call)"
    return (
        _after_reasoning(words, reasoning, start) + f"TEXT: {_ANY}\n" + _calls(words, form, tools, form.begin)
    )


def _calls(
    words: Words, form: CallForm, tools: Sequence[tuple[str, Mapping[str, object]]], begin: str
) -> str:
    lines = []
    for name, schema in tools:
        arguments = _json(enforceable(schema) | {"x-guidance": _WRITTEN})
        lines.append(
            f"{_literal(words, begin + name + form.middle)} %json {arguments} {_literal(words, form.end)}"
        )
    rules = "\n".join(f"call{i}: {line}" for i, line in enumerate(lines))
    return f"\ncall: {' | '.join(f'call{i}' for i in range(len(lines)))}\n{rules}\n"


def _after_reasoning(words: Words, reasoning: Reasoning | None, start: str) -> str:
    """A grammar that begins with `start`, after reasoning where there may be some."""
    if reasoning is None:
        return f"start: {start}\n"
    close, tail = words.specials.get(reasoning.close), ""
    if close is None:
        body, tail = "tail", f"tail[lazy]: /(.|\\n)*{_regex(reasoning.close)}/\n"
    else:
        body, tail = f"BODY <[{close}]>", "BODY: /(.|\\n)*/\n"
    body += f" {_literal(words, reasoning.after)}" if reasoning.after else ""
    thought = body if reasoning.begun else f"({_literal(words, reasoning.open)} {body})?"
    between = "" if reasoning.lead else " WS"
    return f"start: {thought}{between} {start}\n{tail}{_SPACES}\n"


def _literal(words: Words, text: str) -> str:
    """The grammar of a text: its special tokens by id, the rest quoted."""
    parts, rest = [], text
    while rest:
        found = [(at, -len(word), word) for word in words.specials if (at := rest.find(word)) >= 0]
        at, _, word = min(found, default=(len(rest), 0, ""))
        if at:
            parts.append(json.dumps(rest[:at], ensure_ascii=False))
        if word:
            parts.append(f"<[{words.specials[word]}]>")
        rest = rest[at + len(word) :]
    return " ".join(parts) or '""'


def _regex(text: str) -> str:
    """A regular expression, between slashes, that matches a text alone."""
    return "".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
