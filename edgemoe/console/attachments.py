"""The only prompt of a chat with what belongs to it: a file, and text piped into stdin."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import IO

from edgemoe.errors import UserError, fault_of

MOST_BYTES = 16 << 20
"""Most bytes of one attachment; a context has far fewer."""


def whole_prompt(prompt: str, file: Path | None) -> str:
    """Appends the contents of a file, and of stdin where that is a pipe or a file, with an empty line before each.

    Raises:
        UserError: one of them cannot be read, is no UTF-8 text, or is too long.
    """
    parts = [prompt]
    if file is not None:
        try:
            with file.open("rb") as opened:
                parts.append(_text(opened, str(file)))
        except OSError as error:
            raise UserError(f"a file for --file {file}", fault_of(error), "name another") from error
    if _is_piped(sys.stdin):
        parts.append(_text(sys.stdin.buffer, "stdin"))
    return "\n\n".join(part for part in parts if part)


def _is_piped(stream: IO[str]) -> bool:
    """Whether a stream is a pipe or a file; a terminal, the null device and other programs' streams are not read."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _text(stream: IO[bytes], name: str) -> str:
    raw = stream.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise UserError(f"at most {MOST_BYTES >> 20} MiB of text in {name}", "more", "give a part of it")
    try:
        return raw.decode().strip("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"UTF-8 text in {name}", fault_of(error), "convert it first") from error
