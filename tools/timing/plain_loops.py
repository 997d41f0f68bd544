"""The plainest loops of a product in groups, compiled here for comparison with edgemoe's kernels."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from edgemoe.errors import UserError
from edgemoe.kernels.native import paths

ROWS, COLS, GROUP = 1536, 2048, 64


REPEATS = 1
"""Products of a round on each core."""


class Grouped(ctypes.Structure):
    """`grouped` of plain/grouped.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "groups", "tokens")),
        *((name, ctypes.c_void_p) for name in ("codes", "scale", "centre", "x", "x_scale", "x_sum", "y")),
    ]


class PlainLoops:
    """The loops of plain/grouped.c, each thread with a matrix of its own."""

    def __init__(self, directory: Path) -> None:
        compiler = shutil.which("gcc")
        if compiler is None:
            raise UserError("gcc, which compiles the loops to compare with", "none", "install gcc")
        built = directory / "grouped.so"
        source = Path(__file__).parent / "plain" / "grouped.c"
        subprocess.run(
            [compiler, "-O3", "-fwrapv", "-shared", "-fPIC", "-o", str(built), str(source)], check=True
        )
        self._library = ctypes.CDLL(str(built))
        self.names = [name for name in ("vnni", "amx") if self._has(name)]

    def _has(self, name: str) -> bool:
        if "avx512-vnni" not in paths.available():
            return False
        return name == "vnni" or ("amx" in paths.available() and bool(self._library.grouped_has_amx()))

    def call(self, name: str, tokens: int, cores: int) -> Callable[[], None]:
        """A call of REPEATS products on each core."""
        function: Any = getattr(self._library, f"grouped_{name}")
        jobs = [self._job(tokens) for _ in range(cores)]

        def run(job: Grouped) -> None:
            for _ in range(REPEATS):
                function(ctypes.byref(job))

        def together() -> None:
            others = [threading.Thread(target=run, args=(job,)) for job, _ in jobs[1:]]
            for thread in others:
                thread.start()
            run(jobs[0][0])
            for thread in others:
                thread.join()

        return together

    @staticmethod
    def _job(tokens: int) -> tuple[Grouped, list[torch.Tensor]]:
        groups = COLS // GROUP
        codes = torch.randint(0, 256, (ROWS * COLS // 2,), dtype=torch.uint8)
        x = torch.randint(-127, 128, (groups * tokens * GROUP,), dtype=torch.int8)
        parameters = [torch.full((groups * ROWS,), 0.01), torch.full((groups * ROWS,), 0.1)]
        of_x = [torch.full((groups * tokens,), 0.01), torch.full((groups * tokens,), 0.1)]
        kept = [codes, *parameters, x, *of_x, torch.empty(ROWS * tokens)]
        job = Grouped(ROWS, groups, tokens, *(tensor.data_ptr() for tensor in kept))
        return job, kept
