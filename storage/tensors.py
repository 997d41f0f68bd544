"""The stored tensors in a directory's safetensors files: read into memory, never mapped.

Files outside the directory and pickles are never opened. `storage/formats` interprets the bytes of a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from storage.errors import MissingTensor, ModelRefused
from storage.header import TensorEntry, read_header
from storage.source_file import read_range
from storage.untrusted import DOWNLOAD_AGAIN, USE_SOURCE, inside, read_json, shortened

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


class _Stored(NamedTuple):
    """File and entry of a tensor."""

    path: Path
    entry: TensorEntry


class StoredTensors:
    """The tensors of a directory by name; created by `open`. Thread-safe; keeps no file open.

    Attributes:
        directory: of the files.
    """

    def __init__(self, directory: Path, tensors: dict[str, _Stored]) -> None:
        self.directory = directory
        self._tensors = tensors

    @classmethod
    def open(cls, directory: Path) -> StoredTensors:
        """Reads the index, if there is one, and every header; no weights.

        Raises:
            ModelRefused: no safetensors weights, a file outside the directory, an invalid index.
            MissingTensor: a tensor or file of the index is missing.
            BadHeader, TruncatedFile: a header that contradicts its file.
        """
        if (directory / WEIGHTS_NAME).exists():
            path = inside(directory, WEIGHTS_NAME)
            tensors = {name: _Stored(path, entry) for name, entry in read_header(path).tensors.items()}
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

    def shape(self, name: str) -> tuple[int, ...]:
        """Elements per dimension. Like every method that takes a name, raises MissingTensor for an unknown one."""
        return tuple(self._find(name).entry.shape)

    def nbytes(self, name: str) -> int:
        """Bytes of the tensor on disk."""
        return self._find(name).entry.range.length

    def type_name(self, name: str) -> str:
        """safetensors' name of the element type."""
        return self._find(name).entry.dtype

    def place(self, name: str) -> Path:
        """The file that holds the tensor."""
        return self._find(name).path

    def read(self, name: str) -> torch.Tensor:
        """Reads the whole tensor, in its own dtype and shape.

        Raises:
            ModelRefused: its type is not in DTYPES.
            TruncatedFile: the file has become shorter since `open`.
        """
        stored = self._find(name)
        return _read(stored.path, stored.entry.range.offset, self._dtype(name), self.shape(name))

    def read_slice(self, name: str, index: int) -> torch.Tensor:
        """Reads tensor[index] alone: one expert of a fused tensor [E, N, K] as [N, K].

        Raises:
            IndexError: index is not in 0 .. E - 1.
            ModelRefused: its type is not in DTYPES.
            TruncatedFile: the file has become shorter since `open`.
        """
        stored = self._find(name)
        count, *rest = self.shape(name)
        if not 0 <= index < count:
            raise IndexError(f"expected an index from 0 to {count - 1} into {name}, got {index}")
        offset = stored.entry.range.offset + index * (stored.entry.range.length // count)
        return _read(stored.path, offset, self._dtype(name), tuple(rest))

    def places(self) -> Iterator[tuple[str, Path, int]]:
        """Yields (name, file, offset in the file in bytes) of every tensor, sorted by name."""
        for name, stored in sorted(self._tensors.items()):
            yield name, stored.path, stored.entry.range.offset

    def _dtype(self, name: str) -> torch.dtype:
        if (found := self.type_name(name)) not in DTYPES:
            raise ModelRefused(
                f"{name} with a type among {', '.join(DTYPES)}", f"{found} in {self.place(name)}", USE_SOURCE
            )
        return DTYPES[found]

    def _find(self, name: str) -> _Stored:
        if name not in self._tensors:
            raise MissingTensor(
                f"tensor {name} in {self.directory}", "no tensor of that name", DOWNLOAD_AGAIN
            )
        return self._tensors[name]


def _indexed(directory: Path) -> dict[str, _Stored]:
    """The tensors that the index of a sharded checkpoint names."""
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
    for name, file in weight_map.items():
        if name not in headers[file].tensors:
            raise MissingTensor(
                f"tensor {name} in {directory / file}, as {INDEX_NAME} says",
                "no tensor of that name",
                DOWNLOAD_AGAIN,
            )
    return {name: _Stored(directory / file, headers[file].tensors[name]) for name, file in weight_map.items()}


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


def _read(path: Path, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = read_bytes(path, offset, size)
    return (raw.clone() if offset % dtype.itemsize else raw).view(dtype).view(shape)


def read_bytes(path: Path, offset: int, size: int) -> torch.Tensor:
    """Reads `size` bytes of a file from `offset` on, as uint8 [size].

    Raises:
        TruncatedFile, MissingTensor, ReadFailed: from read_range.
    """
    return torch.from_numpy(read_range(path, offset, size))
