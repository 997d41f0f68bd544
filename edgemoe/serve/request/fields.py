"""The fields of JSON bodies: their types and ranges. A wrong one is an error that names it."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from edgemoe.serve.errors import ApiError


class Fields(BaseModel):
    """Fields of a JSON object. A field that is null counts as left out, and an unknown one is ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


class Known(Fields):
    """Fields of a JSON object that has no others: an unknown one is an error that names it."""

    model_config = ConfigDict(strict=True, extra="forbid")


Some = TypeVar("Some", bound=Fields)


def parse(kind: type[Some], body: bytes) -> Some:
    """Parses a body.

    Raises:
        ApiError: it is no JSON object, or a field is wrong.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        # Where a value may be of several kinds, each has errors: the deepest is of the kind that was meant.
        first = max(errors, key=lambda each: len(each["loc"]))
        place = ".".join(str(part) for part in first["loc"] if "[" not in str(part)) or "body"
        found = repr(first.get("input"))[:80]
        message = f"expected another {place}, got {found}: {first['msg']}"
        if first["type"] == "extra_forbidden":
            message = f"expected no {place}, got {found}: leave it out"
        raise ApiError(400, message, param=str(first["loc"][0]) if first["loc"] else None) from None
