"""Which JSON schemas can be enforced: keywords by name, and bounds on size and depth."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from edgemoe.errors import UserError

MOST_BYTES = 256 << 10
"""Of a schema as JSON. One of 4,000 required properties, 210 kB, compiles in a second or two."""

MOST_DEPTH = 40
"""Schemas within each other; the compiler's own parser of JSON ends at 128 brackets."""

_SCHEMAS_BY_NAME = {"properties", "patternProperties", "$defs", "definitions"}
_LISTS_OF_SCHEMAS = {"anyOf", "oneOf", "allOf", "prefixItems"}
_SCHEMAS = {"items", "additionalItems", "additionalProperties"}
"""Keywords with schemas in them: name -> schema, a list, or a schema (`items` of draft 7: or a list)."""

_VALUES = {
    *("type", "enum", "const", "format", "pattern", "required", "$ref"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
}
"""Keywords that the grammar enforces, each by a test."""

_NOTES = {
    *(
        "title",
        "description",
        "default",
        "example",
        "examples",
        "$comment",
        "deprecated",
        "readOnly",
        "writeOnly",
    ),
    *("$schema", "$id", "$anchor"),
}
"""Keywords that restrict no value."""

KEYWORDS = frozenset(_SCHEMAS_BY_NAME | _LISTS_OF_SCHEMAS | _SCHEMAS | _VALUES | _NOTES)


def require_enforceable(schema: object) -> None:
    """Refuses a JSON schema of which a part would be left out of its grammar.

    Raises:
        UserError: it is no schema, has a keyword outside of KEYWORDS, or exceeds MOST_BYTES or MOST_DEPTH.
    """
    if not isinstance(schema, Mapping):
        raise refused("a JSON schema that is an object", f"{type(schema).__name__}")
    _check(schema, MOST_DEPTH)
    try:
        size = len(json.dumps(schema, ensure_ascii=False).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise refused("a JSON schema of JSON values", f"{error}") from error
    if size > MOST_BYTES:
        raise refused(f"a JSON schema of at most {MOST_BYTES} bytes", f"{size}", "send a smaller one")


def _check(schema: object, deeper: int) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise refused("JSON schemas that are objects", f"{str(schema)[:60]!r}")
    if not deeper:
        raise refused(f"a JSON schema of at most {MOST_DEPTH} levels", "more", "use $ref, or a flatter one")
    unknown = sorted(str(key) for key in schema if key not in KEYWORDS)
    if unknown:
        raise refused("keywords of JSON schemas that can be enforced", f"{unknown[0][:60]!r}", "leave it out")
    for part in _within(schema):
        _check(part, deeper - 1)


def _within(schema: Mapping[Any, object]) -> Iterator[object]:
    """The schemas that a schema has in it."""
    for key, value in schema.items():
        if key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            yield from value.values()
        elif isinstance(value, list) and (key in _LISTS_OF_SCHEMAS or key == "items"):
            yield from value
        elif key in _SCHEMAS_BY_NAME | _LISTS_OF_SCHEMAS:
            raise refused(f"{key} of schemas", f"{str(value)[:60]!r}")
        elif key in _SCHEMAS:
            yield value


def refused(wanted: str, found: str, action: str = "change the schema") -> UserError:
    """The error of a schema that is not enforced."""
    return UserError(wanted, found, action)
