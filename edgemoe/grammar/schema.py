"""The JSON schemas that can be enforced: keywords by name, bounds on size and depth. Annotations are left out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from edgemoe.errors import UserError

MOST_BYTES = 256 << 10
"""Most bytes of a schema as JSON. A schema of 4,000 required properties, 210 kB, compiles in a second or two."""

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
    *("$schema", "$id", "$anchor", "$vocabulary"),
    *("contentEncoding", "contentMediaType", "contentSchema"),
    *("discriminator", "xml", "externalDocs", "propertyOrdering"),
    *("markdownDescription", "enumDescriptions", "errorMessage", "deprecationMessage"),
}
"""Keywords that restrict no value: JSON Schema's own, OpenAPI's, editors' and Gemini's."""

_EXTENSION = "x-"
"""Keywords that begin so are annotations too."""

_NULLABLE = "nullable"
"""OpenAPI's way to allow null."""

FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
"""Formats of strings that the grammar enforces. Any other one is an annotation, as JSON Schema has it."""

KEYWORDS = frozenset(_SCHEMAS_BY_NAME | _LISTS_OF_SCHEMAS | _SCHEMAS | _VALUES | _NOTES | {_NULLABLE})


def enforceable(schema: object) -> dict[str, object]:
    """Returns a JSON schema as its grammar takes it: without annotations, `nullable` as the type null.

    Raises:
        UserError: it is no schema, has a keyword outside of KEYWORDS, or exceeds MOST_BYTES or MOST_DEPTH.
    """
    if not isinstance(schema, Mapping):
        raise refused("a JSON schema that is an object", f"{type(schema).__name__}")
    cleaned = _cleaned(schema, MOST_DEPTH)
    try:
        size = len(json.dumps(schema, ensure_ascii=False).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise refused("a JSON schema of JSON values", f"{error}") from error
    if size > MOST_BYTES:
        raise refused(f"a JSON schema of at most {MOST_BYTES} bytes", f"{size}", "send a smaller one")
    return dict(cleaned)


def _cleaned(schema: object, deeper: int) -> Any:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        raise refused("JSON schemas that are objects", f"{str(schema)[:60]!r}")
    if not deeper:
        raise refused(f"a JSON schema of at most {MOST_DEPTH} levels", "more", "use $ref, or a flatter one")
    known = {key: value for key, value in schema.items() if not str(key).startswith(_EXTENSION)}
    unknown = sorted(str(key) for key in known if key not in KEYWORDS)
    if unknown:
        raise refused("keywords of JSON schemas that can be enforced", f"{unknown[0][:60]!r}", "leave it out")
    parts = {key: _part(key, value, deeper - 1) for key, value in known.items() if key not in _NOTES}
    if parts.get("format") not in FORMATS:
        parts.pop("format", None)
    return _with_null(parts) if parts.pop(_NULLABLE, False) is True else parts


def _part(key: str, value: object, deeper: int) -> object:
    """The value of a keyword, in which every schema is cleaned."""
    if key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
        return {name: _cleaned(part, deeper) for name, part in value.items()}
    if isinstance(value, list) and (key in _LISTS_OF_SCHEMAS or key == "items"):
        return [_cleaned(part, deeper) for part in value]
    if key in _SCHEMAS_BY_NAME | _LISTS_OF_SCHEMAS:
        raise refused(f"{key} of schemas", f"{str(value)[:60]!r}")
    return _cleaned(value, deeper) if key in _SCHEMAS else value


def _with_null(schema: dict[str, object]) -> dict[str, object]:
    """A schema that allows null too; an enum allows it where it lists it, as OpenAPI has it."""
    kinds = schema.get("type")
    if kinds is None:
        return {"anyOf": [schema, {"type": "null"}]} if schema else schema
    listed = kinds if isinstance(kinds, list) else [kinds]
    return schema | {"type": [*listed, *([] if "null" in listed else ["null"])]}


def refused(expectation: str, finding: str, action: str = "change it") -> UserError:
    """The error of a schema that is not enforced."""
    return UserError(expectation, finding, action)
