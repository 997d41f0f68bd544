"""Conversions in which one call of the operating system fails: a typed error or success, and no damage."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from faults import OUTAGE, Pauses
from faulty_disk import FaultyDisk, each_in_turn
from programs import ForkedPython, run_forked
from small_conversion import contents, run

import edgemoe.storage.files.source_file
from edgemoe.errors import DamagedData, DoesNotFit, EdgemoeError, ReadFailed
from edgemoe.storage.files import content, retry
from edgemoe.storage.files.atomic import PARTIAL
from edgemoe.storage.store.manifest import MANIFEST_NAME
from edgemoe.storage.store.verify import verify

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_leaves_no_trace(small_source, straight_files, tmp_path, threads):
    """One thread, or more threads than experts, give the same bytes in every file."""
    run(small_source, tmp_path / "store", threads=threads)
    assert contents(tmp_path / "store") == straight_files


CACHED = edgemoe.storage.files.source_file.DIRECT_FROM
FAULTS = {
    "EIO once": (errno.EIO, False, CACHED),
    "EIO once, past the page cache": (errno.EIO, False, 0),
    "EIO from then on": (errno.EIO, True, CACHED),
    "ENOSPC once": (errno.ENOSPC, False, CACHED),
    "EINTR once": (errno.EINTR, False, CACHED),
    "one byte": (None, False, CACHED),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_of_any_call_damages_no_file(small_source, straight_files, fast, monkeypatch, fault):
    """A failure of the Nth call gives a typed error or success, and the next run completes the store.

    Every twentieth N meets one of the faults, and the first and last call of each kind meet all of them.
    """
    number, stays, direct_from = FAULTS[fault]
    monkeypatch.setattr(retry, "PATIENCE", 0.005)
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(edgemoe.storage.files.source_file, "DIRECT_FROM", direct_from)
    # Every run reads the whole source, however long ago it was written: all have the same calls.
    monkeypatch.setattr(content, "SETTLED", 1 << 62)
    with monkeypatch.context() as patch:
        calls = FaultyDisk(patch, 0, None).calls
        run(small_source, fast / "0")
    assert len(calls) > 100
    assert {"open", "write", "fsync", "replace", "preadv", "readv"} <= set(calls)
    failed = 0
    for at in each_in_turn(calls, 20 * [*FAULTS].index(fault), 20 * len(FAULTS)):
        store = fast / str(at)
        with monkeypatch.context() as patch:
            disk = FaultyDisk(patch, at, number, stays=stays)
            try:
                run(small_source, store)
            except EdgemoeError as caught:
                failed += 1
                assert number is not None
                name = disk.calls[at - 1]
                full = number == errno.ENOSPC and name in ("write", "fsync")
                assert caught.exit_code == 3 if full else caught.exit_code in (3, 4), name
        assert len(disk.calls) >= at, "the fault was never met"
        if store.exists() and not (store / MANIFEST_NAME).exists():
            left = contents(store).items()
            whole = {k: v for k, v in left if k != "unfinished.json" and not k.endswith(PARTIAL)}
            assert whole.items() <= straight_files.items(), at
        run(small_source, store)
        assert contents(store) == straight_files, at
    assert (failed == 0) == (number is None)


@pytest.mark.parametrize("seconds", [1, 60])
def test_reads_of_the_source_survive_a_second_of_errors(
    small_source, straight_files, tmp_path, monkeypatch, seconds
):
    """EIO for a second changes no byte of the store; after 5 s it is an error with the file's name and the attempts."""
    pauses = Pauses()
    pauses.install(monkeypatch)
    monkeypatch.setattr(os, "preadv", pauses.until(seconds, errno.EIO))
    if seconds > retry.PATIENCE:
        with pytest.raises(
            ReadFailed, match=r"model-0000\d-of-00002\.safetensors, got Input/output error, \d+ times in \d"
        ):
            run(small_source, tmp_path / "store")
        assert pauses.now >= retry.PATIENCE
        return
    run(small_source, tmp_path / "store")
    assert contents(tmp_path / "store") == straight_files


def test_ctrl_c_while_a_read_of_the_source_is_tried_again(checkpoint, tmp_path):
    """Ctrl-C during the retries of a conversion's reads exits 130 without waiting for their end."""
    until = tmp_path / "until"
    until.write_text(str(time.time() + 100))
    command = ("-c", OUTAGE, until, "convert", checkpoint, tmp_path / "store")
    process = ForkedPython(*command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not until.with_suffix(".met").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert time.monotonic() - start < 20


def test_every_flipped_plane_and_file_of_a_store_is_found(small_source, fast):
    """With one flipped bit in any plane, header or file, verify reports exactly that one."""
    run(small_source, fast / "store")
    assert verify(fast / "store", lambda done, total: None).damage == ()
    for path in sorted((fast / "store").iterdir()):
        if path.name == MANIFEST_NAME:
            continue
        raw = path.read_bytes()
        for at in range(0, len(raw), max(len(raw) // 7, 1)):
            path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
            damage = verify(fast / "store", lambda done, total: None).damage
            # The spaces that pad a header may change without a change of its content.
            assert len(damage) == 1 or raw[at : at + 1] == b" ", (path.name, at)
            assert all(isinstance(found, DamagedData) and path.name in str(found) for found in damage)
        path.write_bytes(raw)


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A separate file system of 256 KiB, where this process may mount one."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(directory)]
    try:
        done = subprocess.run(mounted, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        done = False
    if not done:
        pytest.skip("no filesystem may be mounted here; the next test fills one by a limit instead")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


def test_a_real_disk_that_fills_up_in_the_middle(small_source, straight_files, small_disk):
    """A disk that fills up in a conversion gives exit 3 and no partial file; the next run with free bytes succeeds."""
    steps: list[int] = []

    def fill(count: int, total: int) -> None:
        steps.append(count)
        if len(steps) == 2:
            with suppress(OSError), (small_disk / "filler").open("wb", 0) as filler:
                while filler.write(bytes(4096)):
                    pass

    with pytest.raises(DoesNotFit, match="filled up"):
        run(small_source, small_disk / "store", progress=fill)
    assert set(contents(small_disk / "store")) == {"unfinished.json"}
    with pytest.raises(DoesNotFit, match="B free:"):
        run(small_source, small_disk / "store")
    (small_disk / "filler").unlink()
    run(small_source, small_disk / "store")
    assert contents(small_disk / "store") == straight_files


LIMITED = """
import resource, sys
from pathlib import Path
from small_conversion import run
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
from edgemoe.errors import DoesNotFit
try:
    run(Path(sys.argv[1]), Path(sys.argv[2]))
except DoesNotFit as error:
    print(error)
"""


def test_a_file_that_may_not_grow_is_a_full_disk(small_source, straight_files, tmp_path):
    """A file size limit (ulimit -f) in the middle of a layer gives exit 3, and earlier layers are kept."""
    layer = straight_files["experts-00000.safetensors"]
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support", ROOT / "tests" / "support" / "files")))
    command = ("-c", LIMITED, small_source, tmp_path / "store", len(layer) // 2)
    limited = run_forked(*command, env=os.environ | {"PYTHONPATH": path})
    assert limited.returncode == 0, limited.stderr
    assert "experts-00000" in limited.stdout
    assert set(contents(tmp_path / "store")) == {"unfinished.json"}
    run(small_source, tmp_path / "store")
    assert contents(tmp_path / "store") == straight_files


def test_a_directory_without_write_permission_is_a_user_error(small_source, tmp_path, monkeypatch):
    """Exit 2 with the path, since the user can fix the permission."""
    monkeypatch.setattr(os, "mkdir", _refuse)
    with pytest.raises(EdgemoeError, match="may write to") as caught:
        run(small_source, tmp_path / "store")
    assert caught.value.exit_code == 2


def _refuse(*args: object, **kwargs: object) -> None:
    raise PermissionError(errno.EACCES, "Permission denied", "there")
