"""Gives a command the options that dataclasses declare."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Iterator
from dataclasses import Field, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from edgemoe.errors import UserError
from edgemoe.models.demo import demo_by_name
from edgemoe.models.options.groups import ModelOptions, complete_model

MODEL_NAME = "model_name"
"""The parameter of a model that is given without --model."""

_CONTEXT = "own_context"
"""The parameter that says where options come from."""


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command an option for each field of its dataclass parameters, in the places of these.

    A command with the option --model takes the model as its first argument too.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if is_dataclass(parameter.annotation)
    }

    opens = any(issubclass(group, ModelOptions) for group in groups.values())
    several = any(get_type_hints(group).get("model") == list[Path] | None for group in groups.values())

    @wraps(command)
    def run(**values: Any) -> None:
        if opens:
            typed = values.pop(_CONTEXT).get_parameter_source("model").name == "COMMANDLINE"
            argument = values.pop(MODEL_NAME)
            if several:
                option = (values["model"] or [None])[0]
                one = _one_model(option, argument, typed=typed)
                values["model"] = values["model"] if argument is None else [one]
            else:
                values["model"] = _one_model(values["model"], argument, typed=typed)
        for name, group in groups.items():
            values[name] = group(**{each.name: values.pop(each.name) for each in _declared(group)})
        command(**values)

    parameters: list[inspect.Parameter] = [_MODEL, _OWN_CONTEXT] if opens else []
    for name, parameter in signature.parameters.items():
        parameters += _options(groups[name]) if name in groups else [parameter]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


_MODEL = inspect.Parameter(
    MODEL_NAME,
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Argument(metavar="MODEL", help="The same as --model.", autocompletion=complete_model),
    ],
)


_OWN_CONTEXT = inspect.Parameter(_CONTEXT, inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)


def _one_model(option: Path, argument: Path | None, *, typed: bool) -> Path:
    """The model that was given without --model, otherwise the value of --model.

    Args:
        option: the value of --model.
        argument: the model that was given without it; it goes before a variable and a file of options.
        typed: whether --model is on the command line.

    Raises:
        UserError: both are on the command line, or a prompt stands where the model belongs.
    """
    if argument is None:
        return option
    if typed:
        raise UserError("one model", f"{argument} and --model {option}", "leave one of the two out")
    if any(each.isspace() for each in str(argument)) and not argument.exists():
        action = f"for a prompt, write edgemoe chat demo {shlex.quote(str(argument))}"
        raise UserError("a model as the first argument", repr(str(argument)), action)
    return demo_by_name(argument)


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
