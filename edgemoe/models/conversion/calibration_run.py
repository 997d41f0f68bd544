"""Runs a calibration in a process of its own, so that its memory is gone when the model is opened."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgemoe.errors import StoreBusy
from edgemoe.models.cache import downloads_directory
from edgemoe.models.conversion.calibration_time import SAMPLES
from edgemoe.models.conversion.download import KEPT, RETAINED
from edgemoe.storage.files.lock import StoreLock
from edgemoe.storage.store.calibration import CALIBRATION_NAME
from edgemoe.storage.store.manifest import Manifest

FOLDER = "recoding"
"""Folder in a store that a calibration locks (recode.run)."""


_PROGRAM = """
import runpy, sys
sys.path.append(sys.argv.pop(1))
runpy.run_module("edgemoe", run_name="__main__", alter_sys=True)
"""
"""Runs this edgemoe, installed or not."""


@contextmanager
def locked(note: Path) -> Iterator[bool]:
    """Holds the lock on a note for the block; yields False where another process holds it or has removed the note."""
    with note.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield note.exists()


def is_busy(store: Path) -> bool:
    """Whether another process calibrates a store."""
    folder = store / FOLDER
    try:
        if folder.is_dir():
            StoreLock(folder, exclusive=False).close()
    except StoreBusy:
        return True
    return False


def run(source: Path, store: Path, dense_bits: str) -> int:
    """Calibrates the codes of a store with progress on stderr, and its levels where the checkpoint came with theirs.

    Args:
        source: the checkpoint.
        store: its finished store.
        dense_bits: the value of --dense-bits.

    Returns:
        the exit code, negative after a signal.

    Raises:
        KeyboardInterrupt: the calibration was interrupted.
    """
    how = ("--layout", Manifest.load(store).layout, "--dense-bits", dense_bits)
    commands = [["convert", str(source), str(store), *how, "--calibrate", "self", "--samples", str(SAMPLES)]]
    if (source / CALIBRATION_NAME).exists():  # it was measured on other codes
        commands.append(["calibrate", str(store)])
    code = next((code for code in map(_edgemoe, commands) if code), 0)
    if (
        code > 0 and dense_bits == "auto"
    ):  # at least dense weights of fewer than 16 bits, if it is not done already
        _edgemoe(["convert", str(source), str(store), *how])
    return code


def _edgemoe(arguments: list[str]) -> int:
    """Runs a command of edgemoe, and returns its exit code."""
    # -P keeps the working directory, whose files could hide packages, off the import path.
    command = [sys.executable, "-P", "-c", _PROGRAM, str(Path(__file__).parents[3]), *arguments]
    # Options that the user has set for all commands, such as --keep-source, are not for this one.
    own = {name: value for name, value in os.environ.items() if not name.startswith("EDGEMOE_")}
    with tempfile.NamedTemporaryFile(suffix=".toml") as options:
        command += ["--config", options.name]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=own)
    if done.returncode == 130:
        raise KeyboardInterrupt
    return done.returncode


def release(source: Path) -> None:
    """Removes a download that stayed for its calibration alone."""
    if source.parent == downloads_directory() and source.is_dir():
        (source / RETAINED).unlink(missing_ok=True)
        if not (source / KEPT).exists():
            shutil.rmtree(source)
