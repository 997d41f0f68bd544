"""Dense weights as a store keeps them: everything that is no expert's, in bf16 or at 8 bits.

At 8 bits every output row of a matrix has one symmetric scale:

    scale = max |w| / 127, rounded up to bf16        code = round(w / scale)        w ~ code * scale
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from storage.checkpoint import Checkpoint
from storage.errors import DamagedData, ModelRefused
from storage.expert_weights import ExpertNames, all_finite
from storage.header import tensor_bytes
from storage.planes import round_up_bf16

Spec = tuple[str, tuple[int, ...]]
"""A tensor's dtype, as safetensors names it, and its shape."""

SCALE_SUFFIX = "_scale"
"""A tensor `name` of codes has its scales in `name` + this."""

_SLICE = 1 << 22
"""Weights converted to float32 at a time, so that an embedding needs no second copy of itself in float32."""


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes a matrix to 8 bits against the rounded scales.

    Args:
        weight: floating point [N, K], finite, not empty. Not changed.

    Returns:
        codes int8 [N, K], in -127 .. 127; scales bf16 [N], never smaller than the row's largest weight / 127.
        A row of zeros has scale 0.
    """
    rows, cols = weight.shape
    codes = torch.empty(rows, cols, dtype=torch.int8)
    scales = torch.empty(rows, dtype=torch.bfloat16)
    step = max(_SLICE // cols, 1)
    for start in range(0, rows, step):
        part = weight[start : start + step].float()
        scale = round_up_bf16(part.abs().amax(1) / 127)
        scales[start : start + step] = scale
        divisor = scale.float().clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)
        codes[start : start + step] = (part / divisor).round_().to(torch.int8)
    return codes, scales


def dequantize_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The float32 [N, K] weights that int8 codes [N, K] and bf16 scales [N] stand for."""
    return codes.float() * scales.float().unsqueeze(1)


class DenseWeights:
    """The dense weights of a checkpoint in the form a store has them. Thread-safe.

    Every one becomes bf16, as transformers makes it when a model is loaded in bf16, except the few that the
    family keeps in float32. At 8 bits, matrices `*.weight` other than routers become codes and scales; routers
    choose experts, and cost next to nothing.

    Args:
        checkpoint: the source.
        experts: names of the tensors that hold expert weights.
        family: knows routers by name.
        bits: 16 or 8.

    Raises:
        ModelRefused: a tensor is not floating point, or has the name that another's scales would get.
    """

    def __init__(self, checkpoint: Checkpoint, experts: set[str], family: ExpertNames, bits: int) -> None:
        self._checkpoint = checkpoint
        there = checkpoint.names()
        self.names = sorted(name for name in there - experts if not family.is_unused(name, checkpoint.config))
        self._full = {name for name in self.names if family.keeps_precision(name)}
        self._eight_bit = {
            name
            for name in self.names
            if bits == 8
            and name.endswith(".weight")
            and name not in self._full
            and len(checkpoint.shape(name)) == 2
            and 0 not in checkpoint.shape(name)
            and not family.is_router(name)
        }
        for name in self.names:
            checkpoint.dtype(name)
            if name in self._eight_bit and name + SCALE_SUFFIX in there:
                raise ModelRefused(
                    f"the name {name}{SCALE_SUFFIX} free for the scales of {name} at 8 bits",
                    f"a tensor of that name in {checkpoint.directory}",
                    "convert with dense weights at 16 bits",
                )

    def specs(self) -> dict[str, Spec]:
        """Every tensor to be stored, in the order of tensors()."""
        out: dict[str, Spec] = {}
        for name in self.names:
            shape = self._checkpoint.shape(name)
            if name in self._eight_bit:
                out[name] = ("I8", shape)
                out[name + SCALE_SUFFIX] = ("BF16", shape[:1])
            else:
                out[name] = ("F32" if name in self._full else "BF16", shape)
        return out

    @property
    def nbytes(self) -> int:
        """Bytes of all of them in a store."""
        return sum(tensor_bytes(*spec) for spec in self.specs().values())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor, one at a time.

        Raises:
            DamagedData: a weight is NaN, infinite, or too large for bf16; names the tensor.
            TruncatedFile: as Checkpoint.read.
        """
        for name in self.names:
            dtype = torch.float32 if name in self._full else torch.bfloat16
            weight = self._checkpoint.read(name).to(dtype)
            if not all_finite(weight):
                raise DamagedData(
                    f"finite weights in {name} of {self._checkpoint.directory}",
                    "NaN, infinity or a value too large for bf16",
                    "download the checkpoint again",
                )
            if name in self._eight_bit:
                codes, scales = quantize_rows(weight)
                del weight
                yield name, codes
                del codes
                yield name + SCALE_SUFFIX, scales
            else:
                yield name, weight
