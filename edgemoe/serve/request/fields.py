"""The fields of JSON bodies: their types, ranges and sizes. A wrong one is an error that names it."""

from __future__ import annotations

import re
from reprlib import Repr
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema

from edgemoe.serve.errors import ApiError
from edgemoe.serve.request.bounds import MOST_NAMES, MOST_PARTS, parsed

MOST_CHARACTERS = 1 << 23
"""Most characters of a text; the body and the context have smaller bounds of their own."""

_BOUNDS: dict[str, dict[str, Any]] = {
    "str": {"max_length": MOST_CHARACTERS},
    "list": {"max_length": MOST_PARTS, "fail_fast": True},
    "dict": {"max_length": MOST_NAMES},
    "int": {"ge": -(1 << 63), "le": (1 << 63) - 1},
}
"""Kind of value -> bounds of each field that has none of its own. A list is read up to its first wrong item."""

Name = Annotated[str, Field(max_length=256)]
"""A name, an id or a word, which answers may repeat."""


def _bound(schema: object) -> None:
    """Adds bounds to every part of a pydantic schema that has none."""
    if isinstance(schema, dict):
        kind = schema.get("type")
        for name, bound in _BOUNDS.get(kind, {}).items() if isinstance(kind, str) else ():
            schema.setdefault(name, bound)
    parts = (
        schema.values() if isinstance(schema, dict) else schema if isinstance(schema, (list, tuple)) else ()
    )
    for part in parts:
        _bound(part)


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
"""A whole number, also with a decimal point: some languages have no other numbers in JSON."""


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError("it should be 1 or more, or -1 for no limit")
    return value


NO_LIMIT = -1
"""The number of tokens that several servers take for an answer without a limit."""

Limit = Annotated[Whole, Field(ge=NO_LIMIT), AfterValidator(_not_zero)]
"""Most tokens of an answer, or NO_LIMIT."""


class Fields(BaseModel):
    """Fields of a JSON object. A field that is null counts as left out, and an unknown one is ignored.

    Every text, list, object and integer of a field is bounded, by _BOUNDS where the field says nothing else.
    """

    model_config = ConfigDict(strict=True, extra="ignore")

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Returns what validates the fields, with the bounds."""
        schema = handler(source)
        _bound(schema)
        return schema


class Known(Fields):
    """Fields of a JSON object that has no others: an unknown one that is not empty is an error that names it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, fields: Any) -> Any:
        """Leaves unknown fields out that are null, or an empty list or object: they say nothing."""
        if not isinstance(fields, dict):
            return fields
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {name: value for name, value in fields.items() if name in known or value not in (None, [], {})}


Some = TypeVar("Some", bound=Fields)

_OBJECT, _ARRAY = "Input should be an object", "Input should be a valid array"
_IN_JSON = {
    "dict_type": _OBJECT,
    "model_type": _OBJECT,
    "model_attributes_type": _OBJECT,
    "list_type": _ARRAY,
}
"""Type of an error of pydantic -> its text in JSON's words."""

_short = Repr()
_short.maxstring = _short.maxother = 80


_SHOULD_BE = re.compile(r"(?:Input|Value|String|List|Dictionary) should (be|have) (.+)", re.DOTALL)


def _expected(place: str, value: str, reason: str) -> str:
    """A wrong value's message, with the words of pydantic's reason.

    >>> _expected("messages", "'hi'", "Input should be a valid array")
    "expected a valid array for messages, got 'hi': send such a value"
    >>> _expected("prompt", "{}", "Field required")
    'expected a value that is valid for prompt, got {}: Field required'
    """
    match = _SHOULD_BE.fullmatch(reason)
    if match:
        wanted = match[2] if match[1] == "be" else f"a value with {match[2]}"
        return f"expected {wanted} for {place}, got {value}: send such a value"
    return f"expected a value that is valid for {place}, got {value}: {reason}"


def parse(kind: type[Some], body: bytes) -> Some:
    """Parses a body.

    Raises:
        ApiError: it is no JSON object, a field is wrong, or there is too much of it.
    """
    return checked(kind, parsed(body))


def checked(kind: type[Some], value: object) -> Some:
    """Makes fields of a JSON value.

    Raises:
        ApiError: it is no object, or a field is wrong.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        # Where a value may be of several kinds, each has errors: the deepest is of the kind that was meant.
        first = max(errors, key=lambda each: len(each["loc"]))
        place = ".".join(str(part) for part in first["loc"] if "[" not in str(part))[:200] or "body"
        found = _short.repr(first.get("input"))
        reason = _IN_JSON.get(first["type"], first["msg"])[:400]
        message = _expected(place, found, reason)
        if first["type"] == "extra_forbidden":
            message = f"expected no {place}, got {found}: leave it out"
        raise ApiError(400, message, param=str(first["loc"][0])[:200] if first["loc"] else None) from None
