"""The stores of a comparison: one model with different dense weights, or one store."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from edgemoe.engine.engine import StoreModel
from edgemoe.errors import UserError
from edgemoe.kv.formats import KVFormat
from tools.peers.report import Json


def open_stores(options: argparse.Namespace) -> dict[Path, StoreModel]:
    """The stores by path, with the format of --kv-cache.

    Raises:
        UserError: a store is unusable, or two have different vocabularies or numbers of experts.
    """
    stores = {path: StoreModel.open(path) for path in options.store}
    sizes = {(each.shape.vocab, each.shape.layers, each.shape.experts_per_layer) for each in stores.values()}
    if len(sizes) > 1:
        raise UserError(
            "stores of one model",
            f"(vocabulary, layers, experts) {sorted(sizes)}",
            "give stores of one model",
        )
    if options.kv_cache:
        kv = KVFormat(options.kv_cache, options.kv_cache)
        stores = {path: each.with_kv(kv) for path, each in stores.items()}
    return stores


def sizes_of(stores: Mapping[Path, StoreModel]) -> Json:
    """Each store's bytes on the disk, its dense weights' bits, and the bytes of these that a token reads, by name."""
    return {
        path.name: {
            "bytes": sum(file.stat().st_size for file in path.iterdir()),
            "dense_bits": store.manifest.dense_bits,
            "dense_bytes_per_token": store.dense_bytes_per_token,
        }
        for path, store in stores.items()
    }
