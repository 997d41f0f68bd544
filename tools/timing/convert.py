"""Times `edgemoe convert` from a cold page cache: seconds per billion weights, cores kept busy, peak RAM, disk.

    python -m tools.synthetic.checkpoint --like qwen3-30b-a3b --layers 16 --vocab 32000 MODEL
    python -m tools.timing.convert MODEL DST [--runs 3]

Prints one JSON object with the disk's own speed, then one a run: bytes, seconds, and the kernel's count of bytes read
from and written to the disk. Each run is its own process. DST must not exist, and is removed after every run. Options
after `--` are convert's: `-- --dense-bits 8`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path

from edgemoe.errors import EdgemoeError, UserError
from edgemoe.machine.process import available_memory
from edgemoe.speed.disk import measure_disk
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.files.unbuffered import forget
from edgemoe.storage.threads import cores
from tools.checkout import child_environment
from tools.command_line import failed, make_parser, positive

PROBE_BYTES = 1 << 30


def forget_files(directory: Path) -> None:
    """Drops a checkpoint's files from the page cache."""
    for path in directory.iterdir():
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                forget(file.fileno(), 0, 0)


def timed(source: Path, destination: Path, options: Sequence[str]) -> dict[str, float | int]:
    """Runs and measures one conversion in its own process.

    Raises:
        UserError: the conversion's exit code is not 0.
    """
    command = [sys.executable, "-m", "edgemoe", "convert", *options, str(source), str(destination)]
    load = os.getloadavg()[0]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=child_environment())
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - start
    if process.returncode:
        raise UserError(
            "a conversion that succeeds", f"exit code {process.returncode}", "solve its error first"
        )
    read, written = 512 * usage.ru_inblock, 512 * usage.ru_oublock
    processor = usage.ru_utime + usage.ru_stime
    return {
        "wall_s": wall,
        "user_s": usage.ru_utime,
        "system_s": usage.ru_stime,
        "cores_busy": processor / wall,
        "peak_bytes": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        "read_bytes": read,
        "written_bytes": written,
        "disk_bytes_s": (read + written) / wall,
        "load_before": load,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = make_parser("tools.timing.convert", __doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("destination", type=Path, metavar="DST")
    parser.add_argument("--runs", type=positive, default=1)
    parser.add_argument("options", nargs="*", help="of edgemoe convert, after --")
    given = parser.parse_args(argv)
    try:
        if given.destination.exists():
            raise UserError(f"a new directory {given.destination}", "an existing one", "remove it first")
        checkpoint = Checkpoint.open(given.checkpoint)
        weights = sum(prod(checkpoint[name].shape) for name in checkpoint.names())
        disk = measure_disk(given.destination.absolute().parent, PROBE_BYTES)
        machine = {"weights": weights, "cores": cores(), "available_bytes": available_memory()}
        print(json.dumps(machine | {"disk": vars(disk)}), flush=True)
        for _ in range(given.runs):
            forget_files(given.checkpoint)
            try:
                row = timed(given.checkpoint, given.destination, given.options)
            finally:
                shutil.rmtree(given.destination, ignore_errors=True)
            billions = weights / 1e9
            per_billion = {
                "s_per_billion": row["wall_s"] / billions,
                "processor_s_per_billion": (row["user_s"] + row["system_s"]) / billions,
            }
            print(json.dumps(per_billion | row), flush=True)
    except EdgemoeError as error:
        return failed("tools.timing.convert", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
