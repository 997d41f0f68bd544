"""Chats with the demo model for hours at a pseudo-terminal, inside a memory cgroup, and watches what the process takes.

    python -m tools.reliability.soak [--minutes 120] [--vram-limit 32MB] [--cgroup-limit 600MB] [--out samples.json]

Questions, long pasted turns, answers cancelled by Ctrl-C, other levels and samplings come in random order. After every
ROUND of them one question is answered again under fixed settings; its answer must stay the same. Resident memory,
file descriptors and threads are sampled all the time. The verdict compares the medians of the second and of the last
sixth of the run. Ctrl-C ends it early. Needs root and a writable cgroup filesystem. Exit code 0: flat; 1: something
grew or changed.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import pexpect
import psutil

from edgemoe.console.sizes import format_size, parse_size
from edgemoe.errors import EdgemoeError
from tools.command_line import failed, make_parser, positive
from tools.reliability.random_chat import REFERENCE, Soak, chat_in
from tools.reliability.watch import Sample, demo_environment, flatness, memory_cgroup, sample

ROUND = 20
"""Random turns between two answers to REFERENCE."""


def run(minutes: float, vram_limit: str, cgroup_limit: int, pause: float, seed: int) -> dict[str, object]:
    """Runs a soak and returns its report. Ctrl-C ends it early.

    Raises:
        UserError: cgroups cannot be made here.
        pexpect.ExceptionPexpect: the chat ended, or shows no prompt.
    """
    samples: list[Sample] = []
    answers: Counter[str] = Counter()
    with (
        memory_cgroup(cgroup_limit) as group,
        TemporaryDirectory() as home,
        chat_in(group, home, vram_limit) as chat,
    ):
        soak, process, start = Soak(chat, seed), psutil.Process(chat.pid), time.monotonic()
        with suppress(KeyboardInterrupt):
            while (elapsed := time.monotonic() - start) < 60 * minutes:
                for _ in range(ROUND):
                    soak.turn()
                    time.sleep(pause)
                answers[soak.reference()] += 1
                samples.append(sample(round(elapsed, 1), process, group, soak.counts.total()))
                _show_progress(samples[-1], minutes)
        chat.send("/exit\r")
        chat.expect(pexpect.EOF)
    return {
        "environment": demo_environment(),
        "vram_limit": vram_limit,
        "cgroup_limit_bytes": cgroup_limit,
        "exit_code": chat.exitstatus,
        "turns": dict(soak.counts),
        "reference_answers": dict(answers),
        "samples": [asdict(each) for each in samples],
    }


def _show_progress(sample: Sample, minutes: float) -> None:
    if sys.stderr.isatty():
        left = minutes - sample.seconds / 60
        size = format_size(sample.resident_bytes)
        print(f"\r{sample.turns} turns, {size}, {left:.0f} min left ", end="", file=sys.stderr, flush=True)


def verdict(report: dict[str, object]) -> list[str]:
    """The measurements that were not flat; empty: all were."""
    wrong = flatness([Sample(**sample) for sample in report["samples"]])  # type: ignore[attr-defined]
    if len(report["reference_answers"]) != 1:  # type: ignore[arg-type]
        wrong.append(f"answers to {REFERENCE!r}: {report['reference_answers']}")
    if report["exit_code"] != 0:
        wrong.append(f"exit code {report['exit_code']}")
    return wrong


def summary(report: dict[str, object]) -> str:
    """The report in one line."""
    samples = [Sample(**sample) for sample in report["samples"]]  # type: ignore[attr-defined]
    sizes = [sample.resident_bytes for sample in samples]
    return (
        f"{samples[-1].turns} turns in {samples[-1].seconds / 60:.0f} min, resident {format_size(min(sizes))} to "
        f"{format_size(max(sizes))}, last {format_size(sizes[-1])}, "
        f"files {samples[0].files} to {samples[-1].files}, threads {samples[0].threads} to {samples[-1].threads}, "
        f"turns {report['turns']}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the soak, writes its samples and prints the verdict."""
    parser = make_parser("tools.reliability.soak", __doc__)
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--vram-limit", default="32MB")
    parser.add_argument("--cgroup-limit", default="600MB")
    parser.add_argument("--pause", type=float, default=0.2, help="seconds between two turns")
    parser.add_argument("--seed", type=positive, default=1)
    parser.add_argument("--out", type=Path, help="file for the samples, JSON")
    given = parser.parse_args(argv)
    try:
        limit = parse_size(given.cgroup_limit)
        report = run(given.minutes, given.vram_limit, limit, given.pause, given.seed)
    except EdgemoeError as error:
        return failed("tools.reliability.soak", error)
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n")
    wrong = verdict(report)
    print(summary(report), *(wrong or ["flat"]), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
