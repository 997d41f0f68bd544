"""The lines of a server's log: each begins with the local time."""

from __future__ import annotations

import logging
import sys
import time

from edgemoe.console.printable import printable

_TIME = "%Y-%m-%d %H:%M:%S"


def say_with_time(line: str) -> None:
    """Prints a line on stderr, without control characters."""
    print(printable(f"{time.strftime(_TIME)} edgemoe: {line}"), file=sys.stderr, flush=True)


def log_with_time(name: str) -> None:
    """Gives what is logged the same form, and logs what the parts of a name report too, not warnings alone."""
    logging.getLogger(name).setLevel(logging.INFO)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s edgemoe: %(message)s", _TIME))
