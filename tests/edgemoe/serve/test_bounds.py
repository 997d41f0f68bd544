"""Validation of bodies: bounded work whatever comes, and bounds on every field."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from random import Random

import pytest

from edgemoe.serve.anthropic.fields import MessagesFields
from edgemoe.serve.errors import ApiError
from edgemoe.serve.ollama.fields import ChatBody, GenerateBody
from edgemoe.serve.openai_chat.fields import ChatFields, CompletionFields, DetokenizeFields, TokenizeFields
from edgemoe.serve.openai_responses.fields import ResponsesFields
from edgemoe.serve.request import bounds
from edgemoe.serve.request.bounds import MOST_CONTAINERS, MOST_NAMES, MOST_PARTS, parsed
from edgemoe.serve.request.fields import parse

KINDS = (
    *(ChatFields, CompletionFields, TokenizeFields, DetokenizeFields),
    *(MessagesFields, ResponsesFields, ChatBody, GenerateBody),
)

USER = {"role": "user", "content": "x"}


def parts(schema: object, place: str = "") -> Iterator[tuple[str, dict[str, object]]]:
    """(place, part) of every part of a JSON schema that has a type."""
    if isinstance(schema, dict):
        if isinstance(schema.get("type"), str):
            yield place, schema
        for name, part in schema.items():
            yield from parts(part, f"{place}.{name}")
    elif isinstance(schema, list):
        for part in schema:
            yield from parts(part, place)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_field_is_bounded(kind):
    """Texts and lists have a largest length, integers a smallest and a largest value, in parts of fields too."""
    wanted = {"string": ["maxLength"], "array": ["maxItems"], "integer": ["minimum", "maximum"]}
    found = list(parts(kind.model_json_schema()))
    assert len(found) > len(kind.model_fields)
    for place, part in found:
        fixed = "const" in part or "enum" in part or "pattern" in part
        missing = [name for name in wanted.get(part["type"], ()) if name not in part and not fixed]
        assert not [name for name in missing if f"exclusive{name.capitalize()}" not in part], (place, part)


HOSTILE = {
    "a text, then numbers": (CompletionFields, {"prompt": ["a", *[1] * 200_000]}, "prompt"),
    "more of them": (CompletionFields, {"prompt": ["a", *[1] * 1_000_000]}, None),
    "texts for ids": (DetokenizeFields, {"tokens": ["a"] * 100_000}, "tokens"),
    "numbers for messages": (ChatFields, {"messages": [1] * 200_000}, "messages"),
    "numbers for items": (ResponsesFields, {"model": "x", "input": [1] * 200_000}, "input"),
    "numbers for turns": (MessagesFields, {"model": "x", "max_tokens": 1, "messages": [1] * 200_000}, None),
    "unknown fields": (MessagesFields, {str(i): 1 for i in range(50_000)}, None),
    "unknown fields of turns": (ChatBody, {"model": "x", "messages": [USER | {"a": 1}] * 8_000}, "messages"),
    "objects": (ChatFields, {"messages": [{}] * 300_000}, None),
    "a long stop string": (ChatFields, {"messages": [USER], "stop": "x" * 100_000}, "stop"),
    "many stop strings": (GenerateBody, {"model": "x", "options": {"stop": ["x"] * 17}}, "options"),
    "a long name": (ChatFields, {"messages": [USER], "model": "x" * 100_000}, "model"),
}


@pytest.mark.e2e
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_body_is_refused_soon(name):
    """The first error alone is made, and the message is short, whatever the size of the body."""
    kind, value, param = HOSTILE[name]
    body, start = json.dumps(value).encode(), time.process_time()
    with pytest.raises(ApiError) as refused:
        parse(kind, body)
    assert time.process_time() - start < 2
    assert refused.value.status == 400
    assert len(str(refused.value)) < 1000
    assert param is None or refused.value.param == param


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"seed": ' + b"9" * 4000 + b"}", "numbers of at most 64 characters"),
        (b"[1," * MOST_CONTAINERS + b"1" + b"]" * MOST_CONTAINERS, "recursion limit"),
        (b"[" * (MOST_CONTAINERS + 1), f"{MOST_CONTAINERS} objects and lists"),
        (b"[" + b"1," * MOST_PARTS + b"1]", f"{MOST_PARTS} values"),
        (b'"' * 1_000_000, f"{MOST_PARTS} values"),
        (b'"' + b"\\" * 999_999, "another text"),
        (json.dumps({str(i): 1 for i in range(MOST_NAMES + 1)}).encode(), f"{MOST_NAMES} fields"),
        (b'{"a": NaN}', "another text"),
        (b"\xff\xfe{\x00}\x00", "another text"),
    ],
)
def test_what_exceeds_a_bound(raw, words):
    """Each bound is named."""
    with pytest.raises(ApiError, match=words):
        parsed(raw)


def test_what_keeps_the_bounds():
    """Commas, brackets and digits inside strings do not count, however strings are cut and escaped."""
    text = '[{,"\\' * 60_000 + "9" * 500
    ids = list(range(MOST_PARTS - 5))
    assert parsed(json.dumps({"a": text}).encode()) == {"a": text}
    assert parsed(b"\xef\xbb\xbf" + json.dumps(ids).encode()) == ids
    assert parsed(json.dumps([1e308, -(2**64), "1" * 70, 2]).encode()) == [1e308, -(2**64), "1" * 70, 2]


def random_value(random: Random, depth: int = 0) -> object:
    """A JSON value with quotes, escapes, brackets and digits in its texts."""
    kind = random.randrange(6 if depth < 5 else 3)
    if kind < 2:
        return "".join(random.choices('ab,[{"\\1e9 :\n', k=random.choice((0, 3, 50, 200))))
    if kind == 2:
        return random.randrange(-(10**9), 10**9)
    inner = [random_value(random, depth + 1) for _ in range(random.randrange(5))]
    return inner if kind < 5 else {f'"{number}': value for number, value in enumerate(inner)}


def parts_of(value: object) -> tuple[int, int]:
    """Strings, commas, objects and lists of a value; and objects and lists alone."""
    if not isinstance(value, (dict, list)):
        return int(isinstance(value, str)), 0
    inner = [parts_of(each) for each in (value.values() if isinstance(value, dict) else value)]
    names = len(value) if isinstance(value, dict) else 0
    own = 1 + max(len(value) - 1, 0) + names
    return own + sum(parts for parts, _ in inner), 1 + sum(containers for _, containers in inner)


def test_parts_are_counted(monkeypatch):
    """As many as a walk over the parsed value finds, however stretches of 64 bytes cut the text."""
    random = Random(1)
    monkeypatch.setattr(bounds, "_STRETCH", 64)
    for number in range(200):
        value = [random_value(random), ""]
        raw = json.dumps(value, ensure_ascii=number % 2 == 0).encode()
        most, containers = parts_of(value)
        monkeypatch.setattr(bounds, "MOST_PARTS", most)
        monkeypatch.setattr(bounds, "MOST_CONTAINERS", containers)
        assert parsed(raw) == value
        monkeypatch.setattr(bounds, "MOST_CONTAINERS", containers - 1)
        with pytest.raises(ApiError, match="objects and lists"):
            parsed(raw)
        monkeypatch.setattr(bounds, "MOST_CONTAINERS", containers)
        monkeypatch.setattr(bounds, "MOST_PARTS", most - 1)
        with pytest.raises(ApiError, match="values"):
            parsed(raw)
