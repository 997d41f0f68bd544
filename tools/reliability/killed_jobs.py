"""Jobs that write files, each run in a process of its own to be killed: conversions and compensations."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import xxhash

from edgemoe.errors import UserError
from edgemoe.families.table import family_of
from edgemoe.kernels.registry import compute
from edgemoe.storage.compensators.making import compensate
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.run import convert
from edgemoe.storage.store.manifest import MANIFEST_NAME, Manifest

RANK = 4
"""Mean rank of compensators."""


def contents(directory: Path) -> dict[str, int]:
    """Path -> hash of every file in a directory and its folders."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): xxhash.xxh3_64_intdigest(path.read_bytes()) for path in files}


class Job(Protocol):
    """A job whose process is killed."""

    def prepare(self, directory: Path) -> None:
        """Makes the empty directory into what a run begins from."""

    def run(self, directory: Path, begins: Callable[[], None]) -> None:
        """Does the job in a directory; calls `begins` once, before the first write that a kill may meet."""

    def sound(self, directory: Path) -> bool:
        """Whether what a killed run has left can be used as it is."""


@dataclass(frozen=True)
class Conversion:
    """`edgemoe convert` of a checkpoint."""

    source: Path

    def prepare(self, directory: Path) -> None:
        """Leaves the directory empty."""

    def run(self, directory: Path, begins: Callable[[], None]) -> None:
        """Converts on two threads."""
        begins()
        convert_quietly(self.source, directory)

    def sound(self, directory: Path) -> bool:
        """Any part of a store: store.json is written last."""
        return True


@dataclass(frozen=True)
class Compensation:
    """`edgemoe compensate`.

    Args:
        source: a checkpoint.
        plain: its store, which each run begins from a copy of.
    """

    source: Path
    plain: Path

    def prepare(self, directory: Path) -> None:
        """Copies the store."""
        shutil.copytree(self.plain, directory, dirs_exist_ok=True)

    def run(self, directory: Path, begins: Callable[[], None]) -> None:
        """Computes compensators of mean rank RANK on two threads."""
        begins()
        family = family_of(Checkpoint.open(self.source).config)
        compensate(
            self.source,
            directory,
            family,
            base_level=2,
            rule="error",
            mean_rank=RANK,
            progress=_silent,
            threads=2,
        )

    def sound(self, directory: Path) -> bool:
        """The store is complete with or without compensators."""
        return bool(Manifest.read(directory / MANIFEST_NAME).layers)


def _silent(count: int, total: int) -> None:
    pass


def convert_quietly(source: Path, store: Path) -> None:
    """Converts a checkpoint on two threads without showing progress."""
    family, layout = family_of(Checkpoint.open(source).config), compute("cpu").layout
    convert(source, store, family, layout=layout, max_level=None, dense_bits=16, progress=_silent, threads=2)


def start(job: Job, directory: Path) -> int:
    """Starts a job in a forked process, which has all imports; returns its process number once the job begins."""
    begun, begins = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            job.run(directory, lambda: os.close(begins))
            code = 0
        finally:
            os._exit(code)
    os.close(begins)
    os.read(begun, 1)  # ends when the child closes its end, or has ended
    os.close(begun)
    return child


def end(child: int) -> int:
    """Waits for a process; returns its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def whole(job: Job, directory: Path) -> float:
    """Runs a job without a kill; returns its seconds from where it begins.

    Raises:
        UserError: the job fails.
    """
    child, begin = start(job, directory), time.perf_counter()
    if code := end(child):
        raise UserError(f"a job that ends in {directory}", f"exit code {code}", "run it by hand to see why")
    return time.perf_counter() - begin
