"""tools/peers/limited.py against the kernel's own accounting. Needs a machine where memory cgroups can be made."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from cgroups import ROOT, needs_cgroup

TOOL = Path(__file__).parents[3] / "tools" / "peers" / "limited.py"
MIB = 1 << 20


@pytest.fixture(scope="module")
def limited() -> ModuleType:
    spec = importlib.util.spec_from_file_location("limited", TOOL)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["limited"] = module
    spec.loader.exec_module(module)
    return module


def start(report: Path, limit: str, *command: str, **options: object) -> subprocess.Popen[str]:
    argv = [
        sys.executable,
        str(TOOL),
        "--memory",
        limit,
        "--keep-cache",
        "--json",
        str(report),
        "--",
        *command,
    ]
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, **options)  # type: ignore[call-overload]


def run(report: Path, limit: str, *command: str) -> tuple[int, str, dict[str, int]]:
    process = start(report, limit, *command)
    _, errors = process.communicate(timeout=60)
    assert not (ROOT / f"limited-{process.pid}").exists(), "the cgroup must be gone"
    return process.returncode, errors, json.loads(report.read_text() or "{}")


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", code)


@needs_cgroup
def test_peak_and_exit_code(tmp_path: Path) -> None:
    """The command's exit code comes through, and the peak is at least what it touched."""
    code, errors, used = run(tmp_path / "r", "200M", *python(f"x = b'1' * {64 * MIB}; raise SystemExit(7)"))
    assert code == used["exit_code"] == 7
    assert used["limit_bytes"] == 200 * MIB
    assert 64 * MIB <= used["peak_bytes"] <= 200 * MIB
    assert used["oom_kills"] == 0
    assert f"peak {used['peak_bytes'] / 1e9:.3f} GB" in errors


@needs_cgroup
def test_more_than_the_limit_is_killed(tmp_path: Path) -> None:
    """A command that touches more than the limit is killed, and the counters say why."""
    code, _, used = run(tmp_path / "r", "40M", *python(f"x = b'1' * {120 * MIB}"))
    assert code == 128 + signal.SIGKILL
    assert used["oom_kills"] == 1
    assert used["failcnt"] > 0


@needs_cgroup
def test_page_cache_counts(tmp_path: Path) -> None:
    """Reading a file larger than the limit, a little at a time, hits the limit but does not kill."""
    file = tmp_path / "file"
    write = f"f = open({str(file)!r}, 'wb'); [f.write(bytes({MIB})) for _ in range(96)]"
    code, _, used = run(tmp_path / "r", "40M", *python(write))
    assert code == 0
    assert used["failcnt"] > 0
    assert used["peak_bytes"] > 36 * MIB


@needs_cgroup
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_forwarded(tmp_path: Path, number: signal.Signals) -> None:
    """A signal sent to the tool reaches the command, whose answer to it is the exit code."""
    code = (
        "import signal, sys; "
        f"signal.signal({number:d}, lambda *_: sys.exit(5)); print('ready', flush=True); signal.pause()"
    )
    process = start(tmp_path / "r", "100M", *python(code))
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 5
    assert not (ROOT / f"limited-{process.pid}").exists()


@needs_cgroup
def test_what_the_command_left_running_is_killed(tmp_path: Path) -> None:
    """A background process cannot outlive the limit, and does not keep the cgroup from being removed."""
    code, _, _ = run(tmp_path / "r", "100M", "/bin/sh", "-c", f"sleep 1000 & echo $! > {tmp_path}/pid")
    assert code == 0
    status = Path("/proc", (tmp_path / "pid").read_text().strip(), "status")
    # Nobody may have reaped it yet; a zombie is dead.
    assert not status.exists() or "State:\tZ" in status.read_text()


@needs_cgroup
def test_a_limit_the_kernel_refuses(tmp_path: Path) -> None:
    """A limit that is no size exits 2, runs nothing and leaves nothing behind."""
    code, errors, used = run(tmp_path / "r", "three", "touch", str(tmp_path / "ran"))
    assert code == 2
    assert "'three'" in errors
    assert not (tmp_path / "ran").exists()
    assert used == {}


def test_where_no_cgroup_can_be_made(
    limited: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the kernel will not make a cgroup, the tool says so and exits 2. /proc refuses even root."""
    monkeypatch.setattr(limited, "find_controller", lambda mounts: limited.Controller(1, Path("/proc")))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        assert limited.main(["--memory", "1G", "--keep-cache", "--", "true"]) == 2
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert "cannot be made" in capsys.readouterr().err


def test_which_controller_is_found(limited: ModuleType, tmp_path: Path) -> None:
    """Version 1's memory controller wins where it is mounted; version 2 counts only with memory in it."""
    (tmp_path / "cgroup.controllers").write_text("cpu io memory\n")
    v1 = "cgroup /a/cpu cgroup rw,cpu 0 0\ncgroup /a/memory cgroup rw,relatime,memory 0 0\n"
    v2 = f"cgroup2 {tmp_path} cgroup2 rw 0 0\n"
    assert limited.find_controller(v2 + v1) == limited.Controller(1, Path("/a/memory"))
    assert limited.find_controller(v2) == limited.Controller(2, tmp_path)
    (tmp_path / "cgroup.controllers").write_text("cpu io\n")
    with pytest.raises(limited.LimitError):
        limited.find_controller(v2)


def test_version_2_counters(limited: ModuleType, tmp_path: Path) -> None:
    """Version 2's files are read for what they mean (values written here by hand)."""
    for name, value in {
        "memory.max": "3221225472\n",
        "memory.peak": "1000000\n",
        "memory.events": "low 0\nhigh 0\nmax 17\noom 2\noom_kill 1\noom_group_kill 0\n",
    }.items():
        (tmp_path / name).write_text(value)
    assert limited.usage(limited.Controller(2, tmp_path), tmp_path) == limited.Usage(3 << 30, 1000000, 17, 1)
    (tmp_path / "memory.peak").unlink()
    assert limited.usage(limited.Controller(2, tmp_path), tmp_path).peak_bytes is None
