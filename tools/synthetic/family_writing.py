"""Makes a store with the sizes of a config of any family and random weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from edgemoe.bench.synthetic.store import Counted
from edgemoe.bench.synthetic.tokenizer import save_tokenizer
from edgemoe.families.base import Family
from edgemoe.families.table import family_of
from edgemoe.layers.skeleton import skeleton, without_weights
from edgemoe.storage.convert.config import bounded_config
from edgemoe.storage.files.header import tensor_bytes
from edgemoe.storage.record.layout import Layout
from edgemoe.storage.store.manifest import MANIFEST_NAME
from edgemoe.storage.store.writer import StoreWriter
from tools.synthetic.family_dense import RandomDense
from tools.synthetic.family_experts import Experts


def make_family_store(
    config: Any,
    destination: Path,
    *,
    max_level: int,
    dense_bits: int,
    layout: Layout,
    update: Callable[[int, int], None],
    distinct: int | None = None,
) -> None:
    """Writes a store, or the missing rest of one; a finished store stays as it is.

    Args:
        config: transformers' config of the model.
        destination: a new directory, or a store of the same config and bits.
        max_level: the highest level of experts, 8 or 4.
        dense_bits: bits of the other matrices, one of DENSE_BITS.
        layout: the layout of the records.
        update: called with the bytes done and the total bytes.
        distinct: number of layers with experts of their own, see Experts.

    Raises:
        ModelRefused, UserError, StoreBusy, DoesNotFit: as family_of, ExpertPool and StoreWriter.
    """
    if (destination / MANIFEST_NAME).exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        known = _write_config(config, place)
        family, model = family_of(known), skeleton(place, known)
        without_weights(model)
        source = _source_of(known, max_level, dense_bits, distinct)
        experts = Experts(family, max_level, layout, distinct)
        with StoreWriter(
            destination, geometry=experts.geometry, layout=layout, source=source, dense_bits=dense_bits
        ) as writer:
            _write(writer, family, experts, RandomDense(model, family, dense_bits), update)
            for path in sorted(place.iterdir()):
                writer.copy(path)
            writer.finish()


def _source_of(*identity: object) -> str:
    """A fingerprint of a store's contents."""
    return f"synthetic-{xxhash.xxh3_128_hexdigest(repr(identity).encode())}"


def _write_config(config: Any, place: Path) -> dict[str, Any]:
    """Writes config.json and a tokenizer to a folder. Returns the config as it is read from there."""
    text = json.dumps(config.to_dict(), default=str)
    (place / "config.json").write_text(text)
    save_tokenizer(config.vocab_size, place)
    return bounded_config(json.loads(text))


def _write(
    writer: StoreWriter,
    family: Family,
    experts: Experts,
    dense: RandomDense,
    update: Callable[[int, int], None],
) -> None:
    """Writes the layers that are missing, and the dense tensors."""
    layer_bytes = family.experts * experts.geometry.record_bytes
    specs, finished = dense.specs(), writer.finished_layers()
    total = len(family.moe_layers) * layer_bytes + sum(tensor_bytes(*spec) for spec in specs.values())
    counted = Counted(total, update)
    counted.add(len(finished) * layer_bytes)
    writer.require_free(total - len(finished) * layer_bytes)
    for layer in family.moe_layers:
        if layer not in finished:
            writer.write_layer(layer, family.experts, counted.records(experts.records(layer, family.experts)))
    writer.write_dense(specs, counted.tensors(dense.tensors()))
