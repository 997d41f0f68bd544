"""storage/files/retry.py: warnings of survived failures, reads that are given up, and files whose reads are retried."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
import tracemalloc
from io import BufferedReader
from pathlib import Path

import pytest
from faults import Pauses

from edgemoe.storage.files import retry
from edgemoe.storage.files.header import header_bytes, read_header
from edgemoe.storage.files.retry import PATIENCE, GivingUp, Retries, open_regular

EIO = OSError(errno.EIO, "Input/output error")
PATH = Path("experts.safetensors")


@pytest.fixture
def pauses(monkeypatch) -> Pauses:
    made = Pauses()
    made.install(monkeypatch)
    return made


def test_survived_failures_are_reported_once_a_minute(pauses, caplog):
    """The first outage is a warning with file, attempts, seconds; another is one only after REPORT_EVERY."""
    with caplog.at_level(logging.WARNING, "edgemoe"):
        for later in (0, 1, retry.REPORT_EVERY):
            pauses.now += later
            retries = Retries(PATH)
            retries.progress()
            assert retries.failed(EIO) is None
            assert retries.failed(EIO) is None
            retries.progress()
            retries.progress()
    assert [record.getMessage() for record in caplog.records] == [
        "experts.safetensors: a read failed 2 times in 0.0 s and then succeeded: check the disk and its cable"
    ] * 2


def test_an_error_that_lasts_is_no_warning(pauses, caplog):
    """A read that fails in the end raises an error instead of logging."""
    retries = Retries(PATH)
    with caplog.at_level(logging.WARNING, "edgemoe"):
        while not (found := retries.failed(EIO)):
            pass
    assert found == f"Input/output error, {len(pauses) + 1} times in {PATIENCE} s"
    assert caplog.records == []


def test_waiting_reads_are_given_up_at_once(monkeypatch):
    """Reads that pause end when another thread enters GivingUp, and are tried again after the last one has left."""
    ended: list[str | None] = []
    pausing = threading.Event()

    def fail() -> None:
        retries = Retries(PATH)
        for _ in range(100):
            if found := retries.failed(EIO):
                ended.append(found)
                return
            pausing.set()

    threads = [threading.Thread(target=fail) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert pausing.wait(timeout=30)
    start = time.monotonic()
    with GivingUp(), GivingUp():
        for thread in threads:
            thread.join(timeout=30)
        assert time.monotonic() - start < 1
        with GivingUp():
            pass
        assert Retries(PATH).failed(EIO) == "Input/output error, 1 times in 0.0 s"
    assert len(ended) == 4
    assert Retries(PATH).failed(EIO) is None


@pytest.fixture
def failing_readv(pauses, monkeypatch):
    """Makes os.readv fail with an errno until the clock shows a time."""
    real = os.readv

    def until(end: float, number: int = errno.EIO) -> None:
        def read(fd, buffers):
            if pauses.now < end:
                raise OSError(number, os.strerror(number))
            return real(fd, buffers)

        monkeypatch.setattr(os, "readv", read)

    return until


@pytest.mark.parametrize("how", ["read", "read all", "readinto", "buffered"])
def test_every_read_of_an_open_file_is_retried(failing_readv, tmp_path, how):
    """Each method returns the file's bytes after a second of failures, and raises the typed OSError after 5 s."""
    path = tmp_path / "file"
    path.write_bytes(content := os.urandom(10_000))

    def read() -> bytes:
        if how == "buffered":
            with BufferedReader(open_regular(path)) as buffered:
                return buffered.read()
        with open_regular(path) as file:
            if how == "read":
                return file.read(4000) + file.read(20_000)
            if how == "read all":
                return file.read()
            into = bytearray(10_000)
            assert file.readinto(into) == 10_000
            return bytes(into)

    failing_readv(1.0)
    assert read() == content
    failing_readv(100.0)
    with pytest.raises(OSError, match=r"Input/output error, \d+ times in 5.0 s"):
        read()


def test_a_limit_of_a_read_takes_no_memory(tmp_path):
    """A read of at most 64 MB takes memory by the bytes of the file, across pieces and at the limit."""
    path = tmp_path / "file"
    path.write_bytes(content := os.urandom(600_000))
    tracemalloc.start()
    try:
        with open_regular(path) as file:
            assert file.read(64 << 20) == content
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    with open_regular(path) as file:
        assert file.read(550_000) == content[:550_000]
        assert file.read(0) == b""
        assert file.read(50_000) == content[550_000:]


def test_short_reads_are_joined(tmp_path, monkeypatch):
    """A read goes on where the operating system returned fewer bytes, and ends at its size."""
    path, real = tmp_path / "file", os.readv
    path.write_bytes(content := os.urandom(5000))
    monkeypatch.setattr(os, "readv", lambda fd, buffers: real(fd, [memoryview(buffers[0])[:700]]))
    with open_regular(path) as file:
        assert file.read(4000) == content[:4000]
        assert file.read(4000) == content[4000:]


def test_a_header_survives_a_second(failing_readv, tmp_path):
    """A file whose first read fails for a second is opened all the same."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(header_bytes({"a": ("U8", [4])}, {}) + b"abcd")
    failing_readv(1.0)
    assert list(read_header(path).tensors) == ["a"]


def test_a_permanent_error_of_an_open_file_is_not_retried(failing_readv, pauses, tmp_path):
    """EBADF is raised at once."""
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    failing_readv(1.0, errno.EBADF)
    with open_regular(path) as file, pytest.raises(OSError, match="Bad file descriptor: ") as caught:
        file.read(3)
    assert caught.value.errno == errno.EBADF
    assert pauses == []
