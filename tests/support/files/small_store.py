"""A small finished store of random records, and aligned buffers for its planes."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from edgemoe.storage.record.layout import LAYOUTS
from edgemoe.storage.record.offsets import MatrixSpec, RecordGeometry
from edgemoe.storage.record.planes import Bytes
from edgemoe.storage.store.manifest import Manifest
from edgemoe.storage.store.writer import StoreWriter

LAYERS = (1, 4)
EXPERTS = 3
DENSE = {"norm": ("F32", (5,)), "embed": ("BF16", (7, 3)), "head": ("I8", (3, 3)), "none": ("F32", (0, 4))}


def geometry(max_level: int = 8) -> RecordGeometry:
    """The geometry of two matrices that need padding in both dimensions."""
    return RecordGeometry((MatrixSpec.of("gate_up", 40, 100), MatrixSpec.of("down", 100, 20)), max_level)


def record(layer: int, expert: int, size: int) -> Bytes:
    """The expert's record: random bytes with a fixed seed."""
    return np.random.default_rng([layer, expert]).integers(0, 256, size, np.uint8)


def dense_tensors() -> Iterator[tuple[str, torch.Tensor]]:
    yield "norm", torch.arange(5, dtype=torch.float32)
    yield "embed", torch.arange(21, dtype=torch.bfloat16).view(3, 7).T  # not contiguous
    yield "head", torch.arange(-4, 5, dtype=torch.int8).view(3, 3)
    yield "none", torch.empty(0, 4)


def writer(directory: Path, max_level: int = 8, **changes) -> StoreWriter:
    arguments = {"layout": LAYOUTS["cpu-avx2"], "source": "f00d", "dense_bits": 16, **changes}
    return StoreWriter(directory, **{"geometry": geometry(max_level), **arguments})


class FailureError(Exception):
    """Raised by a test in place of a kill."""


def convert(
    directory: Path, config: Path, *, stop_at: tuple[int, int] | None = None, max_level: int = 8
) -> Manifest:
    """Writes the store, or resumes an earlier call; raises FailureError before record `stop_at`."""

    def records(layer: int) -> Iterator[Bytes]:
        for expert in range(EXPERTS):
            if (layer, expert) == stop_at:
                raise FailureError
            yield record(layer, expert, geometry(max_level).record_bytes)

    with writer(directory, max_level) as out:
        for layer in LAYERS:
            if layer not in out.finished_layers():
                out.write_layer(layer, EXPERTS, records(layer))
        out.write_dense(DENSE, dense_tensors())
        out.copy(config)
        return out.finish()


def buffer(size: int) -> memoryview:
    """Zeroed memory that starts on a page, as O_DIRECT requires."""
    return memoryview(mmap.mmap(-1, size))


def flip(path: Path, offset: int) -> None:
    """Changes one bit of a file, in place."""
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 8]))
