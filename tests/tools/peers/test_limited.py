"""tools/peers/limited.py: limits and counters as the kernel accounts them, on machines with writable cgroups."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cgroups import CGROUPS, needs_cgroup, write_files

from tools.checkout import child_environment
from tools.peers import limited

MIB = 1 << 20


def start(report: Path, limit: str, *command: str) -> subprocess.Popen[str]:
    options = ["--memory", limit, "--keep-cache", "--json", str(report)]
    argv = [sys.executable, "-m", "tools.peers.limited", *options, "--", *command]
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, env=child_environment())


def run(report: Path, limit: str, *command: str) -> tuple[int, str, dict[str, int]]:
    process = start(report, limit, *command)
    _, errors = process.communicate(timeout=60)
    assert not (CGROUPS / f"limited-{process.pid}").exists(), "the cgroup must be removed"
    return process.returncode, errors, json.loads(report.read_text() or "{}")


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", code)


@needs_cgroup
def test_command_has_its_exit_code_and_peak(tmp_path: Path) -> None:
    """The tool exits with the command's code; the peak is at least the bytes that the command wrote."""
    code, errors, used = run(tmp_path / "r", "200M", *python(f"x = b'1' * {64 * MIB}; raise SystemExit(7)"))
    assert code == used["exit_code"] == 7
    assert used["limit_bytes"] == 200 * MIB
    assert 64 * MIB <= used["peak_bytes"] <= 200 * MIB
    assert used["oom_kills"] == 0
    assert f"peak {used['peak_bytes'] / 1e9:.3f} GB" in errors


@needs_cgroup
def test_command_above_the_limit_is_killed(tmp_path: Path) -> None:
    """A command that writes more bytes than the limit is killed, and the counters say so."""
    code, _, used = run(tmp_path / "r", "40M", *python(f"x = b'1' * {120 * MIB}"))
    assert code == 128 + signal.SIGKILL
    assert used["oom_kills"] == 1
    assert used["failcnt"] > 0


@needs_cgroup
def test_page_cache_counts(tmp_path: Path) -> None:
    """Writing a file larger than the limit hits the limit and does not kill."""
    file = tmp_path / "file"
    write = f"f = open({str(file)!r}, 'wb'); [f.write(bytes({MIB})) for _ in range(96)]"
    code, _, used = run(tmp_path / "r", "40M", *python(write))
    assert code == 0
    assert used["failcnt"] > 0
    assert used["peak_bytes"] > 36 * MIB


@needs_cgroup
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_forwarded(tmp_path: Path, number: signal.Signals) -> None:
    """A signal to the tool reaches the command, which chooses the exit code."""
    code = (
        # Not signal.pause(), which waits for ever where the signal comes directly before it.
        f"import signal, sys, time; signal.signal({number:d}, lambda *_: sys.exit(5)); print('ready', flush=True)\n"
        "while True: time.sleep(0.05)"
    )
    process = start(tmp_path / "r", "100M", *python(code))
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 5
    assert not (CGROUPS / f"limited-{process.pid}").exists()


@needs_cgroup
def test_background_process_is_killed(tmp_path: Path) -> None:
    """A background process of the command is killed, so that the cgroup can be removed."""
    code, _, _ = run(tmp_path / "r", "100M", "/bin/sh", "-c", f"sleep 1000 & echo $! > {tmp_path}/pid")
    assert code == 0
    status = Path("/proc", (tmp_path / "pid").read_text().strip(), "status")
    # A zombie that is not reaped yet is dead.
    assert not status.exists() or "State:\tZ" in status.read_text()


@needs_cgroup
def test_illegal_limit_is_refused(tmp_path: Path) -> None:
    """A limit that is no size exits 2; no command runs and no cgroup remains."""
    code, errors, used = run(tmp_path / "r", "three", "touch", str(tmp_path / "ran"))
    assert code == 2
    assert "'three'" in errors
    assert not (tmp_path / "ran").exists()
    assert used == {}


def test_unwritable_cgroups_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no cgroup can be made the tool exits 2. /proc refuses even root."""
    monkeypatch.setattr(limited, "find_controller", lambda mounts: limited.Controller(1, Path("/proc")))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        assert limited.main(["--memory", "1G", "--keep-cache", "--", "true"]) == 2
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert "expected to make /proc/limited-" in capsys.readouterr().err


def test_controller_is_found_in_the_mounts(tmp_path: Path) -> None:
    """Version 1's memory controller comes first; version 2 counts only with memory among its controllers."""
    (tmp_path / "cgroup.controllers").write_text("cpu io memory\n")
    v1 = "cgroup /a/cpu cgroup rw,cpu 0 0\ncgroup /a/memory cgroup rw,relatime,memory 0 0\n"
    v2 = f"cgroup2 {tmp_path} cgroup2 rw 0 0\n"
    assert limited.find_controller(v2 + v1) == limited.Controller(1, Path("/a/memory"))
    assert limited.find_controller(v2) == limited.Controller(2, tmp_path)
    (tmp_path / "cgroup.controllers").write_text("cpu io\n")
    with pytest.raises(limited.LimitError):
        limited.find_controller(v2)


def test_version_2_counters_are_read(tmp_path: Path) -> None:
    """The files of version 2 give the counters (values written by hand)."""
    events = "low 0\nhigh 0\nmax 17\noom 2\noom_kill 1\noom_group_kill 0\n"
    write_files(tmp_path, memory__max="3221225472\n", memory__peak="1000000\n", memory__events=events)
    assert limited.usage(limited.Controller(2, tmp_path), tmp_path) == limited.Usage(3 << 30, 1000000, 17, 1)
    (tmp_path / "memory.peak").unlink()
    assert limited.usage(limited.Controller(2, tmp_path), tmp_path).peak_bytes is None
