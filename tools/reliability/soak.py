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
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

import pexpect
import psutil

from edgemoe.bench.environment import environment
from edgemoe.console.sizes import format_size, parse_size
from edgemoe.errors import EdgemoeError, UserError
from edgemoe.models.demo import DEMO
from edgemoe.models.resolve import resolve_store
from edgemoe.models.store_model import StoreModel
from tools.checkout import ROOT, child_environment
from tools.command_line import failed, make_parser, positive
from tools.training.tasks import training_tasks

ROUND = 20
"""Random turns between two answers to REFERENCE."""

REFERENCE = "What is the capital of Japan?"

FIXED = ("/clear", "/set exact 4", "/set temperature 0")
"""Commands before REFERENCE."""

LEVELS = ("/set levels 4", "/set levels 4/2", "/set levels 4/0", "/set exact 4")

ALLOWED_GROWTH = 0.02
"""Growth of the median of resident memory that counts as flat."""

_READY, _ENTERED = r"\x1b\[\?2004h", r"\x1b\[\?2004l"
"""Escape sequences of the line editor: it waits for input; a turn is complete."""


@dataclass(frozen=True)
class Sample:
    """The process at one time."""

    seconds: float
    resident_bytes: int
    cgroup_bytes: int
    files: int
    threads: int
    turns: int


@contextmanager
def memory_cgroup(limit: int) -> Iterator[Path]:
    """A memory cgroup of its own, removed at the end.

    Raises:
        UserError: cgroups cannot be made here.
    """
    v1 = Path("/sys/fs/cgroup/memory")
    root, file = (v1, "memory.limit_in_bytes") if v1.is_dir() else (Path("/sys/fs/cgroup"), "memory.max")
    group = root / f"edgemoe-soak-{os.getpid()}"
    try:
        group.mkdir()
        (group / file).write_text(str(limit))
    except OSError as error:
        raise UserError(f"a writable {root}", str(error), "run as root, with cgroups mounted") from error
    try:
        yield group
    finally:
        group.rmdir()


class Soak:
    """A chat that is driven at random.

    Args:
        chat: at its prompt.
        seed: of everything random.
    """

    def __init__(self, chat: pexpect.spawn[str], seed: int) -> None:
        self._chat, self._random = chat, Random(seed)
        tasks = training_tasks(seed)
        self._questions = (turn.question for task in tasks for turn in task.turns)
        self.done: Counter[str] = Counter()

    def enter(self, text: str) -> str:
        """Pastes a turn and returns what the terminal shows up to the next prompt."""
        self._send(text)
        self._chat.expect(_READY)
        return str(self._chat.before)

    def _send(self, text: str) -> None:
        self._chat.send(f"\x1b[200~{text}\x1b[201~\r")
        self._chat.expect(_ENTERED)

    def turn(self) -> None:
        """One random turn."""
        kind = self._random.choices(
            ("question", "long", "cancelled", "regen", "levels", "sampling", "stats", "clear"),
            (30, 4, 6, 4, 4, 2, 2, 6),
        )[0]
        self.done[kind] += 1
        if kind == "cancelled":
            self.enter("/clear")
            self._send(self._long())
            time.sleep(self._random.uniform(0, 0.05))
            # Where the answer has ended already, Ctrl-C at an empty prompt would end the chat: it deletes the x.
            self._chat.send("x\x03")
            self._chat.expect(_READY)
        elif kind == "long":
            self.enter("/clear")
            self.enter(self._long())
        else:
            self.enter(
                {
                    "question": next(self._questions),
                    "regen": "/regen",
                    "levels": self._random.choice(LEVELS),
                    "sampling": f"/set temperature {self._random.choice((0, 0.7, 1.5))}",
                    "stats": "/stats",
                    "clear": "/clear",
                }[kind]
            )

    def _long(self) -> str:
        return " ".join(next(self._questions) for _ in range(20))

    def reference(self) -> str:
        """The answer to REFERENCE under fixed settings."""
        for command in FIXED:
            self.enter(command)
        shown = self.enter(REFERENCE)
        self.done["reference"] += 1
        return shown.strip().splitlines()[0].strip()


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
                samples.append(sample(round(elapsed, 1), process, group, soak.done.total()))
                _show_progress(samples[-1], minutes)
        chat.send("/exit\r")
        chat.expect(pexpect.EOF)
    return {
        "environment": environment(StoreModel.open(resolve_store(DEMO))),
        "vram_limit": vram_limit,
        "cgroup_limit_bytes": cgroup_limit,
        "exit_code": chat.exitstatus,
        "turns": dict(soak.done),
        "reference_answers": dict(answers),
        "samples": [asdict(each) for each in samples],
    }


@contextmanager
def chat_in(group: Path, home: str, vram_limit: str) -> Iterator[pexpect.spawn[str]]:
    """A chat with the demo model at its prompt, in a cgroup, with its state in `home`."""
    options = ("--vram-limit", vram_limit, "--context", "1024", "--levels", "4", "--max-new-tokens", "200")
    chat = pexpect.spawn(
        "/bin/sh",
        [
            "-c",
            f'echo $$ > {group}/cgroup.procs; exec "$0" "$@"',
            *(sys.executable, "-m", "edgemoe", "chat", *options),
        ],
        env=child_environment(
            HOME=home, XDG_STATE_HOME=home, XDG_CACHE_HOME=home, TERM="xterm", PROMPT_TOOLKIT_NO_CPR="1"
        ),
        cwd=ROOT,
        encoding="utf-8",
        codec_errors="replace",
        timeout=300,
        dimensions=(50, 200),
    )
    try:
        chat.expect(_READY)
        yield chat
    finally:
        chat.close(force=True)


def sample(seconds: float, process: psutil.Process, group: Path, turns: int) -> Sample:
    """What the process takes now."""
    v1, v2 = group / "memory.usage_in_bytes", group / "memory.current"
    usage = int((v1 if v1.exists() else v2).read_text())
    return Sample(seconds, process.memory_info().rss, usage, process.num_fds(), process.num_threads(), turns)


def _show_progress(sample: Sample, minutes: float) -> None:
    if sys.stderr.isatty():
        left = minutes - sample.seconds / 60
        size = format_size(sample.resident_bytes)
        print(f"\r{sample.turns} turns, {size}, {left:.0f} min left ", end="", file=sys.stderr, flush=True)


def flatness(samples: Sequence[Sample]) -> list[str]:
    """What grew from the second to the last sixth of some samples; empty: nothing."""
    sixth = max(len(samples) // 6, 1)
    early, late = samples[sixth : 2 * sixth] or samples, samples[-sixth:]
    wrong = []
    for name in ("resident_bytes", "files", "threads"):
        before, after = (median(getattr(sample, name) for sample in some) for some in (early, late))
        most = before * (1 + ALLOWED_GROWTH) if name == "resident_bytes" else before
        if after > most:
            wrong.append(f"{name}: {before:g} in the second sixth, {after:g} in the last")
    return wrong


def verdict(report: dict[str, object]) -> list[str]:
    """What was not flat; empty: all was."""
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
