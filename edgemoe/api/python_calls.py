"""Calls of tools as Python writes them, such as [weather(city="Oslo", days=3)]: read in answers, and written."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

MOST_CHARACTERS = 1 << 16
"""Characters of a list of calls that is read; a longer one is text."""

_TOKEN = re.compile(
    r"""
    (?s:  # strings, unfinished ones too, so that each character is passed once
        '''(?:[^\\']|\\.|'(?!''))*(?:''')? | \"{3}(?:[^\\"]|\\.|"(?!""))*(?:"{3})?
        | '(?:[^\\']|\\.)*'? | "(?:[^\\"]|\\.)*"?
    )
    | (?P<name>\w[\w.-]*)(?=\s*(?:\(|=(?!=)))
    | (?P<word>[\w.-]+)
    """,
    re.VERBOSE,
)
"""A string, the name of a tool or of an argument, or another word."""

_WORDS = {"true": "True", "false": "False", "null": "None"}
"""JSON's words -> Python's."""


def read_calls(text: str) -> list[dict[str, Any]] | None:
    """Reads a list of calls, or one call: each as {"name", "arguments"}; None: the text is none.

    Arguments have names and JSON values, with Python's words or JSON's. Names need not be Python's: they may have
    hyphens, and may be words such as `from`. Nothing of the text is run.

    >>> read_calls('[weather(city="Oslo", days=3)]')
    [{'name': 'weather', 'arguments': {'city': 'Oslo', 'days': 3}}]
    >>> read_calls("weather(place)") is None
    True
    """
    if len(text) > MOST_CHARACTERS:
        return None
    try:
        plain, names = _plain(text.strip())
        tree = ast.parse(plain, mode="eval").body
        calls = [_read(each, names) for each in (tree.elts if isinstance(tree, ast.List) else [tree])]
        json.dumps(calls, allow_nan=False)  # no bytes, sets or complex numbers
    except (SyntaxError, ValueError, TypeError, KeyError, MemoryError, RecursionError):
        return None
    return calls


def _plain(text: str) -> tuple[str, dict[str, str]]:
    """The text with a plain identifier for each name, and identifier -> name."""
    identifiers = dict[str, str]()

    def replaced(token: re.Match[str]) -> str:
        if name := token["name"]:
            return identifiers.setdefault(name, f"_{len(identifiers)}")
        return _WORDS.get(token[0], token[0])

    plain = _TOKEN.sub(replaced, text)
    return plain, {identifier: name for name, identifier in identifiers.items()}


def _read(node: ast.expr, names: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
        raise ValueError("no call with names")
    arguments = {}
    for each in node.keywords:
        if each.arg is None:
            raise ValueError("arguments without names")
        arguments[names[each.arg]] = ast.literal_eval(each.value)
    return {"name": names[node.func.id], "arguments": arguments}


def write_calls(calls: Sequence[Mapping[str, Any]]) -> str:
    """Writes calls, each as {"name", "arguments"}, as a list that `read_calls` reads.

    >>> write_calls([{"name": "weather", "arguments": {"city": "Oslo", "warm": True}}])
    '[weather(city="Oslo", warm=True)]'
    """
    return f"[{', '.join(map(_written, calls))}]"


def _written(call: Mapping[str, Any]) -> str:
    arguments = (f"{name}={_value(value)}" for name, value in (call.get("arguments") or {}).items())
    return f"{call['name']}({', '.join(arguments)})"


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_value(name)}: {_value(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
