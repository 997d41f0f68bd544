"""storage/files/lock.py: shared locks of readers, the exclusive lock of a converter, and the end of their processes."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgemoe.errors import StoreBusy, UserError
from edgemoe.storage.files import lock
from edgemoe.storage.files.lock import StoreLock, writer_of

HOLD = """
import sys, pathlib
sys.path.insert(0, sys.argv[1])
from edgemoe.storage.files.lock import StoreLock
with StoreLock(pathlib.Path(sys.argv[2]), exclusive=sys.argv[3] == "True"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other_process(tmp_path):
    """Starts processes that hold a lock on tmp_path until they are killed."""
    started = []

    def start(exclusive: bool) -> subprocess.Popen[str]:
        root = Path(lock.__file__).parent.parent
        argv = [sys.executable, "-c", HOLD, str(root), str(tmp_path), str(exclusive)]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.e2e
@pytest.mark.parametrize(("theirs", "ours"), [(True, True), (True, False), (False, True)])
def test_a_converter_excludes_all_others_until_it_ends(tmp_path, other_process, theirs, ours):
    """A lock that conflicts with another process's is refused at once, and granted after SIGKILL of that process."""
    process = other_process(theirs)
    with pytest.raises(StoreBusy, match="another process"):
        StoreLock(tmp_path, exclusive=ours)
    process.kill()
    process.wait()
    StoreLock(tmp_path, exclusive=ours).close()


@pytest.mark.e2e
def test_the_writer_is_named(tmp_path, other_process):
    """The id of a process that writes is found, and is in the error; readers have none."""
    assert writer_of(tmp_path) is None
    reader = other_process(False)
    assert writer_of(tmp_path) is None
    reader.kill()
    reader.wait()
    process = other_process(True)
    assert writer_of(tmp_path) == process.pid
    with pytest.raises(StoreBusy, match=rf"another process \(id {process.pid}\) that writes it"):
        StoreLock(tmp_path, exclusive=True)
    assert writer_of(tmp_path / "nowhere") is None


@pytest.mark.parametrize("replaced", [False, True])
def test_a_directory_removed_while_it_is_locked_is_busy(tmp_path, monkeypatch, replaced):
    """A lock on a directory that has lost its name, or given it to another, is no lock on that name."""
    directory, real = tmp_path / "store", lock.fcntl.flock
    directory.mkdir()

    def remove(fd: int, operation: int) -> None:
        directory.rename(tmp_path / "removed")
        if replaced:
            directory.mkdir()
        real(fd, operation)

    monkeypatch.setattr(lock.fcntl, "flock", remove)
    with pytest.raises(StoreBusy, match="has just removed it"):
        StoreLock(directory, exclusive=True)


@pytest.mark.e2e
def test_readers_share(tmp_path, other_process):
    """Two processes lock a store for reading at the same time."""
    other_process(False)
    StoreLock(tmp_path, exclusive=False).close()


def test_locks_of_one_process_conflict_and_close_releases(tmp_path):
    """Locks of one process conflict as locks of two processes do; a second close has no effect."""
    first = StoreLock(tmp_path, exclusive=True)
    with pytest.raises(StoreBusy):
        StoreLock(tmp_path, exclusive=False)
    first.close()
    first.close()
    with StoreLock(tmp_path, exclusive=False), StoreLock(tmp_path, exclusive=False):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_missing_directory_is_a_user_error(tmp_path):
    """A missing directory is refused with its path."""
    with pytest.raises(UserError, match="nowhere"):
        StoreLock(tmp_path / "nowhere", exclusive=False)


def test_a_filesystem_without_locks_can_be_read_only(tmp_path, monkeypatch, caplog):
    """Without locks in the file system a reader continues with a warning, and a converter is refused."""

    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    closed: list[int] = []
    close = os.close
    monkeypatch.setattr(lock.os, "close", lambda fd: (closed.append(fd), close(fd)))
    with pytest.raises(UserError, match="No locks"):
        StoreLock(tmp_path, exclusive=True)
    with caplog.at_level(logging.WARNING, "edgemoe"):
        StoreLock(tmp_path, exclusive=False).close()
    assert "cannot be locked" in caplog.text
    assert len(closed) == 2


def test_windows_is_refused_clearly(tmp_path, monkeypatch):
    """A platform without flock is refused."""
    monkeypatch.setattr(lock, "fcntl", None)
    with pytest.raises(UserError, match="Linux or macOS"):
        StoreLock(tmp_path, exclusive=False)
