"""Declares an option as a field of a dataclass: its default, its help, and how it is written on a command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any


def option(text: str, default: Any = None, *, name: str = "", short: str = "", **details: Any) -> Any:
    """Makes a field of a dataclass that is an option.

    Args:
        text: the text that --help prints.
        default: the value of an option that is not given.
        name: how a command line writes it; by default two dashes and the field's name.
        short: a second name, of one dash and a letter; "" for none.
        details: further arguments of typer.Option.
    """
    return field(default=default, metadata={"name": name, "short": short, "help": text, **details})


def one_of(*values: str) -> Callable[[str], list[str]]:
    """Makes the autocompletion of an option that takes one of some values, for a shell."""

    def complete(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return complete


def flag(name: str) -> str:
    """An option on the command line: hot_margin -> --hot-margin."""
    return f"--{name.replace('_', '-')}"
