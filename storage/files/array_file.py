"""A small file of arrays with a description and a checksum over all of it, in the format of safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from edgemoe.errors import BadHeader, ChecksumMismatch
from edgemoe.storage.files.atomic import replacing, write_all
from edgemoe.storage.files.header import header_bytes, read_header, strict_json
from edgemoe.storage.files.source_file import read_whole

SIZE_LIMIT = 64 << 20
"""Bytes of a file."""

_DTYPES = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "U16": "<u2", "I64": "<i8"}
"""safetensors' name of an element type -> numpy's."""

_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_CHECKSUM, _DESCRIPTION = "xxh3_64", "description"
_ZEROS = "0" * 16
_ACTION = "remove the file, or run `edgemoe calibrate` to write it again"

Arrays = Mapping[str, npt.NDArray[Any]]


def write_arrays(path: Path, description: Mapping[str, Any], arrays: Arrays) -> None:
    """Writes a file atomically; equal arguments give equal bytes.

    Args:
        path: the path of the file; its directory exists.
        description: values for JSON.
        arrays: name -> array, with element type F16, F32, F64, U16 or I64.

    Raises:
        DoesNotFit: the disk is full.
        WriteFailed: the operating system refused a write.
    """
    specs = {name: (_NAMES[array.dtype], array.shape) for name, array in arrays.items()}
    data = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())

    def raw(checksum: str) -> bytes:
        metadata = {_CHECKSUM: checksum, _DESCRIPTION: json.dumps(description)}
        return header_bytes(specs, metadata, 64) + data

    whole = raw(xxhash.xxh3_64_hexdigest(raw(_ZEROS)))
    with replacing(path, len(whole)) as fd:
        write_all(fd, whole)


def read_arrays(path: Path) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Reads a file that write_arrays wrote.

    Returns:
        the description, and the arrays by name.

    Raises:
        DamagedData: with the file; no other error, whatever its bytes are.
    """
    header = read_header(path)
    size = header.data_start + sum(tensor.range.length for tensor in header.tensors.values())
    if size > SIZE_LIMIT:
        raise BadHeader(f"at most {SIZE_LIMIT} bytes in {path}", f"{size} bytes", _ACTION)
    raw, checksum = read_whole(path), header.metadata.get(_CHECKSUM, "")
    found = xxhash.xxh3_64_hexdigest(raw.replace(checksum.encode(), _ZEROS.encode(), 1) if checksum else raw)
    if found != checksum:
        raise ChecksumMismatch(f"{path} with checksum {checksum or '(none)'}", found, _ACTION)
    try:
        description = strict_json(header.metadata.get(_DESCRIPTION, "").encode())
        arrays = {
            name: np.frombuffer(raw, _DTYPES[one.dtype], offset=one.range.offset, count=_count(one.shape))
            .reshape(one.shape)
            .copy()
            for name, one in header.tensors.items()
        }
    except (ValueError, KeyError, MemoryError) as error:
        raise BadHeader(f"arrays with a description in {path}", repr(error)[:200], _ACTION) from error
    if not isinstance(description, dict):
        raise BadHeader(f"an object as description in {path}", repr(description)[:60], _ACTION)
    return description, arrays


def _count(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))
