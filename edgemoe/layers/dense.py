"""Dense weights: every parameter that is not an expert's, read once into memory and kept there.

Linear layers and embeddings are replaced by modules that know two things torch's own do not: weights at
8 bits per output row, and that on a CPU without bf16 instructions a product of several rows is several times
faster in float32, converted a slice of the weight at a time.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from edgemoe.kernels import threads
from edgemoe.kernels.native import library as native
from edgemoe.kernels.torch_int4 import fast_bf16
from storage.device import Device
from storage.errors import TruncatedFile
from storage.header import read_header

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I8": torch.int8}

SLICE_BYTES = 1 << 25
"""Largest piece of a weight, in bytes of float32, that is converted at a time. Part of the workspace."""

_ALIGNMENT = 256
"""Bytes that a device's own allocations are aligned to, and products on it want of their weights."""

_INT8_KERNEL_UP_TO = 16
"""Rows up to which the 8-bit kernel is faster than converting the weight (docs/decisions/0003)."""


def dense_bytes(path: Path) -> int:
    """Bytes of memory that the tensors of dense.safetensors take."""
    return sum(tensor.range.length for tensor in read_header(path).tensors.values())


def widest_matrix(path: Path, vocab: int) -> int:
    """Largest side of a matrix in dense.safetensors, those with a row for each of `vocab` tokens aside."""
    shapes = (tensor.shape for tensor in read_header(path).tensors.values())
    return max((max(shape) for shape in shapes if len(shape) == 2 and shape[0] != vocab), default=0)


def load_dense(path: Path, device: Device | None = None) -> dict[str, torch.Tensor]:
    """Reads every tensor of dense.safetensors into memory of its own, once, without mapping the file.

    On a device all of them share one allocation: its allocator would round each of them up.

    Raises:
        BadHeader, TruncatedFile: naming the file.
        torch.OutOfMemoryError: the device has not so much.
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
                got = file.readinto(raw[done : done + (1 << 24)])
                if not got:
                    raise TruncatedFile(
                        f"tensor {name} of {len(raw)} bytes was wanted at {entry.range.offset} in {path}",
                        f"the file ends after {done} of them",
                        "Run `edgemoe verify` on the store and convert the model again",
                    )
                done += got
            os.posix_fadvise(file.fileno(), entry.range.offset, entry.range.length, os.POSIX_FADV_DONTNEED)
            if rest is not None:
                own, rest = rest[: len(raw)], rest[_aligned(len(raw)) :]
                own.copy_(torch.frombuffer(raw, dtype=torch.uint8))
                tensor = own.view(tensor.dtype).view(tensor.shape)
            out[name] = tensor
    return out


def in_huge_pages(tensors: Iterable[torch.Tensor]) -> None:
    """Has the system put what is large of tensors in RAM into huge pages, in place, as far as it can (Linux 6.1).

    A token reads all of it: from pages of 4 KiB memory gives less.
    """
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is None:
        return
    for start, size in {(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors}:
        first, end = -(-start // _HUGE) * _HUGE, (start + size) // _HUGE * _HUGE
        if first < end:
            advise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_COLLAPSE)


_HUGE = 1 << 21
"""Bytes of a huge page where they are smallest; where they are larger nothing happens."""

_MADV_COLLAPSE = 25


def _aligned(size: int) -> int:
    """Bytes until a place where any tensor may begin."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class DenseLinear(nn.Module):
    """y = x W^T + b for a weight bf16 [N, K], or int8 [N, K] with a scale per row."""

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale, self.bias = scale, bias
        self.out_features, self.in_features = weight.shape

    @classmethod
    def joined(cls, parts: Sequence[DenseLinear]) -> DenseLinear:
        """One layer that gives what all parts give, one after another: [..., sum of N].

        The parts go on working; from now on their weights are parts of its own.

        Args:
            parts: all with a scale or none, all with a bias or none.
        """

        def one(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
            given = [tensor for tensor in tensors if tensor is not None]
            assert len(given) in (0, len(parts))
            return torch.cat(given) if given else None

        weight = torch.cat([part.weight.data for part in parts])
        whole = cls(weight, one([part.scale for part in parts]), one([part.bias for part in parts]))
        sizes = [part.out_features for part in parts]
        for part, own in zip(parts, weight.split(sizes), strict=True):
            part.weight.data = own
        return whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """bf16 [..., K] -> bf16 [..., N]. The way taken depends on the number of rows only."""
        flat = x.reshape(-1, self.in_features)
        rows = flat.shape[0]
        if x.device.type != "cpu":
            y = F.linear(flat, self.weight) if self.scale is None else self._by_slices(flat)
        elif native.available() and (self.scale is not None or rows <= native.DENSE_BF16_UP_TO):
            y = native.dense_product(flat.contiguous(), self.weight, self.scale)
        elif self.scale is not None and rows <= _INT8_KERNEL_UP_TO:
            y = torch.ops.aten._weight_int8pack_mm(flat.contiguous(), self.weight, self.scale)
        elif self.scale is None and (rows == 1 or fast_bf16()):
            y = F.linear(flat, self.weight)
        else:
            y = self._by_slices(flat)
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], self.out_features)

    def _by_slices(self, flat: torch.Tensor) -> torch.Tensor:
        dtype = torch.bfloat16 if flat.device.type != "cpu" or fast_bf16() else torch.float32
        x = flat.to(dtype)
        y = flat.new_empty(flat.shape[0], self.out_features)
        with threads.for_product(flat.shape[0] * self.weight.numel()):
            self._fill_by_slices(x, y)
        return y

    def _fill_by_slices(self, x: torch.Tensor, y: torch.Tensor) -> None:
        step = max(SLICE_BYTES // (4 * self.in_features), 1)
        for start in range(0, self.out_features, step):
            end = min(start + step, self.out_features)
            part = x @ self.weight[start:end].to(x.dtype).t()
            if self.scale is not None:
                part.mul_(self.scale[start:end])
            y[:, start:end] = part


class DenseNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + epsilon), in one pass instead of transformers' seven."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.variance_epsilon = epsilon

    @classmethod
    def like(cls, module: nn.Module) -> DenseNorm | None:
        """The same as a module with weights, if that is such a norm: it is asked, bit for bit."""
        weight, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
        if not native.available() or not isinstance(weight, nn.Parameter) or not isinstance(epsilon, float):
            return None
        if weight.dim() != 1 or weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
            return None
        norm = cls(weight.data, epsilon)
        probe = torch.linspace(-3, 3, 4 * len(weight)).view(4, -1).to(torch.bfloat16)
        try:
            return norm if torch.equal(module(probe), norm(probe)) else None
        except (TypeError, RuntimeError):  # a norm that takes more than x
            return None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """bf16 [..., K] -> bf16 [..., K]."""
        return native.rms_norm(x.contiguous(), self.weight, self.variance_epsilon)


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
