"""Standard streams that a program cannot rely on: closed, full, or of an encoding that lacks characters."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import TextIO

from edgemoe.errors import EdgemoeError, UserError


class _Output(TextIOWrapper):
    """A text stream over another one's bytes, whose refusals are errors of their own."""

    def write(self, text: str) -> int:
        """Writes text; raises EdgemoeError where it is refused."""
        with _refusals():
            return super().write(text)

    def flush(self) -> None:
        """Writes what is buffered; raises EdgemoeError where it is refused."""
        with _refusals():
            super().flush()


@contextmanager
def standard_streams() -> Iterator[None]:
    """Runs the block with a stdin and a stderr, and without a traceback over a stdout that takes no output.

    A character that an encoding lacks is written as a question mark.

    Raises:
        EdgemoeError: stdout is closed, or refused what the block has written.
        SystemExit: 1, where the reader of a pipe has ended.
    """
    closed = sys.stdout is None
    _open_closed()
    if closed:
        raise _refused("a closed one")
    before = sys.stdout
    if type(before) is not TextIOWrapper:  # another program's, as in a test
        yield
        return
    buffered = before.line_buffering
    out = sys.stdout = _Output(
        before.buffer, before.encoding, "replace", None, buffered, before.write_through
    )
    try:
        yield
        out.flush()
    except BrokenPipeError:  # the reader has enough, as `head` does
        _drop(out)
        raise SystemExit(1) from None
    except BaseException:
        _drop(out)
        raise
    finally:
        sys.stdout = before
        with suppress(ValueError, OSError, EdgemoeError):
            out.detach()  # else its end would close the stream


def require_text(text: str, name: str) -> None:
    """Refuses bytes that are no text, which Python keeps as halves of surrogate pairs in some locales.

    Raises:
        UserError: with the first such byte.
    """
    for place, character in enumerate(text):
        if "\ud800" <= character <= "\udfff":
            found = f"byte 0x{ord(character) & 0xFF:02x} after {place} characters"
            raise UserError(f"{name} of utf-8 text", found, "convert the input first")


def _open_closed() -> None:
    """Opens the null device in place of each closed stream, so that no file of the program gets its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _refused(error.strerror or str(error)) from error


def _drop(out: TextIO) -> None:
    """Drops what a stream that refuses it has buffered, which Python would write once more when it ends."""
    try:
        out.flush()
    except (OSError, EdgemoeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


def _refused(finding: str) -> EdgemoeError:
    return EdgemoeError(
        "a stdout that takes output", finding, "write to another file or disk, or open the stream"
    )
