"""The file of a store's dense weights, written with one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
import xxhash

from edgemoe.storage.files.atomic import replacing, write_all
from edgemoe.storage.files.header import header_bytes, tensor_bytes
from edgemoe.storage.store.manifest_entries import FileEntry


def write_dense_file(
    path: Path, specs: Mapping[str, tuple[str, Sequence[int]]], tensors: Iterable[tuple[str, torch.Tensor]]
) -> FileEntry:
    """Writes tensors to a safetensors file, which appears once it is whole.

    Args:
        path: the file.
        specs: name -> (safetensors' dtype, shape), in the order of the file.
        tensors: (name, tensor) in the same order, with the spec's shape and element type.

    Returns:
        its size and checksum.

    Raises:
        ValueError: the tensors differ from the specs; no file is written.
        DoesNotFit: the disk is full.
    """
    header = header_bytes(specs, {"format": "pt"})
    expected = [(name, tensor_bytes(dtype, shape), tuple(shape)) for name, (dtype, shape) in specs.items()]
    digest = xxhash.xxh3_64(header)
    total = len(header) + sum(nbytes for _, nbytes, _ in expected)
    with replacing(path, total) as fd:
        write_all(fd, header)
        for wanted, (name, tensor) in zip(expected, tensors, strict=True):
            raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
            got = (name, raw.nbytes, tuple(tensor.shape))
            if got != wanted:
                raise ValueError(f"expected the tensor {wanted} (name, bytes, shape), got {got}")
            digest.update(raw)
            write_all(fd, raw)
    return FileEntry(total, digest.intdigest())
