"""Headers of safetensors files: checked when read, and padded when written so that data starts on a block.

The safetensors library accepts duplicate keys, and other readers accept more. Here a header is refused unless it
assigns every byte of its file to exactly one tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from edgemoe.errors import BadHeader, TruncatedFile
from edgemoe.storage.base import BLOCK, ByteRange
from edgemoe.storage.files.retry import open_regular, read_errors
from edgemoe.storage.files.untrusted import shortened

HEADER_LIMIT = 32 << 20
"""Bytes of JSON. All 91,991 tensors of the largest known checkpoint would take 12 MB in one file."""

DTYPE_BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""safetensors' name of an element type -> bits of one element."""

Spec = tuple[str, tuple[int, ...]]
"""safetensors' dtype and the shape of a tensor."""

_ACTION = "download or convert the file again"
_MAX_DIMENSIONS = 64
_MAX_SIZE = 2**63 - 1


@dataclass(frozen=True)
class TensorEntry:
    """Type, shape and place of a tensor.

    Args:
        dtype: safetensors' name, a key of DTYPE_BITS.
        shape: elements per dimension.
        range: bytes, counted from the start of the file.
        path: the path of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    range: ByteRange
    path: Path

    @property
    def spec(self) -> Spec:
        """Type and shape."""
        return self.dtype, self.shape


@dataclass(frozen=True)
class Header:
    """The contents of a safetensors header.

    Args:
        tensors: name -> entry, in the order of the file's JSON.
        metadata: free text by key.
        data_start: bytes before the first tensor.
    """

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    data_start: int


def read_header(path: Path) -> Header:
    """Reads and checks a file's header, without its data.

    Raises:
        BadHeader: with the file and the wrong value.
        TruncatedFile: the file ends inside the header or before the last tensor.
        MissingTensor: the file does not exist.
        ReadFailed: the operating system refuses a read.
    """
    try:
        with read_errors(f"a safetensors file {path}", _ACTION), BufferedReader(open_regular(path)) as file:
            return _read(file, path)
    except RecursionError as error:  # JSON that parses may still be too deep for repr
        raise _bad(path, "JSON nested too deeply") from error


def header_bytes(
    tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str], align_data_to: int = BLOCK
) -> bytes:
    """Builds the header of a file that holds these tensors one after another, in this order.

    Args:
        tensors: name -> (dtype, a key of DTYPE_BITS; shape).
        metadata: free text by key.
        align_data_to: bytes; the header is padded with spaces to a multiple of it.
    """
    content: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + tensor_bytes(dtype, shape)
        content[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % align_data_to)
    return len(text).to_bytes(8, "little") + text


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor. `dtype` is a key of DTYPE_BITS."""
    return prod(shape) * DTYPE_BITS[dtype] // 8


def strict_json(raw: bytes) -> object:
    """Parses UTF-8 JSON in which every key of an object is unique.

    Raises:
        ValueError: with the fault; no other error, whatever the bytes are.
    """
    try:
        parsed: object = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("JSON nested too deeply") from error
    return parsed


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    out: dict[str, object] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"key {shortened(key)} twice")
        out[key] = value
    return out


def _bad(path: Path, finding: str) -> BadHeader:
    return BadHeader(f"a valid safetensors header in {path}", finding, _ACTION)


def _read(file: BinaryIO, path: Path) -> Header:
    size = file.seek(0, 2)
    file.seek(0)
    prefix = file.read(8)
    if len(prefix) < 8:
        raise TruncatedFile(f"a safetensors header in {path}", f"a file of {size} bytes", _ACTION)
    length = int.from_bytes(prefix, "little")
    if length > min(HEADER_LIMIT, size - 8):
        raise _bad(
            path, f"{length} bytes of header in a file of {size} bytes, where {HEADER_LIMIT} are allowed"
        )
    raw = file.read(length)
    if len(raw) < length:
        raise TruncatedFile(f"{length} bytes of header in {path}", f"{len(raw)} bytes", _ACTION)
    try:
        content = strict_json(raw)
    except ValueError as error:
        raise _bad(path, f"JSON that safetensors does not allow ({shortened(str(error))})") from error
    if not isinstance(content, dict):
        raise _bad(path, f"a {type(content).__name__}, not an object")
    metadata = _metadata(content.pop("__metadata__", {}), path)
    tensors = {name: _entry(name, value, 8 + length, path) for name, value in content.items()}
    _check_cover(tensors, 8 + length, size, path)
    return Header(tensors, metadata, 8 + length)


def _metadata(value: object, path: Path) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise _bad(path, f"__metadata__ {shortened(value)}, not texts by key")
    return value


def _entry(name: str, value: object, data_start: int, path: Path) -> TensorEntry:
    """Checks one tensor: types, bounds, and that its shape takes the bytes of its range."""
    label = f"tensor {shortened(name)}"
    # json accepts an escaped half of a surrogate pair, which cannot be printed.
    if any("\ud800" <= letter <= "\udfff" for letter in name):
        raise _bad(path, f"{label} with a name that is not Unicode")
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise _bad(path, f"{label} as {shortened(value)}, not dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _bad(path, f"{label} of unknown dtype {shortened(dtype)}")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise _bad(path, f"{label} of shape {shortened(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _bad(path, f"{label} with data_offsets {shortened(offsets)}")
    begin, end = offsets
    if prod(shape) * DTYPE_BITS[dtype] != (end - begin) * 8:
        raise _bad(path, f"{label}, {dtype} of shape {shortened(shape)}, in {end - begin} bytes")
    return TensorEntry(dtype, tuple(shape), ByteRange(data_start + begin, end - begin), path)


def _are_sizes(value: Any) -> bool:
    # isinstance accepts a bool as an int, and true is not a size.
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= _MAX_SIZE for n in value)


def _check_cover(tensors: Mapping[str, TensorEntry], data_start: int, size: int, path: Path) -> None:
    """Checks that the tensors cover every byte of the data exactly once."""
    at = data_start
    for name, entry in sorted(tensors.items(), key=lambda item: item[1].range):
        if entry.range.offset != at and entry.range.end <= size:
            what = "an overlap with" if entry.range.offset < at else "a hole after"
            raise _bad(
                path, f"tensor {shortened(name)} at {entry.range.offset}, {what} the tensor that ends at {at}"
            )
        at = max(at, entry.range.end)
    if at > size:
        raise TruncatedFile(f"{at} bytes in {path}, as its header says", f"{size} bytes", _ACTION)
    if at < size:
        raise _bad(path, f"{size - at} bytes at the file's end that belong to no tensor")
