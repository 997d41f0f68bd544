"""Times every path of the compiled kernel for each kind of work, and keeps the fastest of this machine in a file.

The measurement takes a fifth of a second and is repeated when the processor, the compiled library or the number of
threads changes. Paths give the same bits, so another choice changes no answer.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native import paths
from edgemoe.kernels.samples import samples
from edgemoe.machine.cpu import identity
from edgemoe.storage.files.retry import open_regular

VERSION = 2
"""Version of the file: files of another version are measured anew."""

_ROUNDS, _FEWEST, _SHARE = 5, 3, 0.02
"""Most rounds over a kind of work's paths, and fewest; between them none begins after so many seconds a path."""

_MOST_BYTES = 1 << 20
"""Bytes of the file: a hundred times what it has."""

MARGIN = 0.9
"""A narrower path has to take less than this part of the widest path's time: smaller differences are often noise."""


@dataclass(frozen=True)
class Timing:
    """One path's median time for a kind of work. Field names are the JSON's.

    Args:
        work, rows: kind of work, one of paths.WORKS, and number of rows, one of paths.ROWS.
        path: one of paths.PATHS.
        seconds: the duration of the sample.
        rate: multiplications and additions per second.
    """

    work: str
    rows: str
    path: str
    seconds: float
    rate: float


def preferred(timings: list[Timing]) -> dict[tuple[str, str], str]:
    """Returns the path to take, by kind of work and rows: the widest, unless one takes less than MARGIN of its time."""
    by_work: dict[tuple[str, str], list[Timing]] = {}
    for one in timings:
        by_work.setdefault((one.work, one.rows), []).append(one)
    found = {}
    for key, several in by_work.items():
        widest = max(several, key=lambda one: paths.PATHS.index(one.path))
        least = min(several, key=lambda one: one.seconds)
        found[key] = (least if least.seconds < MARGIN * widest.seconds else widest).path
    return found


def measure() -> list[Timing]:
    """Times all candidates; the choice that was in force before stays in force.

    A narrower path than the widest is preferred only if it wins twice: its work is timed again, after all other work.
    """
    before = paths.choice()
    try:
        all_work = list(samples())
        found = {sample[:2]: _timed(*sample) for sample in all_work}
        for sample in all_work:
            key = sample[:2]
            widest = paths.candidates(*key)[-1]
            if preferred(found[key])[key] != widest:
                again = _timed(*sample)
                if preferred(again)[key] == widest:
                    found[key] = again
    finally:
        paths.choose(before)
    return [one for several in found.values() for one in several]


def _timed(work: str, rows: str, multiplications: int, run: Callable[[], object]) -> list[Timing]:
    """Times the candidates for a sample, in turns."""
    candidates = paths.candidates(work, rows)
    taken: dict[str, list[float]] = {path: [] for path in candidates}
    start = time.perf_counter()
    for turn in range(_ROUNDS + 1):
        for path in candidates:
            paths.choose({(work, rows): path})
            began = time.perf_counter()
            run()
            if turn:  # the first one warms up
                taken[path].append(time.perf_counter() - began)
        if turn >= _FEWEST and time.perf_counter() - start > _SHARE * len(candidates):
            break
    # Not the least: a processor can be twice as fast for a few turns, and it is chance which path has them.
    typical = {path: median(seconds) for path, seconds in taken.items()}
    return [Timing(work, rows, path, each, multiplications / each) for path, each in typical.items()]


def choose_fastest(directory: Path) -> list[Timing]:
    """Lets each kind of work take its fastest path, as measured here or, before, on this machine.

    Args:
        directory: the file's directory, made if it does not exist. Where it cannot be written, every process measures.
    """
    key = machine()
    timings = _read(_file(directory, key), key)
    if timings is None:
        timings = measure_and_keep(directory)
    paths.choose(preferred(timings))
    return timings


def measure_and_keep(directory: Path) -> list[Timing]:
    """Measures, and writes the file of this machine."""
    key = machine()
    timings = measure()
    with suppress(OSError):
        _write(_file(directory, key), key, timings)
    return timings


def machine() -> dict[str, Any]:
    """The parts of a machine on which a measurement depends: processor, library and threads."""
    return {
        **identity(),
        "paths": paths.available(),
        "library": _digest(Path(native.library()._name)),
        "threads": native.thread_count(),
    }


@cache
def _digest(library: Path) -> str:
    """Hash of the compiled library's file, which a process loads once."""
    return hashlib.sha256(library.read_bytes()).hexdigest()[:16]


def _file(directory: Path, key: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return directory / f"kernels-{digest}.json"


def _read(path: Path, key: Mapping[str, Any]) -> list[Timing] | None:
    """The timings of a file; None where there is none for this machine and version. Warns of a damaged one."""
    try:
        found = json.loads(_text(path))
        if found["version"] != VERSION or found["machine"] != key:
            return None
        timings = [Timing(**one) for one in found["timings"]]
        _require_known(timings)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        logging.getLogger("edgemoe").warning(
            "expected times of kernels in %s, got a damaged file (%s): measured anew", path, error
        )
        return None
    return timings


def _text(path: Path) -> str:
    """The text of a file; raises OSError or ValueError where it is no regular one or too large."""
    with open_regular(path) as file:
        raw = file.read(_MOST_BYTES + 1)
    if len(raw) > _MOST_BYTES:
        raise ValueError(f"more than {_MOST_BYTES} bytes")
    return raw.decode()


def _require_known(timings: list[Timing]) -> None:
    """Raises ValueError unless each kind of work has times, as numbers, and all are of paths that this machine has."""
    known = paths.choice()
    if {(one.work, one.rows) for one in timings} != known.keys():
        raise ValueError("timings of other work")
    for one in timings:
        if one.path not in paths.candidates(one.work, one.rows):
            raise ValueError("timings of other paths")
        if not all(isinstance(each, float) and each > 0 for each in (one.seconds, one.rate)):
            raise ValueError("times that are no numbers above 0")


def _write(path: Path, key: Mapping[str, Any], timings: list[Timing]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"version": VERSION, "machine": key, "timings": [asdict(one) for one in timings]}
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        temporary.write_text(json.dumps(content))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
