"""Numbers of things on a tool's command line."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """A whole number of 1 or more, for add_argument(type=...).

    Raises:
        argparse.ArgumentTypeError: it is none. argparse says so and exits 2.
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"a whole number of 1 or more was wanted, got {text!r}")
    return number
