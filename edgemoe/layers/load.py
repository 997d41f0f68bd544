"""Reads a store's dense weights into memory."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from storage.device import Device
from storage.errors import TruncatedFile
from storage.header import read_header

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I8": torch.int8}

_PIECE = 1 << 24
"""Bytes of one read."""

_ALIGNMENT = 256
"""Bytes that a device's allocations are aligned to, and its products want of their weights."""


def load_dense(path: Path, device: Device | None = None) -> dict[str, torch.Tensor]:
    """Reads every tensor of dense.safetensors, without mapping the file and past the page cache.

    On a device all tensors share one allocation: its allocator would round each of them up.

    Returns:
        name -> tensor, in RAM or on the device.

    Raises:
        BadHeader, TruncatedFile: naming the file.
        torch.OutOfMemoryError: the device has too little memory.
    """
    out = {}
    entries = read_header(path).tensors
    rest = device.allocate(sum(_aligned(e.range.length) for e in entries.values())) if device else None
    with path.open("rb", buffering=0) as file:
        for name, entry in entries.items():
            tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
            raw = tensor.view(torch.uint8).reshape(-1).numpy().data
            file.seek(entry.range.offset)
            done = 0
            while done < len(raw):
                got = file.readinto(raw[done : done + _PIECE])
                if not got:
                    raise TruncatedFile(
                        f"tensor {name} of {len(raw)} bytes at {entry.range.offset} in {path}",
                        f"the end of the file after {done} of them",
                        "run `edgemoe verify` on the store and convert the model again",
                    )
                done += got
            os.posix_fadvise(file.fileno(), entry.range.offset, entry.range.length, os.POSIX_FADV_DONTNEED)
            if rest is not None:
                own, rest = rest[: len(raw)], rest[_aligned(len(raw)) :]
                own.copy_(torch.frombuffer(raw, dtype=torch.uint8))
                tensor = own.view(tensor.dtype).view(tensor.shape)
            out[name] = tensor
    return out


def _aligned(size: int) -> int:
    """Bytes to the next place where a tensor may begin."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
