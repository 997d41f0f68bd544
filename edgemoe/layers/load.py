"""Reads a store's dense weights into memory."""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path

import torch
import xxhash

from edgemoe.errors import ChecksumMismatch, TruncatedFile
from edgemoe.machine.device import Device
from edgemoe.storage.files.header import read_header
from edgemoe.storage.files.retry import open_regular, read_errors
from edgemoe.storage.store.manifest_entries import FileEntry

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "I8": torch.int8,
    "U8": torch.uint8,
}

_ACTION = "run `edgemoe verify` on the store and convert the model again"

_PIECE = 1 << 24
"""Bytes of one read."""

_ALIGNMENT = 256
"""Bytes that a device's allocations are aligned to, and its products want of their weights."""


def load_dense(path: Path, file: FileEntry, device: Device | None = None) -> dict[str, torch.Tensor]:
    """Reads every tensor of dense.safetensors, without mapping the file and past the page cache.

    On a device all tensors share one allocation: its allocator would round each of them up.

    Args:
        path: the path of dense.safetensors.
        file: its size and checksum in the manifest; the bytes are hashed as they are read.
        device: where the tensors go; None: RAM.

    Returns:
        name -> tensor, in RAM or on the device.

    Raises:
        BadHeader, TruncatedFile, ChecksumMismatch: naming the file.
        torch.OutOfMemoryError: the device has too little memory.
    """
    out, digest = {}, xxhash.xxh3_64()
    header = read_header(path)
    # A header covers its file without gaps, so that the file's order is the tensors' by offset.
    entries = sorted(header.tensors.items(), key=lambda item: item[1].range.offset)
    rest = device.allocate(sum(_aligned(e.range.length) for _, e in entries)) if device else None
    with read_errors(f"{path}", _ACTION), open_regular(path) as opened:
        head = memoryview(bytearray(header.data_start))
        _fill(opened, head, path)
        digest.update(head)
        for name, entry in entries:
            tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
            raw = tensor.view(torch.uint8).reshape(-1).numpy().data
            _fill(opened, raw, path)
            digest.update(raw)
            os.posix_fadvise(opened.fileno(), entry.range.offset, entry.range.length, os.POSIX_FADV_DONTNEED)
            if rest is not None:
                tensor, rest = _placed(tensor, rest)
            out[name] = tensor
    if digest.intdigest() != file.checksum:
        raise ChecksumMismatch(
            f"{path} with checksum {file.checksum:016x}", f"checksum {digest.hexdigest()}", _ACTION
        )
    return out


def _fill(file: FileIO, into: memoryview, path: Path) -> None:
    """Fills a buffer from where the file is, a piece at a time."""
    done = 0
    while done < len(into):
        got = file.readinto(into[done : done + _PIECE])
        if not got:
            end = file.tell()
            raise TruncatedFile(f"{end + len(into) - done} bytes in {path}", f"{end}", _ACTION)
        done += got


def _placed(tensor: torch.Tensor, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies a tensor to the start of a device's memory, uint8; returns it there, and the memory after it."""
    raw = tensor.view(torch.uint8).reshape(-1)
    place = memory[: len(raw)].copy_(raw)
    return place.view(tensor.dtype).view(tensor.shape), memory[_aligned(len(raw)) :]


def _aligned(size: int) -> int:
    """Bytes to the next place where a tensor may begin."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
