"""Reads `--study key=value`, which sets the options of studies where they are no options of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, get_type_hints

from edgemoe.errors import UserError
from edgemoe.models.options.settings import LevelOptions, StudyOptions


def study_keys() -> dict[str, str]:
    """Maps each key to its field of StudyOptions: "heavy-hitters" -> "heavy_hitters"."""
    return {each.name.replace("_", "-"): each.name for each in fields(StudyOptions)}


def parse_studies(texts: Sequence[str]) -> StudyOptions:
    """Reads the options of studies from texts such as "depth=equal".

    Raises:
        UserError: a text is no key=value, its key is unknown, or its value is no number where one is expected.
    """
    keys, hints = study_keys(), get_type_hints(StudyOptions)
    values: dict[str, Any] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or key not in keys:
            raise UserError(
                "a key of --study and a value", repr(text), f"write KEY=VALUE, KEY {_listed(keys)}"
            )
        values[keys[key]] = _converted(key, value, hints[keys[key]])
    return StudyOptions(**values)


def with_studies(options: LevelOptions, study: Sequence[str] | None) -> dict[str, Any]:
    """Arguments of run_settings: the fields of `options` and the settings of `--study`.

    Raises:
        UserError: from parse_studies.
    """
    return vars(options) | vars(parse_studies(study or ()))


def _listed(keys: Sequence[str] | dict[str, str]) -> str:
    *first, last = keys
    return f"one of {', '.join(first)} and {last}"


def _converted(key: str, value: str, hint: Any) -> Any:
    """The value in the type of its option, as the command line converts it."""
    convert: Callable[[str], Any] = str
    wanted = "a text"
    if hint == int | None:
        convert, wanted = int, "a whole number"
    elif hint == float | None:
        convert, wanted = float, "a number"
    elif hint is bool:
        convert, wanted = {"on": True, "off": False}.__getitem__, "on or off"
    try:
        return convert(value)
    except (ValueError, KeyError):
        raise UserError(f"{wanted} for --study {key}", repr(value), f"write {key}=VALUE") from None
