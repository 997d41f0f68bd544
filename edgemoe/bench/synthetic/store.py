"""Writes a store with a real model's shapes and random weights, in minutes and a few hundred MB of memory.

Speed does not depend on the meaning of the weights. The store keeps the properties that speed depends on:
  - every expert is distinct. Its groups are drawn from a pool of Gaussian groups that are quantized as in a
    conversion: codes and parameters have the statistics of quantized Gaussian weights, and quantizing is done once;
  - routing is skewed: router rows are scaled by a lognormal of sigma 0.35, so that some experts are used far more;
  - dense weights are Gaussian with variance 1 / inputs, so that activations stay finite at any depth.
Another run with the same arguments resumes an unfinished store. Answers are gibberish.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import xxhash

from edgemoe.bench.synthetic.dense import Dense, dense_specs, dense_tensors
from edgemoe.bench.synthetic.tokenizer import companions
from edgemoe.bench.synthetic.workload import PRESETS, ExpertPool, Shape, random_dense
from edgemoe.console.progress import ByteProgress
from edgemoe.errors import UserError
from edgemoe.kernels.registry import compute
from edgemoe.models.cache import synthetic_directory
from edgemoe.storage.files.header import tensor_bytes
from edgemoe.storage.record.layout import LAYOUTS, Layout
from edgemoe.storage.record.planes import Bytes
from edgemoe.storage.store.manifest import MANIFEST_NAME
from edgemoe.storage.store.writer import StoreWriter


@dataclass(frozen=True)
class Synthetic:
    """A store that `edgemoe bench --synthetic` makes.

    Args:
        shape: the model's shape.
        max_level: bits of an expert weight, 8 or 4.
        dense_bits: bits of the other matrices, one of manifest.DENSE_BITS.
    """

    shape: Shape
    max_level: int = 8
    dense_bits: int = 16


SYNTHETIC = {
    "w1": Synthetic(replace(PRESETS["qwen3-30b-a3b"], layers=16, vocab=32000), max_level=4, dense_bits=8),
    **{name: Synthetic(shape) for name, shape in PRESETS.items()},
}
"""Name -> store. w1 has 9.7 billion parameters: a third of Qwen3-30B-A3B's layers."""


def synthetic_store(name: str, layout: str) -> Path:
    """Returns the directory of a store in the cache, which is made first where it is not complete.

    Args:
        name: one of SYNTHETIC.
        layout: layout of the store's records.

    Raises:
        UserError: there is no such store.
        as synthesize.
    """
    if name not in SYNTHETIC:
        raise UserError(f"one of {', '.join(SYNTHETIC)} for --synthetic", repr(name), "choose one of them")
    wanted, directory = SYNTHETIC[name], synthetic_directory() / f"{name}-{layout}"
    if not (directory / MANIFEST_NAME).exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with ByteProgress(f"synthesizing {name}") as progress:
            synthesize(
                directory,
                wanted,
                partial(random_dense, wanted.shape, 0),
                source=source_of(wanted.shape, "random", 0),
                seed=0,
                update=progress.update,
                layout=LAYOUTS[layout],
            )
    return directory


def source_of(shape: Shape, origin: str, seed: int) -> str:
    """A fingerprint of a store's shape, dense weights and seed."""
    return f"synthetic-{xxhash.xxh3_128_hexdigest(repr((shape, origin, seed)).encode())}"


@contextmanager
def _one_thread() -> Iterator[None]:
    """Experts are made at the same time, each by one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Counted:
    """Counts written bytes and reports them to `update` together with the total."""

    def __init__(self, total: int, update: Callable[[int, int], None]) -> None:
        self._done, self._total, self._update = 0, total, update

    def add(self, size: int) -> None:
        """Counts `size` more bytes."""
        self._done += size
        self._update(self._done, self._total)

    def records(self, records: Iterable[Bytes]) -> Iterator[Bytes]:
        """Yields the records; counts each when the writer requests its successor."""
        for record in records:
            yield record
            self.add(record.nbytes)

    def tensors(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors; counts each when the writer requests its successor."""
        for name, tensor in tensors:
            yield name, tensor
            self.add(tensor.nbytes)


def synthesize(
    destination: Path,
    model: Synthetic,
    dense: Dense,
    *,
    source: str,
    seed: int,
    update: Callable[[int, int], None],
    layout: Layout | None = None,
) -> None:
    """Writes a store, or the missing rest of one. Keeps one dense tensor, four experts per core and the pool in memory.

    Args:
        destination: a new directory, or a store of the same source and options; a finished store stays as it is.
        model: shape and bits of the store.
        dense: makes the dense tensors.
        source: fingerprint of shape, dense and seed.
        seed: seed of the experts.
        update: called with the bytes done and the total bytes.
        layout: layout of the records; None: the layout of this machine's CPU.

    Raises:
        UserError: the shape cannot be made, or the directory contains something else.
        StoreBusy: another process writes the store.
        DoesNotFit: the disk has too few free bytes.
    """
    geometry, layout = model.shape.geometry(model.max_level), layout or compute().layout
    pool = ExpertPool(geometry, seed, layout)
    with (
        companions(model.shape) as files,
        _one_thread(),
        StoreWriter(
            destination, geometry=geometry, layout=layout, source=source, dense_bits=model.dense_bits
        ) as writer,
    ):
        if not (destination / MANIFEST_NAME).exists():
            _write(writer, model, pool, dense, update)
            for path in files:
                writer.copy(path)
            writer.finish()


def _write(
    writer: StoreWriter,
    model: Synthetic,
    pool: ExpertPool,
    dense: Dense,
    update: Callable[[int, int], None],
) -> None:
    """Writes the layers that are missing, and the dense tensors."""
    shape, specs = model.shape, dense_specs(model.shape, model.dense_bits)
    layer_bytes = shape.experts * shape.geometry(model.max_level).record_bytes
    total = shape.layers * layer_bytes + sum(tensor_bytes(*spec) for spec in specs.values())
    finished, counted = writer.finished_layers(), Counted(total, update)
    counted.add(len(finished) * layer_bytes)
    writer.require_free(total - len(finished) * layer_bytes)
    for layer in sorted(set(range(shape.layers)) - finished):
        writer.write_layer(layer, shape.experts, counted.records(pool.records(layer, shape.experts)))
    writer.write_dense(specs, counted.tensors(dense_tensors(shape, dense, model.dense_bits)))
