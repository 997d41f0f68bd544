"""Refusals by the operating system while a checkpoint is read or a store written, as errors of the tree."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from edgemoe.errors import DamagedData, ReadFailed, UserError, WriteFailed
from edgemoe.storage.convert.checkpoint import Checkpoint

_REQUEST = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.EEXIST),
    *(errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP),
)
"""Error numbers that the user's request causes, not the disk."""


def require_unchanged(
    source: Path, fingerprint: str, hashes: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Raises DamagedData if a checkpoint has another fingerprint now: a store would mix two checkpoints.

    Args:
        source: the checkpoint.
        fingerprint: the result of Checkpoint.fingerprint before the checkpoint was read.
        hashes: file name -> SHA-256 of its content in hex, where it is known without reading the file.
    """
    with source_errors(source):
        now = Checkpoint.open(source).fingerprint(hashes)
    if now != fingerprint:
        raise DamagedData(
            f"{source} unchanged while it was read",
            "changed files",
            "remove what was written, and run the command again while no process writes to the checkpoint",
        )


@contextmanager
def source_errors(source: Path) -> Iterator[None]:
    """Converts an OSError from reads of a checkpoint's small files into ReadFailed."""
    try:
        yield
    except OSError as error:
        raise ReadFailed(f"the checkpoint {source}", str(error), "check the disk, then try again") from error


@contextmanager
def destination_errors(destination: Path, what: str = "a store") -> Iterator[None]:
    """Converts an OSError from a writer's calls on directories into an error of the tree."""
    try:
        yield
    except OSError as error:
        wanted, found = f"{what} in {destination}", str(error)
        if error.errno in _REQUEST:
            raise UserError(wanted, found, "choose a directory that you may write to") from error
        raise WriteFailed(wanted, found, "check the disk, then run the command again to resume") from error
