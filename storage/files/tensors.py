"""The stored tensors in a directory's safetensors files: read into memory, never mapped.

Files outside the directory and pickles are never opened. `storage/formats` interprets the bytes of a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch

from edgemoe.errors import ModelRefused
from edgemoe.storage.files.header import TensorEntry, read_header
from edgemoe.storage.files.source_file import read_range
from edgemoe.storage.files.untrusted import (
    DOWNLOAD_AGAIN,
    USE_SOURCE,
    inside,
    no_tensor,
    read_json,
    shortened,
)

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""safetensors' name of every element type that is read -> torch's dtype."""

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


class StoredTensors:
    """The tensors of a directory by name; created by `open`. Thread-safe; keeps no file open.

    Attributes:
        directory: the directory of the files.
    """

    def __init__(self, directory: Path, tensors: dict[str, TensorEntry]) -> None:
        self.directory = directory
        self._tensors = tensors

    @classmethod
    def open(cls, directory: Path) -> StoredTensors:
        """Reads the index, if there is one, and every header; no weights.

        Raises:
            ModelRefused: no safetensors weights, a file outside the directory, an invalid index.
            MissingTensor: a file of the index is missing.
            BadHeader, TruncatedFile: a header that contradicts its file.
        """
        if (directory / WEIGHTS_NAME).exists():
            tensors = read_header(inside(directory, WEIGHTS_NAME)).tensors
        elif (directory / INDEX_NAME).exists():
            tensors = _indexed(directory)
        else:
            raise _no_weights(directory)
        return cls(directory, tensors)

    def names(self) -> set[str]:
        """Every tensor's name."""
        return set(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> TensorEntry:
        """Returns a tensor's entry. Like every method that takes a name, raises MissingTensor for an unknown one."""
        if name not in self._tensors:
            raise no_tensor(f"{name} in {self.directory}")
        return self._tensors[name]

    def read(self, name: str) -> torch.Tensor:
        """Reads the whole tensor, in its own dtype and shape.

        Raises:
            ModelRefused: its type is not in DTYPES.
            TruncatedFile: the file has become shorter since `open`.
        """
        return _read(name, self[name], 0, self[name].shape)

    def read_slice(self, name: str, index: int) -> torch.Tensor:
        """Reads tensor[index] alone: one expert of a fused tensor [E, N, K] as [N, K].

        Raises:
            IndexError: index is not in 0 .. E - 1.
            ModelRefused: its type is not in DTYPES.
            TruncatedFile: the file has become shorter since `open`.
        """
        count, *rest = self[name].shape
        if not 0 <= index < count:
            raise IndexError(f"expected an index from 0 to {count - 1} into {name}, got {index}")
        return _read(name, self[name], index * (self[name].range.length // count), tuple(rest))

    def places(self) -> Iterator[tuple[str, Path]]:
        """Yields name and file of every tensor, sorted by name."""
        for name, entry in sorted(self._tensors.items()):
            yield name, entry.path


def _indexed(directory: Path) -> dict[str, TensorEntry]:
    """The tensors that the index of a sharded checkpoint names, as far as its files have them."""
    weight_map = read_json(directory, INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ModelRefused(
            f"a weight_map from tensors to files in {directory / INDEX_NAME}",
            shortened(weight_map),
            DOWNLOAD_AGAIN,
        )
    for file in set(weight_map.values()):
        if not file.endswith(".safetensors"):
            raise _pickled(directory, file)
    headers = {file: read_header(inside(directory, file)) for file in sorted(set(weight_map.values()))}
    found = {}
    for name, file in weight_map.items():
        # A stale entry names another of the files, or a tensor that is gone; what needs that one names it then.
        places = [file, *headers]
        if place := next((each for each in places if name in headers[each].tensors), None):
            found[name] = headers[place].tensors[name]
    return found


def _no_weights(directory: Path) -> ModelRefused:
    for path in sorted(directory.iterdir()):
        if path.suffix in _PICKLED:
            return _pickled(directory, path.name)
    return ModelRefused(f"weights in {directory}", f"neither {WEIGHTS_NAME} nor {INDEX_NAME}", DOWNLOAD_AGAIN)


def _pickled(directory: Path, name: str) -> ModelRefused:
    return ModelRefused(
        f"weights as safetensors in {directory}",
        f"{shortened(name)}, which may be a pickle and run code when it is opened",
        "convert the checkpoint to safetensors on a machine where it is trusted",
    )


def _read(name: str, entry: TensorEntry, skipped: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Reads a tensor of this shape from `skipped` bytes after the start of a stored one."""
    if entry.dtype not in DTYPES:
        raise ModelRefused(
            f"{name} with a type among {', '.join(DTYPES)}", f"{entry.dtype} in {entry.path}", USE_SOURCE
        )
    dtype, offset = DTYPES[entry.dtype], entry.range.offset + skipped
    raw = read_bytes(entry.path, offset, prod(shape) * dtype.itemsize)
    return (raw.clone() if offset % dtype.itemsize else raw).view(dtype).view(shape)


def read_bytes(path: Path, offset: int, size: int) -> torch.Tensor:
    """Reads `size` bytes of a file from `offset` on, as uint8 [size].

    Raises:
        TruncatedFile, MissingTensor, ReadFailed: from read_range.
    """
    return torch.from_numpy(read_range(path, offset, size))
