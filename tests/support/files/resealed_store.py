"""Changes of a store that its manifest knows about: checksums and sizes fit, and the contents contradict each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import xxhash
from safetensors.torch import load_file, save_file

from edgemoe.storage.store.manifest import MANIFEST_NAME, Manifest
from edgemoe.storage.store.manifest_entries import FileEntry

Tensors = dict[str, torch.Tensor]


def edit_manifest(store: Path, change: Callable[[Manifest], Manifest]) -> None:
    """Replaces store.json by what `change` returns."""
    change(Manifest.load(store)).save(store / MANIFEST_NAME)


def reseal(store: Path, name: str) -> None:
    """Writes the size and checksum that a file has now into the manifest; an absent file is left out of it."""
    manifest = Manifest.load(store)
    files = {known: entry for known, entry in manifest.files.items() if known != name}
    if (store / name).exists():
        raw = (store / name).read_bytes()
        files[name] = FileEntry(len(raw), xxhash.xxh3_64_intdigest(raw))
    replace(manifest, files=files).save(store / MANIFEST_NAME)


def without_tokenizer(store: Path) -> None:
    """Makes a store of a checkpoint that had no tokenizer."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (store / name).unlink(missing_ok=True)
        reseal(store, name)


def edit_dense(store: Path, change: Callable[[Tensors], object]) -> None:
    """Lets `change` alter the dense tensors of a store in place."""
    tensors = load_file(store / "dense.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, store / "dense.safetensors")
    reseal(store, "dense.safetensors")
