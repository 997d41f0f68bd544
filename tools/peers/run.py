"""One answer of one program, in a process of its own, inside a memory cgroup whose limit has been checked.

The program is a child that speaks a small protocol: it reads one JSON object from stdin, the request, and writes one
as the last line of stdout, the answer.

    request: model, prompt (token ids), new_tokens, warm_up (prompts to answer before, untimed, for warm_up_s
             seconds), threads, capped, popularity (count instead of measuring), and what only one program understands
    answer:  load_s, token_times (seconds since the prompt was handed over, one a token), tokens (ids), versions,
             and what only one program has; with popularity: counts, [layer][expert] -> times chosen

The child waits until it is inside the cgroup, and until the kernel has been asked whether the limit is in force.
Page cache counts, so a program that maps its model has no more memory than one that reads it.
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

from tools.peers.limited import Controller, LimitError, Usage, drop_page_cache, memory_cgroup, usage

ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
"""Signals that end a comparison, and must not leave a cgroup behind."""

PROOF_BYTES = 64 << 20
"""Limit that is broken on purpose before anything is measured."""

ENTER = 'read go && exec "$@"'
"""What a child's shell does: waits for a line, so that the program starts with its limit in force."""


@dataclass(frozen=True)
class Outcome:
    """What a run gave.

    Args:
        answer: the child's; empty if it failed.
        failure: why there is no answer; None: there is one.
        used: by the kernel's counters. Bytes.
    """

    answer: dict[str, Any]
    failure: str | None
    used: Usage


def hear_endings() -> None:
    """Makes every ending signal a KeyboardInterrupt, in the main thread, as Ctrl-C is."""
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
    """Runs a child to its end. A child that fails or is killed for memory is an outcome, not an error.

    Args:
        controller: where cgroups are made.
        limit: bytes of its whole process and of the page cache it causes; None: counted, not limited.
        command: how the child is started.
        request: for it; `threads` also becomes OMP_NUM_THREADS.
        keep_cache: leave the page cache as it is, for runs that are to be warm.

    Raises:
        LimitError: the limit cannot be put in force, or the page cache cannot be dropped.
    """
    if not keep_cache:
        drop_page_cache()
    environment = os.environ | {"OMP_NUM_THREADS": str(request["threads"])}
    pipe = subprocess.PIPE
    with tempfile.TemporaryFile() as errors, held_cgroup(controller, limit) as group:
        child = subprocess.Popen(
            ["/bin/sh", "-c", ENTER, "sh", *command],
            stdin=pipe,
            stdout=pipe,
            stderr=errors,
            env=environment,
            text=True,
        )
        with child:
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


def _outcome(code: int, printed: str, errors: str, used: Usage) -> Outcome:
    if code == 0:
        try:
            answer = json.loads(printed.splitlines()[-1])
        except (IndexError, ValueError):
            return Outcome({}, f"no answer in what it printed: {printed[-200:]!r}", used)
        return Outcome(answer, None, used)
    why = "killed for memory" if used.oom_kills else f"exit code {code}"
    last = (errors.strip().splitlines() or [""])[-1]
    return Outcome({}, f"{why}: {last[-500:]}", used)


@contextmanager
def held_cgroup(controller: Controller, limit: int | None) -> Iterator[Path]:
    """memory_cgroup without swap, which no ending signal can leave behind: they wait until it is known or gone."""
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
    """Asks the kernel whether a process is inside a cgroup and what the limit there is.

    Raises:
        LimitError: not inside, or another limit than was asked, beyond rounding to pages.
    """
    inside = (group / "cgroup.procs").read_text().split()
    if str(pid) not in inside:
        raise LimitError(f"Process {pid} was to be limited, and {group} holds {inside or 'none'}.")
    found = usage(controller, group).limit_bytes
    page = os.sysconf("SC_PAGE_SIZE")
    if limit is not None and (found is None or not limit - page < found <= limit):
        raise LimitError(f"A limit of {limit} bytes was asked, and {group} says {found}.")


def prove_enforced(controller: Controller) -> None:
    """Lets a process take twice what it may, and sees the kernel kill it.

    Raises:
        LimitError: it lived: limits have no effect here.
    """
    greedy = [sys.executable, "-S", "-c", f"x = b'1' * {2 * PROOF_BYTES}; print('{{}}')"]
    outcome = run_child(controller, PROOF_BYTES, greedy, {"threads": 1}, keep_cache=True)
    if not outcome.used.oom_kills:
        raise LimitError(
            f"A process took {2 * PROOF_BYTES} bytes under a limit of {PROOF_BYTES}: limits have no effect here."
        )
