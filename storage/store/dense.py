"""Dense weights of a store: all weights outside of experts, in bf16, at 8 bits or at 4 to 6.

At 8 bits every output row of a matrix has one symmetric scale:

    scale = max |w| / 127, rounded up to bf16        code = round(w / scale)        w ~ code * scale

At 4 to 6 bits the matrices of attention and of dense layers are in groups (`dense_groups`), and all others at 8 bits.
Embedding and head may be in groups of 6 bits, whatever number of bits below 16 the others have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import torch

from edgemoe.errors import DamagedData, ModelRefused
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.expert_weights import ExpertNames, all_finite
from edgemoe.storage.files.header import Spec, tensor_bytes
from edgemoe.storage.files.untrusted import DOWNLOAD_AGAIN
from edgemoe.storage.formats.base import Weight
from edgemoe.storage.record.planes import round_up_bf16
from edgemoe.storage.store import dense_groups, dense_shapes
from edgemoe.storage.store.manifest import SCALE_SUFFIX

_SLICE = 1 << 22
"""Weights converted to float32 at a time, which avoids a float32 copy of a whole embedding."""


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes a matrix to 8 bits against the rounded scales.

    Args:
        weight: floating point [N, K], finite, not empty. Not changed.

    Returns:
        Codes int8 [N, K], -127 .. 127, and scales bf16 [N], at least the row's largest weight / 127. A row of zeros
        has scale 0.
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


class DenseWeights:
    """The dense weights of a checkpoint as a store holds them. Thread-safe.

    Weights become bf16, as in transformers when a model is loaded in bf16, except for the few that the family keeps in
    float32. At 8 bits, matrices `*.weight` become codes and scales, except routers, which choose experts and are small.
    At 4 to 6 bits they become groups, where the family allows it (ExpertNames.keeps_rows) and all matrices of one
    module have shapes for it, so that their rows can be joined; the others stay at 8.

    Args:
        checkpoint: the source.
        experts: names of the tensors that hold expert weights.
        family: the family of the checkpoint; it names routers, float32 tensors and unused tensors.
        bits: bits per weight of a matrix, one of manifest.DENSE_BITS.
        head_bits: bits per weight of embedding and head, one of dense_shapes.HEAD_BITS; of no effect at 16 bits.

    Raises:
        ModelRefused: a tensor is not floating point, has the name of another tensor's scales, or is an embedding or a
            head of a shape that head_bits cannot have.
    """

    def __init__(
        self, checkpoint: Checkpoint, experts: set[str], family: ExpertNames, bits: int, head_bits: int = 8
    ) -> None:
        self._checkpoint = checkpoint
        there = checkpoint.names()
        self.names = sorted(name for name in there - experts if not family.is_unused(name))
        self._full = {name for name in self.names if family.keeps_precision(name)}
        self._eight_bit = {
            name
            for name in self.names
            if bits < 16
            and name.endswith(".weight")
            and name not in self._full
            and len(checkpoint[name].shape) == 2
            and 0 not in checkpoint[name].shape
            and not family.is_router(name)
        }
        self._grouped = dict.fromkeys(self._in_groups(family) if bits in dense_shapes.BITS else (), bits)
        if head_bits in dense_shapes.BITS:
            self._grouped |= dict.fromkeys(self._head_in_groups(family), head_bits)
        self._eight_bit -= set(self._grouped)
        for name in self.names:
            _ = checkpoint[name].dtype
            if name in self._eight_bit and name + SCALE_SUFFIX in there:
                raise ModelRefused(
                    f"the name {name}{SCALE_SUFFIX} free for the scales of {name} at 8 bits",
                    f"a tensor of that name in {checkpoint.directory}",
                    "convert with dense weights at 16 bits",
                )

    def _in_groups(self, family: ExpertNames) -> set[str]:
        """Names of the matrices in groups, among the matrices of 8 or fewer bits."""
        named = {name for name in self._eight_bit if not family.keeps_rows(name)}
        others = {_module_of(name) for name in named if not dense_shapes.fits(self._checkpoint[name].shape)}
        return {name for name in named if _module_of(name) not in others}

    def _head_in_groups(self, family: ExpertNames) -> list[str]:
        """Names of embedding and head, among the matrices of 8 or fewer bits."""
        named = sorted(name for name in self._eight_bit if family.is_outer(name))
        for name in named:
            shape = self._checkpoint[name].shape
            if not dense_shapes.fits(shape):
                raise ModelRefused(
                    f"rows in multiples of {dense_shapes.ROWS} and columns in multiples of {dense_shapes.GROUP}, for "
                    "an embedding and a head of 6 bits",
                    f"{list(shape)} in {name} of {self._checkpoint.directory}",
                    "leave --head-bits out",
                )
        return named

    def specs(self) -> dict[str, Spec]:
        """Name -> spec of every tensor to store, in the order of tensors()."""
        out: dict[str, Spec] = {}
        for name in self.names:
            shape = self._checkpoint[name].shape
            if name in self._grouped:
                out[name] = (dense_shapes.DTYPE, dense_shapes.stored_shape(shape, self.bits(name)))
            elif name in self._eight_bit:
                out[name] = ("I8", shape)
                out[name + SCALE_SUFFIX] = ("BF16", shape[:1])
            else:
                out[name] = ("F32" if name in self._full else "BF16", shape)
        return out

    @property
    def coded(self) -> list[str]:
        """Names of the matrices of 8 or fewer bits, in the order of the file."""
        return [name for name in self.names if name in self._grouped or name in self._eight_bit]

    def bits(self, name: str) -> int:
        """Bits per weight of a matrix of 8 or fewer bits; below 8 it is in groups."""
        return self._grouped.get(name, 8)

    def nearest(self, name: str) -> tuple[torch.Tensor, ...]:
        """Reads a matrix of 8 or fewer bits, rounded to nearest: the bytes of groups; or codes and scales of rows.

        Raises:
            DamagedData, TruncatedFile: as `tensors`.
        """
        weight, bits = self.read(name), self.bits(name)
        return quantize_rows(weight) if bits == 8 else (dense_groups.quantize_groups(weight, bits),)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor of the checkpoint."""
        return self._checkpoint[name].shape

    def read(self, name: str) -> torch.Tensor:
        """Reads a tensor, bf16 or float32, as it is before it is quantized.

        Raises:
            DamagedData, TruncatedFile: as `tensors`.
        """
        dtype = torch.float32 if name in self._full else torch.bfloat16
        weight = self._checkpoint[name].read().to(dtype)
        if not all_finite(weight):
            raise DamagedData(
                f"finite weights in {name} of {self._checkpoint.directory}",
                "NaN, infinity or a value too large for bf16",
                DOWNLOAD_AGAIN,
            )
        return weight

    @property
    def nbytes(self) -> int:
        """Bytes of all dense weights in a store."""
        return sum(tensor_bytes(*spec) for spec in self.specs().values())

    def tensors(
        self, coded: Callable[[str], tuple[torch.Tensor, ...]] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields name and tensor, one at a time.

        Args:
            coded: makes the tensors of a matrix of 8 or fewer bits, called in the order of `coded`, as `nearest`, which
                it is by default.

        Raises:
            DamagedData: a weight is NaN, infinite, or too large for bf16; with the tensor's name.
            TruncatedFile: from Weight.read.
        """
        make, matrices = coded or self.nearest, set(self.coded)
        for name in self.names:
            if name not in matrices:
                yield name, self.read(name)
                continue
            matrix, *scales = make(name)
            yield name, matrix
            del matrix
            yield from ((name + SCALE_SUFFIX, each) for each in scales)


def _module_of(name: str) -> str:
    """The module that a matrix's layer is a part of: self_attn of model.layers.0.self_attn.q_proj.weight."""
    return name.rpartition(".")[0].rpartition(".")[0]


VISION_NAME = "vision.safetensors"
"""Name of the file of a multimodal model's vision modules."""


class VisionTensors:
    """The tensors of some modules of a checkpoint outside of its language model.

    Args:
        weights: the tensors outside of the language model, by their names in the multimodal model.
        modules: names of the modules that are stored; empty: none is.
    """

    def __init__(self, weights: Mapping[str, Weight], modules: Collection[str]) -> None:
        self._weights = {n: weights[n] for n in sorted(weights) if n.partition(".")[0] in modules}

    @property
    def stored(self) -> set[str]:
        """Names of the checkpoint's stored tensors that these tensors consist of."""
        return {part for weight in self._weights.values() for part in weight.parts}

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in a store; 0: there are none."""
        return sum(tensor_bytes(*spec) for spec in self.specs().values())

    def specs(self) -> dict[str, Spec]:
        """Name -> spec of every tensor, in the order of tensors()."""
        return {name: ("BF16", weight.shape) for name, weight in self._weights.items()}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, tensor in bf16), one in memory at a time.

        Raises:
            ModelRefused: a tensor holds no floating-point weights.
        """
        for name, weight in self._weights.items():
            yield name, weight.read().to(torch.bfloat16)
