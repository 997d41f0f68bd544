"""Options of a command as fields of a dataclass, which several commands can share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import field, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer


def option(text: str, default: Any = None, *, name: str = "", short: str = "", **details: Any) -> Any:
    """Makes a field of a dataclass that is an option.

    Args:
        text: for --help.
        default: of field and option.
        name: on the command line; by default two dashes and the field's name.
        short: a second name, of one dash and a letter; "" for none.
        details: further arguments of typer.Option.
    """
    return field(default=default, metadata={"name": name, "short": short, "help": text, **details})


def one_of(*values: str) -> Callable[[str], list[str]]:
    """Makes the autocompletion of an option that takes one of some values, for a shell."""

    def complete(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return complete


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
            values[name] = group(**{each.name: values.pop(each.name) for each in fields(group)})
        command(**values)

    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        parameters += _options(groups[name]) if name in groups else [parameter]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def _options(group: Any) -> Iterator[inspect.Parameter]:
    """Yields the parameters that typer makes options of."""
    types = get_type_hints(group)
    for each in fields(group):
        details = dict(each.metadata)
        name = details.pop("name") or f"--{each.name.replace('_', '-')}"
        short = details.pop("short")
        taken: Any = Annotated[types[each.name], typer.Option(name, *([short] if short else []), **details)]
        kind = inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(each.name, kind, default=each.default, annotation=taken)
