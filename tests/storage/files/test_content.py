"""Digests of whole files, and when a file is read again."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from edgemoe.storage.files import content
from edgemoe.storage.files.content import content_digests


@pytest.fixture
def reads(tmp_path, monkeypatch) -> list[Path]:
    """The files that are read, one entry per read, in an empty cache where every file counts as settled."""
    done: list[Path] = []
    real = content.read_range

    def read_range(path: Path, offset: int, size: int):
        done.append(path)
        return real(path, offset, size)

    monkeypatch.setattr(content, "read_range", read_range)
    monkeypatch.setattr(content, "SETTLED", -1)
    monkeypatch.setattr(content, "user_cache", lambda: tmp_path)
    monkeypatch.setattr(content, "_known", {})
    return done


def test_a_file_is_read_once_and_again_after_every_change(tmp_path, reads, monkeypatch):
    """A later process uses the record; new bytes with the same size and time of writing, or another inode, do not."""
    file, copy = tmp_path / "weights", tmp_path / "copy"

    def digest() -> str:
        monkeypatch.setattr(content, "_known", {})  # as in another process
        (found,) = content_digests([file]).values()
        return found

    file.write_bytes(bytes(1000))
    assert {digest(), digest()} == {hashlib.sha256(bytes(1000)).hexdigest()}
    assert reads == [file]
    times = file.stat()
    file.write_bytes(bytes(500) + b"\1" + bytes(499))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    changed = digest()
    assert changed == hashlib.sha256(file.read_bytes()).hexdigest()
    copy.write_bytes(bytes(1000))
    copy.replace(file)
    assert digest() == hashlib.sha256(bytes(1000)).hexdigest() != changed
    assert reads == [file] * 3


def test_a_file_that_has_just_changed_is_always_read(tmp_path, reads, monkeypatch):
    """Its next change may have the same time."""
    monkeypatch.setattr(content, "SETTLED", 10**15)
    file = tmp_path / "weights"
    file.write_bytes(bytes(10))
    assert len({*content_digests([file]).values(), *content_digests([file]).values()}) == 1
    assert reads == [file] * 2
