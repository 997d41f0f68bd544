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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgemoe.bench.synthetic.workload import PRESETS
from tools.checkout import child_environment
from tools.command_line import make_parser

GPU_TESTS = "tests/edgemoe/engine/device/test_cuda.py", "tests/edgemoe/kernels/triton"

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


@dataclass(frozen=True)
class MeasuredStep:
    """A process that measures something.

    Args:
        name: the beginning of its files' names.
        command: its command line.
        needs_store: it begins after the store is written.
    """

    name: str
    command: tuple[str, ...]
    needs_store: bool = False


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = make_parser("tools.gpu.measure", __doc__)
    parser.add_argument("results", type=Path, help="folder for the results; made if it does not exist")
    parser.add_argument("--like", choices=sorted(PRESETS), default="qwen3-30b-a3b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", action="append", default=[], metavar="STEP", help="runs only these steps")
    parser.add_argument("--minutes", type=float, default=8.0, help="time after which every step is ended")
    parser.add_argument(
        "--store",
        type=Path,
        help="the store, written if it does not exist, and kept; default: a temporary one",
    )
    return parser.parse_args(argv)


def steps(arguments: argparse.Namespace, store: Path) -> list[MeasuredStep]:
    """The steps that --only chooses."""
    python = sys.executable
    found = [
        MeasuredStep("machine", ("nvidia-smi",)),
        MeasuredStep("packages", (python, "-m", "pip", "list")),
        MeasuredStep(
            "tests", (python, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *GPU_TESTS)
        ),
    ]
    for name, options in UNDER_LIMIT.items():
        json = "--json", str(arguments.results / f"{name}.json")
        command = (
            python,
            "-m",
            "tools.gpu.under_limit",
            str(store),
            "--device",
            arguments.device,
            *options,
            *json,
        )
        found.append(MeasuredStep(name, command, needs_store=True))
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
        is_missing = any(step.needs_store for step in chosen) and not store.exists()
        writing = _begin_store(given, store) if is_missing else None
        for step in chosen:
            if step.needs_store and writing:
                writing.wait()
            begun = time.monotonic()
            wrong = run_step(step, given.results, 60 * given.minutes - (begun - start))
            failed += wrong is not None
            print(f"{time.monotonic() - start:6.1f} s  {step.name}: {wrong or 'done'}", flush=True)
        if writing:
            writing.wait()
    return failed


def _begin_store(options: argparse.Namespace, store: Path) -> subprocess.Popen[bytes]:
    """Begins to write the store in the background."""
    command = [sys.executable, "-m", "tools.synthetic.store", "--like", options.like, "--max-level", "4"]
    command += ["--layout", "cuda"] if options.device == "cuda" else []
    with (options.results / "store.txt").open("w") as output:
        return subprocess.Popen(
            [*command, str(store)], stdout=output, stderr=subprocess.STDOUT, env=child_environment()
        )


if __name__ == "__main__":
    sys.exit(main())
