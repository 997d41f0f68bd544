"""Reads the files that options and messages name."""

from __future__ import annotations

from pathlib import Path

from edgemoe.errors import UserError, fault_of


def read_text(path: Path, option: str, characters: int = -1) -> str:
    """Reads a UTF-8 text file.

    Args:
        path: the file.
        option: the option that names it, such as --text.
        characters: number of characters to read from its start; -1: all.

    Raises:
        UserError: there is no such file, it cannot be read, or it is not UTF-8.
    """
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(characters)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"a UTF-8 text file for {option} {path}", fault_of(error), "name another file"
        ) from error


def read_bytes(path: Path, limit: int) -> bytes:
    """Reads a file that a message names.

    Args:
        path: the file.
        limit: most bytes of it.

    Raises:
        UserError: there is no such file, it cannot be read, or it is longer.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(limit + 1)
    except OSError as error:
        raise UserError(f"a file {path}", fault_of(error), "name another file") from error
    if len(raw) > limit:
        raise UserError(f"at most {limit} bytes in {path}", "more", "name a smaller file")
    return raw
