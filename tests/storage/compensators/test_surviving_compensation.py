"""Runs that are killed, interrupted, or meet a failing call: the next one ends with the same bytes."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from faults import HALTING
from faulty_disk import FaultyDisk, each_in_turn
from programs import ForkedPython, random_kills, run_forked
from small_compensation import add, tree
from small_conversion import run as convert_small
from small_store import flip

from edgemoe.errors import DoesNotFit, EdgemoeError
from edgemoe.storage.compensators.index import FOLDER
from edgemoe.storage.files import retry
from edgemoe.storage.files.atomic import PARTIAL
from edgemoe.storage.store.manifest import MANIFEST_NAME, Manifest
from edgemoe.storage.store.verify import verify

pytestmark = pytest.mark.e2e


@pytest.fixture
def plain(small_source, fast) -> Path:
    """A store without compensators. Read-only."""
    convert_small(small_source, fast / "plain")
    return fast / "plain"


@pytest.fixture
def straight(small_source, plain, fast) -> dict[str, bytes]:
    """Path -> bytes of the store's files after an undisturbed run."""
    shutil.copytree(plain, fast / "straight")
    add(small_source, fast / "straight")
    return tree(fast / "straight")


class StoppedError(Exception):
    """Raised by a test in place of a kill."""


@pytest.mark.parametrize("threads", [2, pytest.param(None, marks=pytest.mark.folders)])
def test_the_number_of_threads_leaves_no_trace(small_source, plain, straight, fast, threads):
    store = Path(shutil.copytree(plain, fast / "store"))
    add(small_source, store, threads=threads)
    assert tree(store) == straight


def test_a_stopped_run_keeps_whole_layers(small_source, plain, straight, fast):
    """Stopped at any step, the store is the one of before; the next run computes the missing layers alone."""
    steps: list[int] = []
    store = Path(shutil.copytree(plain, fast / "counted"))
    add(small_source, store, progress=lambda done, total: steps.append(done))
    before = tree(plain)
    for stop in steps:
        store = Path(shutil.copytree(plain, fast / f"store{stop}"))

        def halt(count: int, total: int, stop: int = stop) -> None:
            if count == stop:
                raise StoppedError

        with pytest.raises(StoppedError):
            add(small_source, store, progress=halt)
        left = tree(store)
        assert before.items() <= left.items()
        assert {k: v for k, v in left.items() if k.startswith(FOLDER)}.items() <= straight.items()
        resumed: list[int] = []
        add(small_source, store, progress=lambda done, total, seen=resumed: seen.append(done))
        assert tree(store) == straight
        whole = sum(name.startswith(FOLDER) for name in left)
        assert len(resumed) == len(steps) - whole * (len(steps) // 2 - 1)


@pytest.mark.parametrize("damage", ["flip", "cut", "other", "partial"])
def test_a_damaged_file_of_a_stopped_run_is_written_again(small_source, plain, straight, fast, damage):
    """A changed bit of a factor, a cut file, a file of other ranks and a partial file."""
    store = Path(shutil.copytree(plain, fast / "store"))

    def halt(count: int, total: int) -> None:
        if count == total - 1:
            raise StoppedError

    with pytest.raises(StoppedError):
        add(small_source, store, progress=halt)
    (path,) = (store / FOLDER).iterdir()
    if damage == "flip":
        flip(path, 5000)
    elif damage == "cut":
        os.truncate(path, 5000)
    elif damage == "other":
        path.write_bytes(path.read_bytes().replace(b'"ranks":"', b'"ranks":"1'))
    else:
        path.with_name(path.name + PARTIAL).write_bytes(b"part")
    add(small_source, store)
    assert tree(store) == straight


FAULTS = {
    "EIO from then on": (errno.EIO, True),
    "ENOSPC once": (errno.ENOSPC, False),
    "one byte": (None, False),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_of_any_call_damages_no_file(small_source, plain, straight, fast, monkeypatch, fault):
    """A failure of the Nth call gives a typed error or success; the store is the one of before, or has all
    compensators; the next run completes it.

    Every fortieth N meets one of the faults, and the first and last call of each kind meet all of them.
    """
    number, stays = FAULTS[fault]
    before = tree(plain)
    manifests = (before.pop(MANIFEST_NAME), straight[MANIFEST_NAME])
    monkeypatch.setattr(retry, "PATIENCE", 0.005)
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.001)
    store = Path(shutil.copytree(plain, fast / "0"))
    with monkeypatch.context() as patch:
        calls = FaultyDisk(patch, 0, None).calls
        add(small_source, store)
    assert {"open", "write", "fsync", "replace", "preadv", "mkdir"} <= set(calls)
    failed = 0
    for at in each_in_turn(calls, 40 * [*FAULTS].index(fault), 40 * len(FAULTS)):
        store = Path(shutil.copytree(plain, fast / str(at)))
        with monkeypatch.context() as patch:
            disk = FaultyDisk(patch, at, number, stays=stays)
            try:
                add(small_source, store)
            except EdgemoeError as caught:
                failed += 1
                name = disk.calls[at - 1]
                full = number == errno.ENOSPC and name in ("write", "fsync")
                assert caught.exit_code == 3 if full else caught.exit_code in (3, 4), name
        assert len(disk.calls) >= at, "the fault was never met"
        left = tree(store)
        assert left[MANIFEST_NAME] in manifests
        assert (left if left[MANIFEST_NAME] == manifests[0] else straight).items() <= left.items()
        assert before.items() <= left.items()
        add(small_source, store)
        assert tree(store) == straight, at
        shutil.rmtree(store)
    assert (failed == 0) == (number is None)


def test_a_disk_without_space_is_refused_before_any_work(small_source, plain, free_disk, fast):
    """Exit 3 with the bytes that are missing, and no file."""
    store = Path(shutil.copytree(plain, fast / "store"))
    free_disk(5000)
    steps: list[int] = []
    with pytest.raises(DoesNotFit, match="5 KB free") as caught:
        add(small_source, store, progress=lambda done, total: steps.append(done))
    assert caught.value.minimum == 2 * 3 * 4096
    assert steps == []
    assert list((store / FOLDER).iterdir()) == []


def test_kills_at_random_moments(small_source, fast):
    """A run that is killed at any moment resumes to the bytes of an uninterrupted one."""
    states = random_kills(small_source, fast, 10, "--job", "compensate")
    assert states >= 3, "kills fell into too few moments"


def test_ctrl_c_ends_a_run_at_once(small_source, plain, straight, fast):
    """Exit 130, with the store as it was; the command again completes it."""
    store = Path(shutil.copytree(plain, fast / "store"))
    gate = fast / "gate"
    gate.touch()
    command = ("compensate", store, "--reference", small_source, "--rank", 4)
    silent = subprocess.DEVNULL
    process = ForkedPython("-c", HALTING, gate, *command, stdout=silent, stderr=silent)
    deadline = time.monotonic() + 120
    while not gate.with_suffix(".halted").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    second = run_forked("-m", "edgemoe", *command)
    assert second.returncode == 2
    assert (
        f"{FOLDER} free for writing, got another process (id {process.pid}) that writes it" in second.stderr
    )
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert Manifest.load(store).compensators is None
    assert verify(store, lambda done, total: None).damage == ()
    add(small_source, store)
    assert tree(store) == straight
