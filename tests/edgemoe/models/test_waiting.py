"""One conversion of a model at a time: a second process waits, uses the store, or goes on after the first's end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faults import HALTING
from programs import Program, programs
from small_conversion import contents

from edgemoe.errors import StoreBusy
from edgemoe.models.conversion import waiting
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.models.conversion.waiting import convert_once
from edgemoe.storage.files.lock import StoreLock


@pytest.fixture
def start(checkpoint, tmp_path) -> Iterator[Callable[[Path], Program]]:
    """Starts `edgemoe plan` on the checkpoint, which converts it, with a cache of the test's own."""
    with programs(XDG_CACHE_HOME=str(tmp_path / "cache")) as run:
        yield lambda gate: run("-c", HALTING, gate, "pull", checkpoint, "--plain-codes")


@pytest.fixture
def halted(start, tmp_path) -> tuple[Program, Path]:
    """A conversion that halts in its second half, and the file whose removal lets it go on."""
    gate = tmp_path / "gate"
    gate.touch()
    process, deadline = start(gate), time.monotonic() + 60
    while not (tmp_path / "gate.halted").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process, gate


def the_store(tmp_path: Path) -> Path:
    (store,) = (tmp_path / "cache" / "edgemoe" / "stores").iterdir()
    return store


@pytest.mark.e2e
def test_a_second_process_waits_and_uses_the_store(start, halted, tmp_path):
    """It names the process and the store, says that it still waits, and converts nothing; Ctrl-C ends only a wait."""
    first, gate = halted
    second, third = start(tmp_path / "no gate"), start(tmp_path / "no gate")
    store = the_store(tmp_path)
    for waiting_one in (second, third):
        line = waiting_one.stderr.readline()
        assert f"tiny is being converted by process {first.pid} into {store}: waiting" in line
    assert f"still waiting for process {first.pid} to convert tiny" in second.stderr.readline()
    third.send_signal(signal.SIGINT)
    interrupted = time.monotonic()
    assert third.wait(timeout=60) == 130
    assert time.monotonic() - interrupted < 20
    assert first.poll() is second.poll() is None
    gate.unlink()
    out, err = first.communicate(timeout=60)
    assert first.returncode == 0, err
    again, err = second.communicate(timeout=60)
    assert second.returncode == 0, err
    assert again == out
    assert "converting" not in err
    assert all(line.startswith("still waiting") for line in err.splitlines())


@pytest.mark.e2e
def test_a_second_process_goes_on_after_the_first_is_killed(start, halted, checkpoint, tmp_path):
    """After SIGKILL it resumes with the next layer, and the store has the bytes of an undisturbed conversion."""
    first, _ = halted
    second = start(tmp_path / "no gate")
    assert f"by process {first.pid} into" in second.stderr.readline()
    store = the_store(tmp_path)
    whole = {path.name: path.stat().st_ino for path in store.glob("experts-*.safetensors")}
    assert len(whole) == 1
    first.kill()
    _, err = second.communicate(timeout=60)
    assert second.returncode == 0, err
    assert f"process {first.pid} ended before the store was finished: the conversion is resumed here" in err
    convert_checkpoint(checkpoint, tmp_path / "straight", max_level=None, layout="auto", dense_bits=8)
    assert contents(store) == contents(tmp_path / "straight")
    assert {name: (store / name).stat().st_ino for name in whole} == whole


@pytest.fixture
def soon(monkeypatch) -> None:
    monkeypatch.setattr(waiting, "POLL_EVERY", 0.01)


def test_a_free_model_is_converted_at_once(tmp_path, capsys):
    """Without another process the conversion runs, without a line; a finished store needs none."""
    calls: list[str] = []
    convert_once("tiny", tmp_path / "store", lambda: not calls, lambda: calls.append("converted"))
    convert_once("tiny", tmp_path / "store", lambda: not calls, lambda: calls.append("converted"))
    assert calls == ["converted"]
    assert capsys.readouterr().err == ""


def test_a_download_is_waited_for_too(soon, tmp_path, capsys):
    """A process that has locked only the download is named by its id, and the store that it makes is used."""
    store, download = tmp_path / "store", tmp_path / "download"
    download.mkdir()
    finished = threading.Event()
    lock = StoreLock(download, exclusive=True)

    def finish() -> None:
        store.mkdir()
        finished.set()  # the lock of the download stays: the rest of a kept checkpoint still arrives

    timer = threading.Timer(0.2, finish)
    timer.start()
    convert_once("tiny", store, lambda: not finished.is_set(), pytest.fail, download=download)
    timer.join()
    lock.close()
    assert f"tiny is being converted by process {os.getpid()} into {store}" in capsys.readouterr().err


def test_a_reader_of_the_finished_store_is_not_waited_for(soon, tmp_path):
    """The first process keeps its store open: a second one uses it at the same time."""
    with StoreLock(tmp_path, exclusive=False):
        convert_once("tiny", tmp_path, lambda: False, pytest.fail)


def test_a_conversion_that_begins_meanwhile_is_waited_for(soon, tmp_path, capsys):
    """A lock that is met only by the conversion itself leads to another wait, and then to the conversion."""
    locks: list[StoreLock] = []

    def convert() -> None:
        if not locks:
            locks.append(StoreLock(tmp_path, exclusive=True))
            threading.Timer(0.2, locks[0].close).start()
        StoreLock(tmp_path, exclusive=True).close()

    convert_once("tiny", tmp_path, lambda: True, convert)
    assert "ended before the store was finished" in capsys.readouterr().err


def test_an_error_of_the_conversion_is_raised(tmp_path):
    """A failure that is no lock ends the call."""

    def convert() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        convert_once("tiny", tmp_path, lambda: True, convert)


def test_an_explicit_conversion_names_the_process(tmp_path, checkpoint):
    """`edgemoe convert` onto a directory that is being written is refused with the process's id."""
    with (
        StoreLock(tmp_path, exclusive=True),
        pytest.raises(StoreBusy, match=rf"another process \(id {os.getpid()}\)"),
    ):
        convert_checkpoint(checkpoint, tmp_path, max_level=8, layout="auto", dense_bits=16)
