"""Measures edgemoe on a GPU with a synthetic model larger than the GPU's memory.

    python -m tools.gpu.bench --json gpu.json
    python -m tools.gpu.bench --only "16 GB" --only "24 GB" --only "12 GB, DRAM large: 4/2 + prefetch" --only "from SSD"
    python -m tools.gpu.bench --device cpu --like tiny --limits 3MB,4MB --dram-small 200KB --offload-layers 2

Synthesizes a store of Qwen3-30B-A3B's shape (48 layers, experts up to level 4, 17 GB) in a folder of --work that is
removed at the end, and measures as `edgemoe bench` does, cold, and warm once free memory was filled from the disk:
  - exact 4, 4/2 and 4/0, and the first two with every expert copied before it is computed, under the smallest limit of
    GPU memory with a large DRAM tier; exact 4 and 4/2 under it with a small one, and under every other limit;
  - the fully resident model: the ceiling;
  - loading on demand, from DRAM and from SSD, with the same readers and kernels;
  - transformers with accelerate's CPU offload: --offload-layers of the same shape in bf16, with the same fraction of
    the smallest limit (tools/gpu/offload.py; left out where accelerate is not installed).
Beside it `python -m tools.gpu.llama` times llama.cpp on a GGUF of the same shape.
Prints TTFT, TPOT, hit rates, bytes a second of each link, the bound and the fraction reached, then each aim of the
project with its figure. Cases that start after --minutes are listed, not run. With --only, rows whose name has none of
its texts are listed, not run; a text begins a word, so "4 GB" is not in "24 GB". --trace is not a row. Needs 50 GB of
disk and 100 GB of RAM.

The last command is a rehearsal: on --device cpu "VRAM" is RAM, no figure says anything about a GPU, and the output
says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from edgemoe.bench.run import BenchRequest, run_bench
from edgemoe.bench.tables import times_and_bytes
from edgemoe.console.output_files import require_folders
from edgemoe.console.sizes import parse_size
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.errors import DoesNotFit, EdgemoeError, UserError
from edgemoe.kernels.registry import compute
from edgemoe.kv.step import Segment, Step
from edgemoe.machine.devices import chosen, open_device
from tools.checkout import child_environment
from tools.command_line import failed
from tools.gpu.cases import FOUR, OFFLOAD, cases, choose, is_chosen, named, require_a_row
from tools.gpu.options import parse

Json = dict[str, Any]

TRACED = 2
"""New tokens in a trace."""


class Clock:
    """Prints progress with the time since the start, and knows when the minutes are over."""

    def __init__(self, minutes: float) -> None:
        self._start, self._seconds = time.monotonic(), 60 * minutes

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    @property
    def is_over(self) -> bool:
        """Whether no further case may start."""
        return self.seconds > self._seconds

    def say(self, what: str, of: str = "") -> None:
        """Prints one line on stderr."""
        print(f"{self.seconds:6.1f} s  {of}{what}", file=sys.stderr, flush=True)


def synthesize(given: argparse.Namespace, layout: str, store: Path) -> None:
    """Writes the store in a process of its own.

    Raises:
        subprocess.CalledProcessError: the process failed; its stderr says why.
    """
    command = [sys.executable, "-m", "tools.synthetic.store", "--like", given.like, "--max-level", "4"]
    command += ["--layout", layout, "--seed", str(given.seed)]
    command += ["--layers", str(given.layers)] if given.layers else []
    subprocess.run([*command, str(store)], check=True, env=child_environment())


def measure(store: StoreModel, given: argparse.Namespace, clock: Clock) -> tuple[Json, list[str]]:
    """Measures every case that starts in time; returns one report, and the cases left out with the reason."""
    experts = store.shape.experts * store.form.bytes_at(4)
    large = parse_size(given.dram_large) if given.dram_large else experts
    limits = [parse_size(limit) for limit in given.limits.split(",")]
    environment: Json = {}
    rows: list[Json] = []
    wanted, others = choose(cases(limits, large, parse_size(given.dram_small)), given.only)
    left_out = [f"{name}: not in --only" for name in others]
    for case in wanted:
        names = f"{case.name}: {', '.join(row.name for row in case.rows)}"
        if clock.is_over:
            left_out.append(f"{names}: {given.minutes:g} minutes were over")
            continue
        request = BenchRequest(
            case.rows,
            case.vram,
            case.dram,
            prompt_tokens=given.prompt_tokens,
            new_tokens=given.new_tokens,
            runs=given.runs,
            seed=given.seed,
            warm_up=not rows,
            fill=True,
        )
        try:
            report = run_bench(store, request, notify=partial(clock.say, of=f"{case.name}: "))
        except DoesNotFit as error:
            left_out.append(f"{names}: {error}")
            continue
        environment = environment or report["environment"]
        rows += [row | {"name": f"{case.name}: {row['name']}"} for row in report["rows"]]
    return {"environment": environment, "rows": rows}, left_out


def offload(given: argparse.Namespace, device: str, memory: int) -> Json | str:
    """Times accelerate's offload with `memory` bytes on the device, in its own process; or says why it cannot."""
    if importlib.util.find_spec("accelerate") is None:
        return "accelerate is not installed: pip install accelerate"
    command = [sys.executable, "-m", "tools.gpu.offload", "--like", given.like]
    command += ["--layers", str(given.offload_layers), "--memory", str(memory), "--device", device]
    command += ["--prompt-tokens", str(given.prompt_tokens), "--new-tokens", str(given.offload_tokens)]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=child_environment())
    if child.returncode:
        return f"accelerate's process ended with {child.returncode}; its stderr says why"
    answer: Json = json.loads(child.stdout.splitlines()[-1])
    return answer


def trace(store: StoreModel, given: argparse.Namespace, limit: int) -> None:
    """Writes what the host, the kernels and the copies did in TRACED new tokens, as a Perfetto trace.

    The tokens follow a prompt and as many others, under the smallest limit with a large DRAM tier, at 4 bits.
    """
    large = parse_size(given.dram_large) if given.dram_large else store.shape.experts * store.form.bytes_at(4)
    plan = store.plan(
        vram_limit=limit, dram_limit=large, settings=FOUR, context=given.prompt_tokens + given.new_tokens
    )
    random = torch.Generator().manual_seed(given.seed)
    prompt = torch.randint(3, store.shape.vocab, (given.prompt_tokens,), generator=random).tolist()
    with Engine(store, plan, FOUR) as engine:
        sequence = engine.sequences.new()
        logits = engine.prefill(sequence, prompt)

        def decode(tokens: int) -> None:
            nonlocal logits
            for _ in range(tokens):
                logits = engine.step(Step((Segment(sequence, (int(logits.argmax()),)),)))[0]

        decode(given.new_tokens - TRACED)
        with torch.profiler.profile() as profile:
            decode(TRACED)
    profile.export_chrome_trace(str(given.trace))


def aims(rows: Sequence[Json], offloaded: Json | str, layers: int, least: int) -> list[Json]:
    """The project's aims, each with its bound and the measured figure, which is None where a row is missing."""
    at = f"{named(least, 'DRAM large')}: "
    found = {(row["name"], row["arm"]): row for row in rows}

    def seconds(name: str, metric: str = "tpot_s") -> float | None:
        row = found.get((at + name, "warm"))
        return None if row is None else float(row[metric]["mean"])

    def times(more: float | None, less: float | None) -> float | None:
        return more / less if more and less else None

    mixed, four = seconds("4/2 + prefetch"), found.get((at + "exact 4", "warm"))
    theirs: dict[str, float] = {}
    if not isinstance(offloaded, str):
        theirs = {name: offloaded[name] / offloaded["layers"] * layers for name in ("ttft_s", "tpot_s")}
    over = [row["peak_vram_bytes"] / row["vram_limit_bytes"] for row in rows]
    return [
        _aim(
            "exact 4, warm: fraction of the bound", 0.7, None if four is None else four["fraction_of_bound"]
        ),
        _aim("4/2, times faster than on demand from DRAM", 2.4, times(seconds("on demand from DRAM"), mixed)),
        _aim("4/2, times faster than on demand from SSD", 4.3, times(seconds("on demand from SSD"), mixed)),
        _aim(
            "4/2, TPOT a layer: times faster than accelerate's offload", 8, times(theirs.get("tpot_s"), mixed)
        ),
        _aim(
            "4/2, TTFT a layer: times faster than accelerate's offload",
            7,
            times(theirs.get("ttft_s"), seconds("4/2 + prefetch", "ttft_s")),
        ),
        {"aim": "largest peak over its limit", "at_most": 1.0, "found": max(over, default=None)},
    ]


def _aim(what: str, at_least: float, found: float | None) -> Json:
    return {"aim": what, "at_least": at_least, "found": found}


def summary(report: Json) -> str:
    """Formats the report as text."""
    parts = [report["label"], "", times_and_bytes(report["rows"]), ""]
    offloaded = report["offload"]
    parts.append(
        f"accelerate's CPU offload: {offloaded if isinstance(offloaded, str) else json.dumps(offloaded)}"
    )
    for aim in report["aims"]:
        wanted = f"at least {aim['at_least']}" if "at_least" in aim else f"at most {aim['at_most']}"
        parts.append(f"- {aim['aim']}: {wanted} aimed at, {_shown(aim['found'])}")
    parts += [f"- left out: {what}" for what in report["left_out"]]
    parts.append(f"- {report['seconds']:.0f} s in all")
    return "\n".join(parts)


def _shown(found: float | None) -> str:
    return "not measured" if found is None else f"{found:.2f} found"


def run(given: argparse.Namespace, clock: Clock) -> Json:
    """Synthesizes the store, measures every case and accelerate's offload; returns the report.

    Raises:
        EdgemoeError: no such device, an option that is no size, or a missing folder.
        subprocess.CalledProcessError: the store could not be written.
    """
    require_folders(given.json, given.trace)
    if given.work and not given.work.is_dir():
        raise UserError(f"a folder {given.work}", "none", "make it, or name another")
    limits = [parse_size(limit) for limit in given.limits.split(",")]
    require_a_row(limits, given.only)
    device = open_device(given.device)
    with tempfile.TemporaryDirectory(dir=given.work) as folder:
        clock.say("synthesizing")
        synthesize(given, compute(device.place if device else "cpu").layout.name, Path(folder, "store"))
        store = StoreModel.open(Path(folder, "store"), device)
        layers = len(store.manifest.layers)
        memory = int(min(limits) * given.offload_layers / layers)
        if not is_chosen(OFFLOAD, given.only):
            offloaded: Json | str = "not in --only"
        elif clock.is_over:
            offloaded = f"{given.minutes:g} minutes were over"
        else:
            clock.say(OFFLOAD)
            offloaded = offload(given, chosen(given.device), memory)
        measured, left_out = measure(store, given, clock)
        if given.trace:
            clock.say("tracing")
            trace(store, given, min(limits))
    label = f"Measured on {device.name}." if device else "A rehearsal on the CPU: no figure here is a GPU's."
    return measured | {
        "label": label,
        "offload": offloaded,
        "aims": aims(measured["rows"], offloaded, layers, min(limits)),
        "left_out": left_out,
        "seconds": clock.seconds,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    given = parse(__doc__, argv)
    try:
        report = run(given, Clock(given.minutes))
    except EdgemoeError as error:
        return failed("tools.gpu.bench", error)
    except subprocess.CalledProcessError as error:
        return int(error.returncode)
    print(summary(report), flush=True)
    if given.json:
        given.json.write_text(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
