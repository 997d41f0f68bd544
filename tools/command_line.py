"""The parser, number types and error output that all command-line tools use."""

from __future__ import annotations

import argparse
import sys

from edgemoe.errors import EdgemoeError


def make_parser(tool: str, description: str | None) -> argparse.ArgumentParser:
    """A parser whose help starts with the command and shows `description` line by line.

    Args:
        tool: the module, such as "tools.timing.products".
        description: the module's docstring.
    """
    return argparse.ArgumentParser(
        prog=f"python -m {tool}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def positive(text: str) -> int:
    """Parses a whole number of 1 or more, for add_argument(type=...).

    Raises:
        argparse.ArgumentTypeError: `text` is anything else; argparse prints the message and exits 2.
    """
    return _at_least(1, text)


def two_or_more(text: str) -> int:
    """Parses a number of tokens with at least one gap between two of them; raises as positive."""
    return _at_least(2, text)


def _at_least(least: int, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"expected a whole number of {least} or more, got {text!r}")
    return number


def failed(tool: str, error: Exception) -> int:
    """Prints an error on stderr after the tool's name; returns the exit code: the error's own, or 2."""
    print(f"{tool}: {error}", file=sys.stderr)
    return error.exit_code if isinstance(error, EdgemoeError) else 2
