"""tools/peers/run.py: limits that are in force, and the state after a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cgroups import controller, has_cgroup, needs_cgroup, write_files

from tools.checkout import ROOT, child_environment
from tools.peers import run
from tools.peers.limited import Controller, LimitError, Usage
from tools.peers.run import Outcome, prove_enforced, require_in_force, run_child

MIB = 1 << 20

ENDLESS = """
import sys
from pathlib import Path
from tools.peers.run import interrupt_on_signals, run_child
from tools.peers.limited import find_controller

interrupt_on_signals()
controller = find_controller(Path("/proc/mounts").read_text())
try:
    run_child(controller, 1 << 28, sys.argv[1:], {"threads": 1}, keep_cache=True)
except KeyboardInterrupt:
    sys.exit(130)
"""


@needs_cgroup
@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_the_child_and_removes_the_cgroup(tmp_path: Path, number: signal.Signals) -> None:
    """A signal during a run ends the child and the child's own processes, and the cgroup is removed."""
    child = ["/bin/sh", "-c", "sleep 1000 & echo $$ $! >&2; echo $$ $! > $0; wait", str(tmp_path / "pids")]
    os.mkfifo(tmp_path / "pids")
    process = subprocess.Popen([sys.executable, "-c", ENDLESS, *child], env=child_environment())
    pids = (tmp_path / "pids").read_text().split()
    process.send_signal(number)
    assert process.wait(60) == 130
    assert not has_cgroup(process.pid)
    assert len(pids) == 2
    assert not any(running(pid) for pid in pids)


def running(pid: str) -> bool:
    """Whether a process runs; an unreaped zombie does not."""
    status = Path("/proc", pid, "status")
    return status.exists() and "State:\tZ" not in status.read_text()


@needs_cgroup
def test_limit_without_effect_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """prove_enforced passes where the kernel kills, and raises where a process survives above its limit."""
    prove_enforced(controller())
    survived = Outcome({}, None, Usage(None, 0, 0, 0))
    monkeypatch.setattr(run, "run_child", lambda *_, **__: survived)
    with pytest.raises(LimitError, match="no effect"):
        prove_enforced(controller())


@needs_cgroup
def test_unlimited_run_has_a_peak() -> None:
    """Without a limit the outcome has no limit and the kernel's peak."""
    command = [sys.executable, "-S", "-c", f"x = b'1' * {80 * MIB}; print('{{}}')"]
    used = run_child(controller(), None, command, {"threads": 1}, keep_cache=True).usage
    assert used.limit_bytes is None
    assert used.peak_bytes is not None
    assert used.peak_bytes >= 80 * MIB


def test_child_environment_keeps_the_inherited_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The repository's root stands before an inherited PYTHONPATH; further variables are set."""
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    environment = child_environment(OMP_NUM_THREADS="2")
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "elsewhere"]
    assert environment["OMP_NUM_THREADS"] == "2"
    monkeypatch.delenv("PYTHONPATH")
    assert child_environment()["PYTHONPATH"] == str(ROOT)


@pytest.mark.parametrize(
    ("pid", "limit", "message"),
    [(7, 3 << 30, None), (8, 3 << 30, "process 8"), (7, 2 << 30, "3221225472")],
)
def test_limit_is_verified_by_the_kernels_files(
    tmp_path: Path, pid: int, limit: int, message: str | None
) -> None:
    """A process outside the cgroup and a limit of another size are refused (files written by hand)."""
    files = {
        "cgroup__procs": "7\n12\n",
        "memory__max": "3221225472\n",
        "memory__events": "max 0\noom_kill 0\n",
    }
    write_files(tmp_path, **files)
    if message is None:
        require_in_force(Controller(2, tmp_path), tmp_path, pid, limit)
    else:
        with pytest.raises(LimitError, match=message):
            require_in_force(Controller(2, tmp_path), tmp_path, pid, limit)
