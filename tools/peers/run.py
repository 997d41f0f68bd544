"""Runs one program for one answer, in its own process, inside a memory cgroup whose limit has been verified.

The program is a child process with a small protocol: it reads one JSON object, the request, from stdin and prints one,
the answer, as the last line of stdout.

    request: model, prompts (token ids of each; all decode together), new_tokens, warm_up (prompts to answer first,
             untimed, for warm_up_s seconds), threads, capped, repacking (llama.cpp's, of weights), popularity (count
             instead of measuring), state (llama.cpp's file after the prompt, which saves_state says to write, or else
             to read in place of the prompt), and fields of a single program
    answer:  load_s, token_times (seconds from the start to the last prompt's first token, and to the end of each step
             that decodes a token of every prompt), tokens (the last prompt's, ids), versions, and fields of a single
             program; with popularity: counts, [layer][expert] -> times chosen

The child starts to run once it is inside the cgroup and the kernel reports the limit as set. Page cache counts against
the limit, so a program that maps its model has no more memory than one that reads it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.checkout import child_environment
from tools.peers.limited import Controller, LimitError, Usage, drop_page_cache, memory_cgroup, usage

ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
"""Signals that end a comparison, and must not leave a cgroup."""

PROOF_BYTES = 64 << 20
"""Limit that is exceeded on purpose before anything is measured."""

ENTER = 'read go && exec "$@"'
"""Shell script of a child: waits for a line on stdin, so that the program starts with its limit in force."""


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Args:
        answer: the child's answer; empty if it failed.
        failure: why there is no answer; None after a success.
        usage: the cgroup's counters, bytes.
        crashed: a signal ended the child, and not for memory.
    """

    answer: dict[str, Any]
    failure: str | None
    usage: Usage
    crashed: bool = False


def interrupt_on_signals() -> None:
    """Makes every signal of ENDING raise KeyboardInterrupt in the main thread, as Ctrl-C does."""
    for number in ENDING:
        signal.signal(number, signal.default_int_handler)


def run_child(
    controller: Controller,
    limit: int | None,
    command: Sequence[str],
    request: Mapping[str, Any],
    *,
    keep_cache: bool = False,
) -> Outcome:
    """Runs a child to its end; a child that fails or is killed for memory gives an outcome, not an error.

    Args:
        controller: where cgroups are made.
        limit: bytes of the whole process and of the page cache that it fills; None: memory is counted, not limited.
        command: starts the child, which finds the package `tools` in any current directory.
        request: the child's request; `threads` also becomes OMP_NUM_THREADS.
        keep_cache: leave the page cache as it is, for warm runs.

    Raises:
        LimitError: the limit cannot be set, or the page cache cannot be dropped.
    """
    if not keep_cache:
        drop_page_cache()
    environment, pipe = child_environment(OMP_NUM_THREADS=str(request["threads"])), subprocess.PIPE
    argv = ["/bin/sh", "-c", ENTER, "sh", *command]
    with tempfile.TemporaryFile() as errors, cgroup_kept_from_signals(controller, limit) as group:
        with subprocess.Popen(
            argv, stdin=pipe, stdout=pipe, stderr=errors, env=environment, text=True
        ) as child:
            try:
                (group / "cgroup.procs").write_text(str(child.pid))
                require_in_force(controller, group, child.pid, limit)
                printed, _ = child.communicate("go\n" + json.dumps(request))
            except BaseException:
                child.kill()
                raise
        used = usage(controller, group)
        errors.seek(0)
        return _outcome(child.returncode, printed, errors.read().decode(errors="replace"), used)


def _outcome(code: int, printed: str, errors: str, usage: Usage) -> Outcome:
    if code == 0:
        try:
            answer = json.loads(printed.splitlines()[-1])
        except (IndexError, ValueError):
            return Outcome({}, f"no answer on stdout: {printed[-200:]!r}", usage)
        return Outcome(answer, None, usage)
    why = "killed for memory" if usage.oom_kills else f"exit code {code}"
    last = (errors.strip().splitlines() or [""])[-1]
    return Outcome({}, f"{why}: {last[-500:]}", usage, crashed=code < 0 and not usage.oom_kills)


@contextmanager
def cgroup_kept_from_signals(controller: Controller, limit: int | None) -> Iterator[Path]:
    """A memory_cgroup without swap; signals of ENDING are blocked while it is made and while it is removed."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        with memory_cgroup(controller, limit, swap_off=True) as group:
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                yield group
            finally:
                signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def require_in_force(controller: Controller, group: Path, pid: int, limit: int | None) -> None:
    """Verifies by the kernel's files that a process is inside a cgroup with the limit.

    Raises:
        LimitError: the process is not inside, or the limit differs by a page or more.
    """
    inside = (group / "cgroup.procs").read_text().split()
    if str(pid) not in inside:
        raise LimitError(
            f"expected process {pid} in {group}, got {inside or 'none'}: run where cgroups are writable"
        )
    found = usage(controller, group).limit_bytes
    page = os.sysconf("SC_PAGE_SIZE")
    if limit is not None and (found is None or not limit - page < found <= limit):
        raise LimitError(
            f"expected a limit of {limit} bytes in {group}, got {found}: run where cgroups are writable"
        )


def prove_enforced(controller: Controller) -> None:
    """Lets a process take twice its limit, and checks that the kernel kills it.

    Raises:
        LimitError: the process survives: limits have no effect here.
    """
    greedy = [sys.executable, "-S", "-c", f"x = b'1' * {2 * PROOF_BYTES}; print('{{}}')"]
    outcome = run_child(controller, PROOF_BYTES, greedy, {"threads": 1}, keep_cache=True)
    if not outcome.usage.oom_kills:
        raise LimitError(
            f"expected a process to be killed at {PROOF_BYTES} bytes, got {2 * PROOF_BYTES} (limits have no effect "
            "here): run on a machine whose kernel enforces memory cgroups"
        )
