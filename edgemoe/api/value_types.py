"""The types of values that callers give by keyword, compared with annotations, and named in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

_WORDS = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    Path: "a path",
    Sequence: "a list",
    Mapping: "a dictionary",
}

_ABSTRACT: dict[Any, Any] = {int: Integral, float: Real}
"""Types of numbers -> the types that stand for them, numpy's among them."""


def is_of(value: object, hint: Any) -> bool:
    """Whether a value is of an annotated type; lists and dictionaries by all their parts.

    >>> is_of(3, float | None), is_of("3", float), is_of(["a"], str | Sequence[str]), is_of([1], Sequence[str])
    (True, False, True, False)
    """
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (UnionType, Union):
        return any(is_of(value, each) for each in parts)
    if origin is Sequence:
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            return False
        return all(is_of(each, parts[0]) for each in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(
            is_of(key, parts[0]) and is_of(each, parts[1]) for key, each in value.items()
        )
    return hint is Any or isinstance(value, _ABSTRACT.get(hint, hint))


def kind_of(hint: Any) -> str:
    """Names an annotated type for people, without None.

    >>> kind_of(float | int | None), kind_of(str | Sequence[str])
    ('a number', 'a string or a list of strings')
    """
    kinds = list(get_args(hint)) if get_origin(hint) in (UnionType, Union) else [hint]
    kinds = [each for each in kinds if each is not type(None)]
    if float in kinds and int in kinds:
        kinds.remove(int)
    return " or ".join(map(_one, kinds))


def _one(hint: Any) -> str:
    origin, parts = get_origin(hint), get_args(hint)
    word = _WORDS.get(origin or hint, f"a {getattr(hint, '__name__', hint)}")
    if origin is Sequence:
        return f"{word} of {kind_of(parts[0]).removeprefix('a ')}s"
    return word


def with_type(value: object) -> str:
    """A value and its type, for messages."""
    return f"{value!r}, of type {type(value).__name__}"
