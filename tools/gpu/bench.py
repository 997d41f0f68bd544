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
`python -m tools.gpu.llama` times llama.cpp on a GGUF of the same shape.
Prints TTFT, TPOT, hit rates, bytes per second of each link, the bound and the fraction reached, then each aim of the
project with its figure. Cases that start after --minutes are listed, not run. With --only, rows whose name has none of
its texts are listed, not run; a text begins a word, so "4 GB" is not in "24 GB". --trace is not a row. Needs 50 GB of
disk and 100 GB of RAM.

The last command is a rehearsal: on --device cpu "VRAM" is RAM, no figure says anything about a GPU, and the output
says so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from edgemoe.console.output_files import require_folders
from edgemoe.console.sizes import parse_size
from edgemoe.errors import EdgemoeError, UserError
from edgemoe.machine.devices import device_name, open_device
from tools.command_line import failed
from tools.gpu.aims import Json, aims, summary
from tools.gpu.cases import OFFLOAD, is_chosen, require_a_row
from tools.gpu.children import offload, synthesized
from tools.gpu.options import parse
from tools.gpu.run_cases import Clock, measure
from tools.gpu.trace import trace


def run(options: argparse.Namespace, clock: Clock) -> Json:
    """Synthesizes the store, measures every case and accelerate's offload; returns the report.

    Raises:
        EdgemoeError: no such device, an option that is no size, or a missing folder.
        subprocess.CalledProcessError: the store could not be written.
    """
    require_folders(options.json, options.trace)
    if options.work and not options.work.is_dir():
        raise UserError(f"a folder {options.work}", "none", "make it, or name another")
    limits = [parse_size(limit) for limit in options.limits.split(",")]
    require_a_row(limits, options.only)
    device = open_device(options.device)
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        clock.say("synthesizing")
        store = synthesized(options, device, Path(folder, "store"))
        layers = len(store.manifest.layers)
        memory = int(min(limits) * options.offload_layers / layers)
        if not is_chosen(OFFLOAD, options.only):
            offloaded: Json | str = "not in --only"
        elif clock.is_over:
            offloaded = f"{options.minutes:g} minutes were over"
        else:
            clock.say(OFFLOAD)
            offloaded = offload(options, device_name(options.device), memory)
        measured, left_out = measure(store, options, clock)
        if options.trace:
            clock.say("tracing")
            trace(store, options, min(limits))
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
