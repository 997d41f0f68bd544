"""Conversions and compensations that run in processes of their own, to be killed."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import xxhash

from edgemoe.errors import UserError
from edgemoe.families.table import family_of
from edgemoe.kernels.registry import compute
from edgemoe.storage.compensators.making import compensate
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.run import convert


def contents(store: Path) -> dict[str, int]:
    """Path -> hash of every file in a directory and its folders."""
    files = sorted(path for path in store.rglob("*") if path.is_file())
    return {str(path.relative_to(store)): xxhash.xxh3_64_intdigest(path.read_bytes()) for path in files}


@dataclass(frozen=True)
class Job:
    """What is killed.

    Args:
        source: a checkpoint.
        rank: the rank of the compensators that are computed; None: the checkpoint is converted.
        plain: a store without compensators, which each run begins from.
    """

    source: Path
    rank: int | None
    plain: Path

    def prepare(self, store: Path) -> None:
        """Makes the directory that a run begins from."""
        shutil.rmtree(store, ignore_errors=True)
        if self.rank:
            shutil.copytree(self.plain, store)

    def run(self, store: Path) -> None:
        """Converts, or computes compensators."""
        family = family_of(Checkpoint.open(self.source).config)
        if self.rank:
            compensate(
                self.source,
                store,
                family,
                base_level=2,
                rule="error",
                mean_rank=self.rank,
                progress=_silent,
                threads=2,
            )
        else:
            convert_quietly(self.source, store)


def _silent(done: int, total: int) -> None:
    pass


def convert_quietly(source: Path, store: Path) -> None:
    """Converts a checkpoint on two threads without showing progress."""
    family, layout = family_of(Checkpoint.open(source).config), compute("cpu").layout
    convert(source, store, family, layout=layout, max_level=None, dense_bits=16, progress=_silent, threads=2)


def start(job: Job, store: Path) -> int:
    """Starts a job in a forked process, which has all imports; returns its process number."""
    child = os.fork()
    if not child:
        code = 1
        try:
            job.run(store)
            code = 0
        finally:
            os._exit(code)
    return child


def end(child: int) -> int:
    """Waits for a process; returns its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def whole(job: Job, store: Path) -> float:
    """Runs a job without a kill, in seconds.

    Raises:
        UserError: the conversion fails.
    """
    begin = time.perf_counter()
    code = end(start(job, store))
    if code:
        raise UserError(
            f"a model that converts in {job.source}", f"exit code {code}", "convert it by hand to see why"
        )
    return time.perf_counter() - begin
