"""Dense weights: every parameter that is not an expert's, read once into memory and kept there.

Linear layers and embeddings are replaced by modules that know two things torch's own do not: weights at
8 bits per output row, and that on a CPU without bf16 instructions a product of several rows is several times
faster in float32, converted a slice of the weight at a time.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from edgemoe.kernels.cpu import fast_bf16
from storage.errors import TruncatedFile
from storage.header import read_header

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I8": torch.int8}

SLICE_BYTES = 1 << 25
"""Largest piece of a weight, in bytes of float32, that is converted at a time. Part of the workspace."""

_INT8_KERNEL_UP_TO = 16
"""Rows up to which the 8-bit kernel is faster than converting the weight (docs/decisions/0003)."""


def dense_bytes(path: Path) -> int:
    """Bytes of memory that the tensors of dense.safetensors take."""
    return sum(tensor.range.length for tensor in read_header(path).tensors.values())


def load_dense(path: Path) -> dict[str, torch.Tensor]:
    """Reads every tensor of dense.safetensors into memory of its own, once, without mapping the file.

    Raises:
        BadHeader, TruncatedFile: naming the file.
    """
    out = {}
    with path.open("rb", buffering=0) as file:
        for name, entry in read_header(path).tensors.items():
            tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
            raw = tensor.view(torch.uint8).reshape(-1).numpy().data
            file.seek(entry.range.offset)
            done = 0
            while done < len(raw):
                got = file.readinto(raw[done : done + (1 << 24)])
                if not got:
                    raise TruncatedFile(
                        f"tensor {name} of {len(raw)} bytes was wanted at {entry.range.offset} in {path}",
                        f"the file ends after {done} of them",
                        "Run `edgemoe verify` on the store and convert the model again",
                    )
                done += got
            os.posix_fadvise(file.fileno(), entry.range.offset, entry.range.length, os.POSIX_FADV_DONTNEED)
            out[name] = tensor
    return out


class DenseLinear(nn.Module):
    """y = x W^T + b for a weight bf16 [N, K], or int8 [N, K] with a scale per row."""

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale, self.bias = scale, bias
        self.out_features, self.in_features = weight.shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """bf16 [..., K] -> bf16 [..., N]. The way taken depends on the number of rows only."""
        flat = x.reshape(-1, self.in_features)
        rows = flat.shape[0]
        if self.scale is not None and rows <= _INT8_KERNEL_UP_TO:
            y: torch.Tensor = torch.ops.aten._weight_int8pack_mm(flat.contiguous(), self.weight, self.scale)
        elif self.scale is None and (rows == 1 or fast_bf16()):
            y = F.linear(flat, self.weight)
        else:
            y = self._by_slices(flat)
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], self.out_features)

    def _by_slices(self, flat: torch.Tensor) -> torch.Tensor:
        dtype = torch.bfloat16 if fast_bf16() else torch.float32
        x = flat.to(dtype)
        y = flat.new_empty(flat.shape[0], self.out_features)
        step = max(SLICE_BYTES // (4 * self.in_features), 1)
        for start in range(0, self.out_features, step):
            end = min(start + step, self.out_features)
            part = x @ self.weight[start:end].to(dtype).t()
            if self.scale is not None:
                part.mul_(self.scale[start:end])
            y[:, start:end] = part
        return y


class DenseEmbedding(nn.Module):
    """Rows of a table bf16 [V, H], or int8 [V, H] with a scale per row."""

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = scale

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [...] -> bf16 [..., H]."""
        rows = F.embedding(ids, self.weight)
        if self.scale is None:
            return rows
        return rows.to(self.scale.dtype) * self.scale[ids].unsqueeze(-1)
