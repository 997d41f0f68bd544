"""Compensators of random codes, and their numbers by the format's definition, bit by bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import xxhash

from edgemoe.storage.base import BLOCK
from edgemoe.storage.compensators.geometry import CompensatorGeometry
from edgemoe.storage.compensators.index import FOLDER, CompensatorEntry, CompensatorIndex, LayerCompensators
from edgemoe.storage.compensators.low_rank import pack
from edgemoe.storage.files.unbuffered import aligned
from edgemoe.storage.record.offsets import RecordGeometry
from edgemoe.storage.store.manifest import Manifest


def random_compensator(
    geometry: RecordGeometry, ranks: tuple[int, int, int], seed: int, size: float = 0.05
) -> tuple[np.ndarray, CompensatorGeometry]:
    """The bytes of a compensator of random codes and scales near `size`, of either sign."""
    made, random = CompensatorGeometry.of(geometry, ranks), np.random.default_rng(seed)
    raw = aligned(max(made.nbytes, BLOCK))
    raw[:] = 0
    for array in made.arrays.values():
        codes = random.integers(0, 8, (array.rows, array.groups, 64)).astype(np.uint8)
        scales = random.normal(size=(array.rows, array.groups)) * size
        pack(torch.from_numpy(codes), torch.from_numpy(scales).bfloat16(), array, raw)
    return raw[: made.nbytes], made


def numbers(raw: np.ndarray, geometry: CompensatorGeometry, matrix: str, side: str) -> np.ndarray:
    """float64 [rows, columns] of one array, each code by its own bits: lane i % 8, bit 3 (i // 8)."""
    array = geometry.arrays[matrix, side]
    codes = raw[array.codes.offset : array.codes.end].reshape(-1, 8, 3).astype(np.int64)
    words = codes[..., 0] | codes[..., 1] << 8 | codes[..., 2] << 16
    made = np.stack([words >> 3 * i & 7 for i in range(8)], axis=1).reshape(array.rows, 64 * array.groups) - 4
    bits = raw[array.scales.offset : array.scales.end].copy().view(np.uint16).astype(np.uint32) << 16
    scales = bits.view(np.float32).astype(np.float64).reshape(array.rows, array.groups)
    return (made * scales.repeat(64, 1))[:, : array.columns]


def low_rank_weights(raw: np.ndarray, geometry: CompensatorGeometry) -> dict[str, torch.Tensor]:
    """U V of gate_up and of down, float64 [N, K]."""
    gate, up, down = geometry.ranks
    v, u = (numbers(raw, geometry, "gate_up", side) for side in "vu")
    both = [u[:gate].T @ v[:gate], u[gate:].T @ v[gate:]]
    assert gate + up == len(v)
    assert down == len(numbers(raw, geometry, "down", "v"))
    last = numbers(raw, geometry, "down", "u").T @ numbers(raw, geometry, "down", "v")
    return {"gate_up": torch.from_numpy(np.concatenate(both)), "down": torch.from_numpy(last)}


def add_random(
    store: Path, ranks: Callable[[int, int], tuple[int, int, int]], base_level: int = 2, size: float = 0.05
) -> Manifest:
    """Adds compensators of random codes to a store, with the ranks of (layer, expert)."""
    manifest, layers = Manifest.load(store), {}
    for layer, found in manifest.layers.items():
        entries, name = [], f"random-{layer}.bin"
        (store / FOLDER).mkdir(exist_ok=True)
        with (store / FOLDER / name).open("wb") as file:
            for expert in range(len(found.records)):
                of = ranks(layer, expert)
                raw, _ = random_compensator(manifest.geometry, of, 1000 * layer + expert, size)
                checksum = xxhash.xxh3_64_intdigest(raw.data)
                entries.append(CompensatorEntry(file.tell(), len(raw), of, checksum))
                file.write(raw.data)
        layers[layer] = LayerCompensators(name, tuple(entries))
    index = CompensatorIndex(base_level, "uniform", 8, "random", 0.5, layers)
    content = json.loads((store / "store.json").read_text()) | {"compensators": index.to_json()}
    (store / "store.json").write_text(json.dumps(content))
    return Manifest.load(store)
