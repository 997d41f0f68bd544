"""Messages as a chat template reads them: templates differ about names of reasoning, ids, null and arguments."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edgemoe.api.python_calls import write_calls

REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""Names that chat templates have for the reasoning of an earlier answer."""

_SHORT_IDS = "length != 9"
"""In the templates of Mistral, which refuse ids of calls that have not nine letters and digits."""


_NULL_WITH_CALLS = "<｜tool▁calls▁begin｜>"
"""In the templates of DeepSeek, which write the calls of an answer only where its content is null."""


_NUMBERED_IDS = "<|tool_call_argument_begin|>"
"""In the templates of Kimi, which write a call's id in the place of its name: functions.NAME:NUMBER."""

_PYTHON_CALLS = "<|tool_list_start|>"
"""In the templates of LFM2, which leave the calls of an answer out: they are a part of its text."""


def forms_of(messages: Sequence[Mapping[str, Any]], template: str) -> list[list[dict[str, Any]]]:
    """The forms in which a conversation may be given to a template, in the order in which they are tried.

    The first is transformers': what is null is left out, and arguments are objects. Some templates join arguments with
    text, some have no place for an answer without text, and some have one system message, at the beginning.

    Args:
        messages: the conversation, as edgemoe.api.template.Message.
        template: jinja2 source.
    """
    given = [_named(_present(message, template), template) for message in messages]
    if _SHORT_IDS in template:
        given = [_with_short_ids(message) for message in given]
    if _NUMBERED_IDS in template:
        given = _with_numbered_ids(given)
    if _PYTHON_CALLS in template and "tool_calls" not in template:
        given = [_with_calls_as_text(message) for message in given]
    forms = [given]
    if any(message.get("tool_calls") for message in given):
        forms.append([_with_text_arguments(message) for message in given])
    if any(message.get("content") is None for message in given):
        forms += [
            [{**message, "content": message.get("content") or ""} for message in form] for form in forms
        ]
    if any(message["role"] == "system" for message in given[1:]):
        forms += [_with_one_system(form) for form in forms]
    return forms


def _with_one_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with later system messages as a part of the message before them, or of the user's next one."""
    changed, of_user = list[dict[str, Any]](), False
    for message in messages:
        late, last = message["role"] == "system" and bool(changed), changed[-1] if changed else {}
        if (late and last["role"] in ("system", "user")) or (of_user and message["role"] == "user"):
            changed[-1] = last | {"content": _joined(last.get("content"), message.get("content"))}
            of_user = of_user and late
        else:
            of_user = late
            changed.append(message | {"role": "user"} if late else message)
    return changed


def _joined(first: Any, second: Any) -> Any:
    """Two contents, each a text or parts, as one."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [
        *(part for content in (first, second) for part in (
            [{"type": "text", "text": content}] if isinstance(content, str) else content or ()
        ))
    ]  # fmt: skip


def _present(message: Mapping[str, Any], template: str) -> dict[str, Any]:
    """The message without what is null in it."""
    present = {name: value for name, value in message.items() if value is not None}
    if _NULL_WITH_CALLS in template and message.get("tool_calls"):
        present["content"] = message.get("content") or None
    return present


def _named(message: dict[str, Any], template: str) -> dict[str, Any]:
    """The message with its reasoning under each name that the template reads."""
    thought = next((message[name] for name in REASONING_NAMES if message.get(name)), None)
    if thought is None:
        return message
    read = [name for name in REASONING_NAMES[1:] if re.search(rf"[.'\"]{name}\b(?!_)", template)]
    named = message | dict.fromkeys(("reasoning_content", *read), thought)
    if "thinking" in read and named.get("tool_calls") and named.get("content"):
        # gpt-oss's template has one place for reasoning and for text before a call.
        named |= {"thinking": f"{thought}\n{named['content']}", "content": ""}
    return named


def _calls(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for call in message.get("tool_calls") or ():
        yield {**call, "function": dict(call["function"])}


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    changed = dict(message)
    if changed.get("tool_call_id"):
        changed["tool_call_id"] = _short(changed["tool_call_id"])
    if changed.get("tool_calls"):
        changed["tool_calls"] = [{**call, "id": _short(call.get("id") or "")} for call in _calls(message)]
    return changed


def _short(name: str) -> str:
    """Nine letters and digits that stand for an id; one of that form stays."""
    return name if re.fullmatch("[A-Za-z0-9]{9}", name) else hashlib.sha256(name.encode()).hexdigest()[:9]


def _with_numbered_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with calls numbered from 0 on, and each result under the number of its call."""
    ids, changed, count = dict[str, str](), [], 0
    for message in messages:
        calls = list(_calls(message))
        for call in calls:
            name = f"functions.{call['function']['name']}:{count}"
            ids[call.get("id") or name] = call["id"] = name
            count += 1
        answers = message.get("tool_call_id")
        more = (
            {"tool_calls": calls} if calls else {"tool_call_id": ids.get(answers, answers)} if answers else {}
        )
        changed.append(message | more)
    return changed


def _with_calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its calls at the end of its text, as LFM2 writes them."""
    calls = [call["function"] for call in _calls(message)]
    if not calls:
        return message
    text = f"{message.get('content') or ''}<|tool_call_start|>{write_calls(calls)}<|tool_call_end|>"
    return {name: value for name, value in message.items() if name != "tool_calls"} | {"content": text}


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = list(_calls(message))
    for call in calls:
        call["function"]["arguments"] = json.dumps(call["function"].get("arguments"), ensure_ascii=False)
    return message | ({"tool_calls": calls} if calls else {})
