"""The directory of a prefix cache: it belongs to the user who runs the program, and has a secret number."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from edgemoe.errors import UserError, fault_of
from edgemoe.storage.files.retry import open_regular

SECRET = "secret"
"""Name of the file with the secret number."""

_BYTES = 8

_ACTION = "name a directory of your own"


def own_directory(directory: Path) -> int:
    """Makes a directory where it is missing, for its owner alone, as blocks have the tokens of conversations.

    Returns:
        its secret number of 64 bits, made where it is missing: the seed of all checksums in it.

    Raises:
        UserError: it cannot be made, belongs to another user, or any user may write to it.
    """
    wanted = f"a directory at {directory}"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
        if found.st_uid != os.geteuid():
            raise UserError(f"{wanted} of the user who runs edgemoe", "one of another user", _ACTION)
        if found.st_mode & stat.S_IWOTH:
            raise UserError(f"{wanted} that its owner alone may write to", "one that any user may", _ACTION)
        return _secret(directory / SECRET)
    except OSError as error:
        raise UserError(wanted, fault_of(error), _ACTION) from error


def _secret(path: Path) -> int:
    """Reads the number in a file; makes the file where there is none, also next to other processes that do."""
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}")
        try:
            part.touch(0o600)
            part.write_bytes(secrets.token_bytes(_BYTES))
            path.hardlink_to(part)
        except FileExistsError:
            pass
        finally:
            part.unlink(missing_ok=True)
    with open_regular(path) as file:
        raw = file.read(_BYTES)
        owner = os.fstat(file.fileno()).st_uid
    if len(raw) != _BYTES or owner != os.geteuid():
        found = f"{len(raw)} bytes of user {owner}"
        raise UserError(
            f"{_BYTES} bytes of your own in {path}", found, "remove the directory, or name another"
        )
    return int.from_bytes(raw, "little")
