"""Reads the text files that options name."""

from __future__ import annotations

from pathlib import Path

from edgemoe.errors import UserError


def read_text(path: Path, option: str, most: int = -1) -> str:
    """Reads a UTF-8 text file.

    Args:
        path: the file.
        option: the option that names it, such as --text.
        most: characters to read from its start; -1: all.

    Raises:
        UserError: there is no such file, it cannot be read, or it is not UTF-8.
    """
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(most)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"a UTF-8 text file for {option} {path}", fault_of(error), "name another file"
        ) from error


def fault_of(error: OSError | ValueError) -> str:
    """Says in words, without a number, why a path or its text cannot be used.

    >>> fault_of(IsADirectoryError(21, "Is a directory", "x")), fault_of(FileExistsError(17, "File exists", "x"))
    ('a directory', 'a file')
    """
    if isinstance(error, IsADirectoryError):
        return "a directory"
    if isinstance(error, FileExistsError | NotADirectoryError):
        return "a file"
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, UnicodeDecodeError):
        return f"bytes that are not UTF-8, at position {error.start}"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
