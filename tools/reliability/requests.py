"""Sends random requests to the demo model from several threads, in a memory cgroup, and watches what the process takes.

    python -m tools.reliability.requests [--requests 2000] [--parallel 8] [--vram-limit 45MB] [--cgroup-limit 700MB]

Prompts of one to some hundred tokens, answers of one to 64, streams that are closed early, futures that are cancelled,
penalties and temperatures come in random order. After every ROUND of them one question is answered again at
temperature 0; its answer must stay the same. At the end no block, pin, KV or thread may be left. The verdict compares
resident memory of the second and of the last sixth of the run. Needs root and a writable cgroup filesystem. Exit code
0: flat; 1: something grew, changed or was left.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

import edgemoe
from edgemoe.console.sizes import format_size, parse_size
from edgemoe.errors import EdgemoeError
from tools.command_line import failed, make_parser, positive
from tools.reliability.random_chat import REFERENCE
from tools.reliability.random_requests import Requests, leftovers
from tools.reliability.watch import Sample, flatness, memory_cgroup, run_inside, sample

ROUND = 50
"""Requests between two samples."""

CONTEXT = 512


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Sends the requests, in the cgroup `inside`, and returns a report.

    Raises:
        DoesNotFit: the limit is too small.
    """
    process, start, samples = psutil.Process(), time.monotonic(), list[Sample]()
    answers: Counter[str] = Counter()
    model = edgemoe.load(vram_limit=options.vram_limit, context=CONTEXT, parallel=options.parallel, exact=4)
    before = model.engine.budget.used_bytes
    with model, ThreadPoolExecutor(2 * options.parallel) as threads:
        requests = Requests(model, options.seed)
        for _ in range(-(-options.requests // ROUND)):
            for future in [threads.submit(requests.one) for _ in range(ROUND)]:
                future.result()
            answers[requests.reference()] += 1
            elapsed = round(time.monotonic() - start, 1)
            samples.append(sample(elapsed, process, options.inside, requests.counts.total()))
            _show_progress(samples[-1], options.requests)
        left = leftovers(model, before)
    return {
        "parallel": options.parallel,
        "vram_limit": options.vram_limit,
        "cgroup_limit": options.cgroup_limit,
        "requests": dict(requests.counts),
        "reference_answers": dict(answers),
        "left": left,
        "samples": [asdict(each) for each in samples],
    }


def _show_progress(sample: Sample, count: int) -> None:
    if sys.stderr.isatty():
        size, left = (
            format_size(sample.resident_bytes),
            sample.seconds / sample.turns * (count - sample.turns),
        )
        print(
            f"\r{sample.turns} of {count} requests, {size}, {left:.0f} s left ",
            end="",
            file=sys.stderr,
            flush=True,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the requests, writes the samples and prints the verdict."""
    parser = make_parser("tools.reliability.requests", __doc__)
    parser.add_argument("--requests", type=positive, default=2000)
    parser.add_argument("--parallel", type=positive, default=8)
    parser.add_argument("--vram-limit", default="45MB")
    parser.add_argument("--cgroup-limit", default="700MB")
    parser.add_argument("--seed", type=positive, default=1)
    parser.add_argument("--out", type=Path, help="file for the samples, JSON")
    parser.add_argument("--inside", type=Path, help="the cgroup of this process; without it one is made")
    given = parser.parse_args(argv)
    try:
        if given.inside is None:
            with memory_cgroup(parse_size(given.cgroup_limit)) as group:
                words = [*(argv or sys.argv[1:]), "--inside", str(group)]
                return run_inside(group, "tools.reliability.requests", words)
        report = run(given)
    except EdgemoeError as error:
        return failed("tools.reliability.requests", error)
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n")
    samples = [Sample(**each) for each in report["samples"]]
    wrong = [*flatness(samples), *report["left"]]
    if len(report["reference_answers"]) != 1:
        wrong.append(f"answers to {REFERENCE!r}: {report['reference_answers']}")
    sizes = [each.resident_bytes for each in samples]
    print(
        f"{samples[-1].turns} requests in {samples[-1].seconds:.0f} s, {given.parallel} at once: resident "
        f"{format_size(min(sizes))} to {format_size(max(sizes))}, files {samples[0].files} to {samples[-1].files}, "
        f"threads {samples[0].threads} to {samples[-1].threads}, {report['requests']}"
    )
    print(*(wrong or ["flat"]), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
