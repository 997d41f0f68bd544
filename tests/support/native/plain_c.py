"""The compiled kernel's arithmetic in plain C (reference.c), compiled where a test first calls it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

SOURCE = Path(__file__).with_name("reference.c")


@cache
def _library() -> Any:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("expected a C compiler, for the reference in plain C, got none")
    with tempfile.TemporaryDirectory() as directory:
        built = Path(directory, "reference.so")
        flags = ["-O2", "-ffp-contract=off", "-shared", "-fPIC"]
        subprocess.run([compiler, *flags, "-o", str(built), str(SOURCE), "-lm"], check=True)
        return ctypes.CDLL(str(built))


def _sizes(*sizes: int) -> list[ctypes.c_int64]:
    return [ctypes.c_int64(size) for size in sizes]


def _at(*tensors: torch.Tensor) -> list[ctypes.c_void_p]:
    assert all(tensor.is_contiguous() for tensor in tensors)
    return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]


def expert(codes: torch.Tensor, pairs: torch.Tensor, level: int, group: int, x: torch.Tensor) -> torch.Tensor:
    """bf16 [T, K] times codes uint8 [N, K] of `level` bits with bf16 pairs [K / group, N, 2], to bf16 [T, N]."""
    rows, cols = codes.shape
    y = x.new_empty(len(x), rows)
    _library().reference_expert(
        *_at(codes, pairs), *_sizes(level, rows, cols, group), *_at(x), *_sizes(len(x)), *_at(y)
    )
    return y


def dense(codes: torch.Tensor, scales: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """bf16 [T, K] times int8 [N, K] with scales bf16 [N], to bf16 [T, N]."""
    y = x.new_empty(len(x), len(codes))
    _library().reference_dense(*_at(codes, scales), *_sizes(*codes.shape), *_at(x), *_sizes(len(x)), *_at(y))
    return y
