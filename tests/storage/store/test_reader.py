"""storage/store/reader.py: reads of the written planes past the page cache, and an error type for every fault."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import combinations_with_replacement, pairwise
from pathlib import Path

import pytest
from faults import REAL, FaultyPreadv, Pauses, error, short
from small_store import EXPERTS, LAYERS, buffer, convert, flip, geometry, record, writer

from edgemoe.errors import ChecksumMismatch, MissingTensor, ReadFailed, StoreBusy, TruncatedFile, UserError
from edgemoe.storage.base import ExpertKey, Plane
from edgemoe.storage.files import unbuffered
from edgemoe.storage.files.retry import LONGEST_PAUSE, TRANSIENT
from edgemoe.storage.store import record_file
from edgemoe.storage.store.manifest import Manifest
from edgemoe.storage.store.reader import RecordReader

GEOMETRY = geometry()
SIZE = GEOMETRY.record_bytes
BOUNDS = {Plane.BASE: (0, 8192), Plane.D4: (8192, 12288), Plane.D8: (12288, 20480)}
"""The bounds that test_manifest computes by hand from the matrices."""
KEY = ExpertKey(4, 1)
EXPECTED = record(*KEY, SIZE).tobytes()


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A store that no test changes."""
    directory = tmp_path_factory.mktemp("good")
    (directory / "config.json").write_text("{}")
    convert(directory / "store", directory / "config.json")
    return directory / "store"


@pytest.fixture
def store(tmp_path) -> Path:
    """A store that a test may damage."""
    (tmp_path / "config.json").write_text("{}")
    convert(tmp_path / "store", tmp_path / "config.json")
    return tmp_path / "store"


def opened(directory: Path) -> RecordReader:
    return RecordReader.open(directory, Manifest.load(directory))


@contextmanager
def faulty(directory: Path, *, preadv=REAL, pauses: Pauses | None = None) -> Iterator[RecordReader]:
    """Opens a reader; reads and pauses go to doubles until it is closed."""
    with pytest.MonkeyPatch.context() as patch, opened(directory) as reader:
        patch.setattr(os, "preadv", preadv)
        (Pauses() if pauses is None else pauses).install(patch)
        yield reader


def shard(directory: Path) -> tuple[Path, int]:
    """Path of KEY's record, and its offset."""
    layer = Manifest.load(directory).layers[KEY.layer]
    return directory / layer.file, layer.records[KEY.expert].offset


def read(reader: RecordReader, first=Plane.BASE, last=Plane.D8, cuts=()) -> bytes:
    """Reads KEY's planes into one buffer, or into several that end at `cuts`."""
    (start, _), (_, end) = BOUNDS[first], BOUNDS[last]
    edges = [0, *cuts, end - start]
    into = [buffer(b - a) for a, b in pairwise(edges)]
    assert reader.read(KEY, first, last, into) == end - start
    return b"".join(map(bytes, into))


@pytest.mark.parametrize(("first", "last"), list(combinations_with_replacement(Plane, 2)))
def test_any_run_of_planes_is_read_into_any_buffers(good, first, last):
    """One system call reads planes first..last in order, for any borders of the buffers."""
    (start, _), (_, end) = BOUNDS[first], BOUNDS[last]
    preadv = FaultyPreadv()
    with faulty(good, preadv=preadv) as reader:
        cuts = range(4096, end - start, 4096)
        assert read(reader, first, last) == read(reader, first, last, cuts) == EXPECTED[start:end]
        assert reader.bytes_read == 2 * (end - start)
    assert preadv.offsets == [shard(good)[1] + start] * 2


def test_every_record_is_read(good):
    """Every key reads its own record."""
    with opened(good) as reader:
        for layer in LAYERS:
            for expert in range(EXPERTS):
                into = buffer(SIZE)
                reader.read(ExpertKey(layer, expert), Plane.BASE, Plane.D8, [into])
                assert bytes(into) == record(layer, expert, SIZE).tobytes()


def test_direct_reads_are_really_direct(good, caplog):
    """The descriptors have O_DIRECT, and no warning is logged."""
    probe = os.open(good / "store.json", os.O_RDONLY)
    allowed = unbuffered.bypass_cache(probe)
    os.close(probe)
    if not hasattr(os, "O_DIRECT") or not allowed:
        pytest.skip("this filesystem has no O_DIRECT")
    flags = []

    def noting(fd, buffers, offset):
        flags.append(unbuffered.fcntl.fcntl(fd, unbuffered.fcntl.F_GETFL))
        return REAL(fd, buffers, offset)

    with faulty(good, preadv=noting) as reader:
        assert read(reader) == EXPECTED
        assert reader.direct
    assert flags
    assert all(flag & os.O_DIRECT for flag in flags)
    assert caplog.text == ""


@pytest.mark.parametrize("count", [4096, 8192, 12288, 5000, 4095, 512, 20479])
@pytest.mark.parametrize("cuts", [(), (8192,), (4096, 12288)])
def test_a_short_read_is_continued(good, count, cuts):
    """After a short read the rest is read from a whole block on, into the right places."""
    preadv = FaultyPreadv(short(count))
    with faulty(good, preadv=preadv) as reader:
        assert read(reader, cuts=cuts) == EXPECTED
        assert reader.bytes_read == SIZE
    start = shard(good)[1]
    assert preadv.offsets == [start, start + count // 4096 * 4096]


def test_many_short_reads_are_not_a_failure(good):
    """A read that makes progress takes no pause, and is no retry."""
    pauses = Pauses()
    with faulty(good, preadv=FaultyPreadv(*[short(4096)] * 4), pauses=pauses) as reader:
        assert read(reader) == EXPECTED
        assert reader.retries == 0
    assert pauses == []


@pytest.mark.parametrize("number", TRANSIENT)
def test_a_second_of_a_transient_error_is_survived(good, number):
    """A read that fails for a second gives the same bytes, after growing pauses, and counts its retries."""
    pauses = Pauses()
    with faulty(good, preadv=pauses.until(1.0, number), pauses=pauses) as reader:
        assert read(reader) == EXPECTED
        assert reader.retries == len(pauses)
        assert read(reader) == EXPECTED
        assert reader.retries == len(pauses)
    assert pauses == sorted(pauses)
    assert pauses[-1] <= LONGEST_PAUSE
    assert 1 <= pauses.now < 2


@pytest.mark.parametrize("fault", [error(errno.EIO), error(errno.ETIMEDOUT), short(0), short(100)])
def test_an_error_that_lasts_is_reported_with_its_place(good, fault):
    """After 5 s the error contains expert, planes, file, offset, attempts and seconds; the next read works."""
    preadv, pauses = FaultyPreadv(*[fault] * 1000), Pauses()
    path, offset = shard(good)
    with faulty(good, preadv=preadv, pauses=pauses) as reader:
        with pytest.raises(ReadFailed) as caught:
            read(reader, Plane.D4, Plane.D8)
        attempts = len(preadv.offsets)
        assert pauses.now == 5
        for part in (
            "layer 4, expert 1",
            "d4 to d8",
            str(path),
            str(offset + 8192),
            f"{attempts} times in 5.0 s",
        ):
            assert part in str(caught.value)
        assert attempts == len(pauses) + 1
        assert reader.bytes_read == reader.retries == 0
        preadv.faults.clear()
        assert read(reader) == EXPECTED


def test_progress_begins_the_five_seconds_again(good):
    """Two failures of 4 s each are survived where bytes came between them."""
    pauses, calls = Pauses(), []

    def broken_twice(fd, buffers, offset):
        if pauses.now < 4 or (calls and pauses.now < calls[0] + 4):
            raise OSError(errno.EIO, "Input/output error")
        calls.append(pauses.now)
        return short(4096)(fd, buffers, offset) if len(calls) == 1 else REAL(fd, buffers, offset)

    with faulty(good, preadv=broken_twice, pauses=pauses) as reader:
        assert read(reader) == EXPECTED
    assert pauses.now >= 8


@pytest.mark.parametrize("number", [errno.ENODEV, errno.EBADF, errno.ENOENT, errno.ESTALE])
def test_an_error_that_is_not_transient_is_not_retried(good, number):
    """The error of a missing device or file is raised at once."""
    preadv, pauses = FaultyPreadv(error(number)), Pauses()
    with (
        faulty(good, preadv=preadv, pauses=pauses) as reader,
        pytest.raises(ReadFailed, match=os.strerror(number)),
    ):
        read(reader)
    assert len(preadv.offsets) == 1
    assert pauses == []


def test_a_wrong_checksum_is_not_retried(store):
    """Bytes that were read but differ are an error at once."""
    path, offset = shard(store)
    flip(path, offset)
    preadv, pauses = FaultyPreadv(), Pauses()
    with faulty(store, preadv=preadv, pauses=pauses) as reader, pytest.raises(ChecksumMismatch):
        read(reader)
    assert (len(preadv.offsets), pauses) == (1, [])


def test_o_direct_refused_at_the_first_read_falls_back_with_one_warning(good, caplog):
    """EINVAL from every layer's first read turns O_DIRECT off; all reads succeed, with one warning."""

    def without_direct(fd, buffers, offset):
        if unbuffered.fcntl.fcntl(fd, unbuffered.fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return REAL(fd, buffers, offset)

    with caplog.at_level(logging.WARNING, "edgemoe"), faulty(good, preadv=without_direct) as reader:
        for layer in LAYERS:
            reader.read(ExpertKey(layer, 0), Plane.BASE, Plane.D8, [buffer(SIZE)])
        assert read(reader) == EXPECTED
        assert not reader.direct
    assert len(caplog.records) == 1


def test_o_direct_refused_at_open_falls_back_with_one_warning(good, caplog, monkeypatch):
    """A file system that refuses the flag is read through the page cache, and the pages are dropped."""
    forgotten = []
    monkeypatch.setattr(record_file, "bypass_cache", lambda fd: False)
    monkeypatch.setattr(record_file, "forget", lambda fd, offset, length: forgotten.append((offset, length)))
    with caplog.at_level(logging.WARNING, "edgemoe"), opened(good) as reader:
        assert not reader.direct
        assert read(reader) == EXPECTED
    assert len(caplog.records) == 1
    assert forgotten == [(shard(good)[1], SIZE)]


def test_einval_from_a_buffered_read_is_a_failure(good):
    """With O_DIRECT off, EINVAL is not retried and ends the read."""
    preadv = FaultyPreadv(error(errno.EINVAL), error(errno.EINVAL))
    with faulty(good, preadv=preadv) as reader, pytest.raises(ReadFailed, match="Invalid argument"):
        read(reader)


def test_threads_that_meet_the_refusal_together_all_fall_back(good):
    """Two threads whose direct reads are refused at the same time both complete."""
    both = threading.Barrier(2)

    def refused(fd, buffers, offset):
        both.wait(timeout=10)
        raise OSError(errno.EINVAL, "Invalid argument")

    with faulty(good, preadv=FaultyPreadv(refused, refused)) as reader, ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda _: read(reader), range(2))) == [EXPECTED] * 2


@pytest.mark.parametrize("plane", Plane)
@pytest.mark.parametrize("at", [0, -1])
def test_a_flipped_bit_is_found_and_named(store, plane, at):
    """One flipped bit in a plane raises an error with layer, expert, plane, file and the plane's offset."""
    path, offset = shard(store)
    start, end = BOUNDS[plane]
    flip(path, offset + (start if at == 0 else end - 1))
    with opened(store) as reader:
        with pytest.raises(ChecksumMismatch) as caught:
            read(reader, Plane.BASE, Plane.D8, cuts=(4096, 12288))
        for part in (f"plane {plane.label} of layer 4, expert 1", str(path), f"offset {offset + start}:"):
            assert part in str(caught.value)
        for other in set(Plane) - {plane}:
            assert read(reader, other, other) == EXPECTED[slice(*BOUNDS[other])]


def test_planes_that_are_not_read_are_not_verified(store):
    """Damage in d8 does not stop a model that runs at level 4."""
    path, offset = shard(store)
    flip(path, offset + BOUNDS[Plane.D8][0])
    with opened(store) as reader:
        assert read(reader, Plane.BASE, Plane.D4) == EXPECTED[:12288]


def test_a_truncated_file_is_refused_at_open(store):
    """A file one byte short is refused at open with both sizes in the message, and the lock is released."""
    path, _ = shard(store)
    size = path.stat().st_size
    os.truncate(path, size - 1)
    with pytest.raises(TruncatedFile, match=f"{path}.* {size - 1} bytes instead of {size}"):
        opened(store)
    with writer(store):
        pass


@pytest.mark.parametrize("size", [0, 4096, 5000, SIZE - 1])
def test_a_file_truncated_while_open_is_named(store, size):
    """A file that becomes shorter raises an error, not a signal; records before the cut are still read."""
    path, offset = shard(store)
    with faulty(store) as reader:
        os.truncate(path, offset + size)
        with pytest.raises(TruncatedFile, match=f"expert 1.*{path} at {offset + size}"):
            read(reader)
        into = buffer(SIZE)
        reader.read(ExpertKey(4, 0), Plane.BASE, Plane.D8, [into])
        assert bytes(into) == record(4, 0, SIZE).tobytes()


def test_a_file_replaced_while_open_is_read_as_it_was(store):
    """A new file under the old name, or none, does not disturb a reader."""
    path, _ = shard(store)
    with opened(store) as reader:
        other = path.with_name("other")
        other.write_bytes(bytes(path.stat().st_size))
        other.replace(path)
        assert read(reader) == EXPECTED
        path.unlink()
        assert read(reader) == EXPECTED


def test_a_missing_file_is_named(store):
    """A missing layer file is refused at open."""
    path, _ = shard(store)
    path.unlink()
    with pytest.raises(MissingTensor, match=f"layer 4.*{path.name}"):
        opened(store)


def test_a_store_being_written_is_not_read_and_the_other_way_round(store):
    """A reader excludes converters until it is closed, and a converter excludes readers."""
    with opened(store), opened(store), pytest.raises(StoreBusy), writer(store):
        pass
    with writer(store), pytest.raises(StoreBusy):
        opened(store)
    opened(store).close()


def test_threads_share_a_reader(good):
    """Concurrent reads return their own bytes, and every byte is counted."""

    def one(index: int) -> bool:
        key = ExpertKey(LAYERS[index % 2], index % EXPERTS)
        into = buffer(SIZE)
        reader.read(key, Plane.BASE, Plane.D8, [into])
        return bytes(into) == record(*key, SIZE).tobytes()

    with opened(good) as reader, ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(200)))
        assert reader.bytes_read == 200 * SIZE


def test_close_closes_everything_and_reads_after_it_are_errors(good):
    """close leaves no descriptor and is idempotent; a later read raises ValueError."""
    opened_files = Path("/proc/self/fd")
    before = len(list(opened_files.iterdir())) if opened_files.exists() else 0
    reader = opened(good)
    reader.close()
    reader.close()
    assert before == (len(list(opened_files.iterdir())) if before else 0)
    with pytest.raises(ValueError, match="closed"):
        read(reader)


@pytest.mark.parametrize("key", [ExpertKey(2, 0), ExpertKey(4, EXPERTS), ExpertKey(4, -1)])
def test_a_missing_expert_raises_value_error(good, key):
    """An unknown layer or expert raises ValueError."""
    with opened(good) as reader, pytest.raises(ValueError, match="expected an expert of the store"):
        reader.read(key, Plane.BASE, Plane.BASE, [buffer(8192)])


def test_buffers_of_another_length_raise_value_error(good):
    """Buffers that are too long or too short raise ValueError."""
    with opened(good) as reader:
        for size in (4096, 12288):
            with pytest.raises(ValueError, match="8192 bytes"):
                reader.read(KEY, Plane.BASE, Plane.BASE, [buffer(size)])


def test_a_platform_without_preadv_is_refused(good, monkeypatch):
    """A platform without preadv raises UserError, not AttributeError."""
    manifest = Manifest.load(good)
    monkeypatch.delattr(os, "preadv")
    with pytest.raises(UserError, match="no preadv"):
        RecordReader.open(good, manifest)
