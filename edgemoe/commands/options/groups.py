"""Gives a command the options that dataclasses declare."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import Field, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command an option for each field of its dataclass parameters, in the places of these."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if is_dataclass(parameter.annotation)
    }

    @wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{each.name: values.pop(each.name) for each in _declared(group)})
        command(**values)

    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        parameters += _options(groups[name]) if name in groups else [parameter]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def _declared(group: Any) -> list[Field[Any]]:
    """The fields of a group that are options."""
    return [each for each in fields(group) if "help" in each.metadata]


def _options(group: Any) -> Iterator[inspect.Parameter]:
    """Yields the parameters that typer makes options of."""
    types = get_type_hints(group)
    for each in _declared(group):
        details = dict(each.metadata)
        name = details.pop("name") or f"--{each.name.replace('_', '-')}"
        short = details.pop("short")
        taken: Any = Annotated[types[each.name], typer.Option(name, *([short] if short else []), **details)]
        kind = inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(each.name, kind, default=each.default, annotation=taken)
