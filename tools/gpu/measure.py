"""Everything that a machine with a GPU is for, in one command: tests, kernels, new tokens, prompts, batches.

    python -m tools.gpu.measure results --minutes 8
    python -m tools.gpu.measure results --only tests --only resident
    python -m tools.gpu.measure results --like tiny --device cpu --only resident      # a rehearsal without a GPU

Every step is a process of its own. Its output goes to results/STEP.txt, and its figures to results/STEP.json as they
come, so that a step that fails or runs out of time leaves what it has found, and the next one begins. The store is
written in the background while the tests run. A summary of one line for each step is printed, and the exit code is the
number of steps that failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.checkout import child_environment
from tools.command_line import make_parser

GPU_TESTS = "tests/edgemoe/engine/device", "tests/edgemoe/kernels/triton"

UNDER_LIMIT = {
    "resident": ("--batches", "1,2,4,8,16,32", "--prompts", "128,512,2048,8192"),
    "12GB": ("--vram-limit", "12GB", "--batches", "1,2,4,8,16,32", "--prompts", "128,512,2048"),
    "16GB": ("--vram-limit", "16GB", "--prompts", "128", "--batches", "1"),
    "12GB-4-2": ("--vram-limit", "12GB", "--levels", "4/2", "--prompts", "128", "--batches", "1"),
    "12GB-copied": (
        "--vram-limit",
        "12GB",
        "--in-place",
        "off",
        "--prompts",
        "128",
        "--batches",
        "1",
        "--blocks",
        "1",
    ),
}
"""Name of a step -> its options for tools.gpu.under_limit, the steps with the most to say first."""

HYBRID = {
    "hybrid": ("--warm", "--batches", "", "--prompts", "128,2048"),
    "hybrid-12GB": ("--vram-limit", "12GB", "--warm", "--batches", "", "--prompts", "128,2048"),
}
"""The steps of a second store, whose layers have gated delta nets."""

HYBRID_SIZES = {"qwen3-30b-a3b": (), "tiny": ("--layers", "4", "--experts", "12", "--vocab", "400")}
"""--like -> the sizes of the second store in place of Qwen3.6-35B-A3B's own."""


@dataclass(frozen=True)
class MeasuredStep:
    """A process that measures something.

    Args:
        name: the beginning of its files' names.
        command: its command line.
        store: the store that it reads, which must be written before; None: it reads none.
    """

    name: str
    command: tuple[str, ...]
    store: Path | None = None


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = make_parser("tools.gpu.measure", __doc__)
    parser.add_argument("results", type=Path, help="folder for the results; made if it does not exist")
    parser.add_argument("--like", choices=sorted(HYBRID_SIZES), default="qwen3-30b-a3b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", action="append", default=[], metavar="STEP", help="runs only these steps")
    parser.add_argument("--minutes", type=float, default=8.0, help="time after which every step is ended")
    parser.add_argument(
        "--store",
        type=Path,
        help="the store, written if it does not exist, and kept; default: a temporary one; STORE-hybrid: the second",
    )
    return parser.parse_args(argv)


def steps(arguments: argparse.Namespace, store: Path) -> list[MeasuredStep]:
    """The steps that --only chooses."""
    python = sys.executable
    found = [
        MeasuredStep("machine", ("nvidia-smi",)),
        MeasuredStep("packages", (python, "-m", "pip", "list")),
        MeasuredStep(
            "tests", (python, "-m", "pytest", "-vv", "-m", "gpu", "-p", "no:cacheprovider", *GPU_TESTS)
        ),
    ]
    runs = [(name, store, options) for name, options in UNDER_LIMIT.items()]
    runs += [(name, _hybrid(store), options) for name, options in HYBRID.items()]
    for name, own, options in runs:
        json = "--json", str(arguments.results / f"{name}.json")
        command = (
            python,
            "-m",
            "tools.gpu.under_limit",
            str(own),
            "--device",
            arguments.device,
            *options,
            *json,
        )
        found.append(MeasuredStep(name, command, store=own))
    return [step for step in found if not arguments.only or step.name in arguments.only]


def run_step(step: MeasuredStep, results: Path, seconds: float) -> str | None:
    """Runs a step for some seconds at most. Returns what went wrong; None: nothing."""
    with (results / f"{step.name}.txt").open("w") as output:
        try:
            ended = subprocess.run(
                step.command,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=max(seconds, 1),
                check=False,
                env=child_environment() | {"PYTHONUNBUFFERED": "1"},
            )
        except subprocess.TimeoutExpired:
            return "time was over"
        except OSError as error:
            return str(error)
    return f"exit code {ended.returncode}" if ended.returncode else None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the number of steps that failed."""
    given, start = parse(argv), time.monotonic()
    given.results.mkdir(parents=True, exist_ok=True)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        store = given.store or Path(folder, "store")
        chosen = steps(given, store)
        writing = _begin_stores(given, store, {step.store for step in chosen})
        for step in chosen:
            if step.store:
                _wait(writing)
            begun = time.monotonic()
            wrong = run_step(step, given.results, 60 * given.minutes - (begun - start))
            failed += wrong is not None
            print(f"{time.monotonic() - start:6.1f} s  {step.name}: {wrong or 'done'}", flush=True)
        _wait(writing)
    return failed


def _wait(writing: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in writing:
        process.wait()


def _hybrid(store: Path) -> Path:
    """The second store's place."""
    return store.with_name(f"{store.name}-hybrid")


def _begin_stores(
    options: argparse.Namespace, store: Path, stores: Collection[Path | None]
) -> list[subprocess.Popen[bytes]]:
    """Begins to write the stores that steps need in the background, unless they are there."""
    python = sys.executable, "-m"
    layout = ("--layout", "cuda") if options.device == "cuda" else ("--layout", "cpu-generic")
    commands = {
        store: (
            "tools.synthetic.store",
            "--like",
            options.like,
            "--max-level",
            "4",
            "--dense-bits",
            "8",
            *layout,
        ),
        _hybrid(store): (
            "tools.synthetic.family_store",
            "qwen3.6-35b-a3b",
            *HYBRID_SIZES[options.like],
            *layout,
        ),
    }
    begun = list[subprocess.Popen[bytes]]()
    for place, command in commands.items():
        if place in stores and not place.exists():
            with (options.results / f"{place.name}.txt").open("w") as output:
                process = subprocess.Popen(
                    [*python, *command, str(place)],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=child_environment(),
                )
                begun.append(process)
    return begun


if __name__ == "__main__":
    sys.exit(main())
