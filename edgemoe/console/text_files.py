"""Reads the text files that options name."""

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
