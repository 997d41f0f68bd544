"""Runs a command under a hard memory limit, page cache included.

    python -m tools.peers.limited --memory 3G -- COMMAND...

The command gets its own memory cgroup (version 1 or 2, whichever the machine has). Pages of files that it reads count
against the limit as allocated memory does, so a program that maps its model and one that reads it have the same limit.
The page cache is dropped first, because pages that are charged to another cgroup would not count. At the end the peak
and the number of times that the limit was hit are printed on stderr, processes left in the cgroup are killed, and the
cgroup is removed.

The exit code is the command's own, 128 + N where signal N ended it (137: killed for memory), and 2 where no cgroup can
be made. Linux only, normally as root. Needs only the standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

UNLIMITED = 1 << 62
"""A limit of so many bytes or more means that there is no limit."""

FORWARDED = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})


class LimitError(Exception):
    """This machine or user cannot run a command under a limit."""


@dataclass(frozen=True)
class Controller:
    """The directory in which memory cgroups are made, and the names of their files."""

    version: int
    root: Path

    @property
    def limit(self) -> str:
        """The file with the limit, bytes."""
        return "memory.limit_in_bytes" if self.version == 1 else "memory.max"

    @property
    def swap(self) -> tuple[str, str]:
        """The (file, contents) that keep the cgroup's memory out of swap."""
        return ("memory.swappiness", "0") if self.version == 1 else ("memory.swap.max", "0")

    @property
    def peak(self) -> str:
        """The file with the most bytes ever charged."""
        return "memory.max_usage_in_bytes" if self.version == 1 else "memory.peak"


@dataclass(frozen=True)
class Usage:
    """A cgroup's counters.

    Args:
        limit_bytes: None: no limit.
        peak_bytes: None where the kernel keeps no peak (cgroup version 2 before Linux 5.19).
        failcnt: times that the limit was hit and memory was reclaimed.
        oom_kills: processes killed because no memory could be reclaimed.
    """

    limit_bytes: int | None
    peak_bytes: int | None
    failcnt: int
    oom_kills: int


def find_controller(mounts: str) -> Controller:
    """Finds the memory controller among the mounted filesystems.

    Args:
        mounts: the contents of /proc/mounts.

    Raises:
        LimitError: no memory controller is mounted, or cgroup v2 has none at its root.
    """
    fields = [line.split() for line in mounts.splitlines()]
    for _, target, kind, options, *_ in fields:
        if kind == "cgroup" and "memory" in options.split(","):
            return Controller(1, Path(target))
    for _, target, kind, *_ in fields:
        controllers = Path(target, "cgroup.controllers")
        if kind == "cgroup2" and controllers.exists() and "memory" in controllers.read_text().split():
            return Controller(2, Path(target))
    raise LimitError("expected a mounted memory cgroup controller, got none: mount one, or use another Linux")


def drop_page_cache() -> None:
    """Writes the dirty pages of all files, then drops every clean page, machine-wide.

    Raises:
        LimitError: this user may not drop them.
    """
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError as error:
        raise LimitError(
            f"expected to drop the page cache, got {error}: run as root, or pass --keep-cache"
        ) from error


@contextlib.contextmanager
def memory_cgroup(controller: Controller, limit: str | int | None, swap_off: bool) -> Iterator[Path]:
    """Makes a cgroup with a limit; at the end kills the processes in it and removes it.

    Args:
        controller: where to make the cgroup.
        limit: text in the kernel's form: bytes, or a number followed by K, M or G (powers of 1024); None: memory is
            counted, not limited.
        swap_off: whether the cgroup's memory stays out of swap.

    Raises:
        LimitError: this user may not make a cgroup, or the kernel refuses the limit.
    """
    group = controller.root / f"limited-{os.getpid()}"
    try:
        if controller.version == 2:
            (controller.root / "cgroup.subtree_control").write_text("+memory")
        group.mkdir()
    except OSError as error:
        raise LimitError(
            f"expected to make {group}, got {error}: run as root, where cgroups are writable"
        ) from error
    try:
        limits = [] if limit is None else [(controller.limit, str(limit))]
        for name, value in [*limits, *([controller.swap] if swap_off else [])]:
            try:
                (group / name).write_text(value)
            except OSError as error:
                raise LimitError(
                    f"expected {value!r} to be legal in {name}, got {error}: give another --memory"
                ) from error
        yield group
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    """Kills the processes in a cgroup, waits up to 10 s until they have left it, and removes it."""
    deadline = time.monotonic() + 10
    while True:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            return group.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def usage(controller: Controller, group: Path) -> Usage:
    """Reads a cgroup's counters."""

    def events(name: str) -> dict[str, int]:
        pairs = (line.split() for line in (group / name).read_text().splitlines())
        return {key: int(value) for key, value in pairs}

    peak = group / controller.peak
    limit = (group / controller.limit).read_text().strip()
    # Version 1 writes the largest number of pages where there is no limit.
    unlimited = limit == "max" or int(limit) >= UNLIMITED
    if controller.version == 1:
        failed, kills = int((group / "memory.failcnt").read_text()), events("memory.oom_control")["oom_kill"]
    else:
        counts = events("memory.events")
        failed, kills = counts["max"], counts["oom_kill"]
    return Usage(
        limit_bytes=None if unlimited else int(limit),
        peak_bytes=int(peak.read_text()) if peak.exists() else None,
        failcnt=failed,
        oom_kills=kills,
    )


def run_in(group: Path, command: Sequence[str]) -> int:
    """Runs a command in a cgroup, forwards signals to it, and waits for its end.

    The caller must have blocked FORWARDED and SIGCHLD.

    Returns:
        the command's exit code, 128 + N where signal N ended it.
    """
    enter = 'echo $$ > "$0" && exec "$@"'
    argv = ["/bin/sh", "-c", enter, str(group / "cgroup.procs"), *command]
    pid = os.posix_spawn(argv[0], argv, os.environ, setsigmask=())
    while True:
        got = signal.sigwaitinfo(FORWARDED | {signal.SIGCHLD})
        if got.si_signo == signal.SIGCHLD:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
        elif got.si_code <= 0:
            # A positive code is the terminal's, which has sent the signal to the command already.
            os.kill(pid, got.si_signo)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line; the words after the options, or after `--`, are the command."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.peers.limited",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--memory", required=True, metavar="SIZE", help="bytes, or 800M, 3G (1024s)")
    parser.add_argument("--swap-off", action="store_true", help="keep the command's memory out of swap")
    parser.add_argument("--keep-cache", action="store_true", help="do not drop the page cache first")
    parser.add_argument("--json", metavar="FILE", type=Path, help="file for the counters")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND...")
    options = parser.parse_args(argv)
    options.command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not options.command:
        parser.error("expected a command after --, got none")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    options = parse(argv)
    with contextlib.ExitStack() as stack:
        try:
            # Opened before the command runs: an unwritable file must not cost a long measurement.
            report = stack.enter_context(options.json.open("w")) if options.json else None
            controller = find_controller(Path("/proc/mounts").read_text())
            if not options.keep_cache:
                drop_page_cache()
            # Blocked from before the cgroup exists until it is removed, so that no signal can leave it there.
            signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED | {signal.SIGCHLD})
            group = stack.enter_context(memory_cgroup(controller, options.memory, options.swap_off))
        except (LimitError, OSError) as error:
            print(f"limited: {error}", file=sys.stderr)
            return 2
        code = run_in(group, options.command)
        used = usage(controller, group)
        limit = "no limit" if used.limit_bytes is None else f"{used.limit_bytes / 1e9:.3f} GB"
        peak = "unknown" if used.peak_bytes is None else f"{used.peak_bytes / 1e9:.3f} GB"
        print(
            f"limited: peak {peak} of {limit}, limit hit "
            f"{used.failcnt} times, {used.oom_kills} processes killed for memory, exit code {code}",
            file=sys.stderr,
        )
        if report:
            json.dump(asdict(used) | {"exit_code": code}, report)
        return code


if __name__ == "__main__":
    sys.exit(main())
