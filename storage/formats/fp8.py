"""FP8 with a scale per block of a matrix (DeepSeek-V3, Qwen3 FP8), per row, or per matrix.

weight            F8_E4M3 [..., N, K]
weight_scale_inv  float   [..., ceil(N / b0), ceil(K / b1)]        b0 x b1 = 128 x 128

w[n, k] = weight[n, k] * weight_scale_inv[n / b0, k / b1]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from edgemoe.errors import MissingTensor
from edgemoe.storage.files.tensors import StoredTensors
from edgemoe.storage.files.untrusted import CHECK_ORIGIN
from edgemoe.storage.formats.base import (
    LARGEST_GROUP,
    OTHER_CONFIG,
    Settings,
    Weight,
    choice,
    described,
    expect,
    refused,
    require_known,
)
from edgemoe.storage.formats.plain import FLOATS, with_rest

SCALES = (*FLOATS, "F8_E8M0")
"""safetensors' names of the types of scales."""

_SUFFIX = "_scale_inv"

Block = tuple[int, int]


class ScaledWeight(Weight):
    """A tensor [..., N, K] of 8-bit numbers, and a tensor of scales for its blocks.

    Args:
        tensors: the tensors of the checkpoint.
        name: the name of the stored tensor.
        scale: name of its scales, [..., ceil(N / b0), ceil(K / b1)] or a single element.
        block: (b0, b1).
        types: safetensors' names of the tensor's allowed element types.
        zero: name of its zero points, of the scales' shape, which are subtracted before scaling; None: there are none.

    Raises:
        MissingTensor: the scales are missing, or a shape or type is wrong.
    """

    def __init__(
        self,
        tensors: StoredTensors,
        name: str,
        scale: str,
        block: Block,
        types: tuple[str, ...],
        zero: str | None = None,
    ) -> None:
        self._tensors, self._name, self._scale, self._block = tensors, name, scale, block
        self._zero = zero
        self.shape = tensors[name].shape
        *outer, rows, columns = (1, 1, *self.shape)[-max(len(self.shape), 2) :]
        per_block = (*outer, -(-rows // block[0]), -(-columns // block[1]))
        found = tensors[scale].shape if scale in tensors else None
        self._single = found in ((), (1,), (1, 1))
        right = tensors[name].dtype in types and len(self.shape) > 1 and found is not None
        if not right or not (self._single or found == per_block) or tensors[scale].dtype not in SCALES:
            raise MissingTensor(
                f"{name} as {' or '.join(types)} and its scales {scale} of shape {list(per_block)} in "
                f"{tensors.directory}",
                f"{described(tensors, name)} and {described(tensors, scale)}",
                OTHER_CONFIG,
            )
        if zero:
            expect(tensors, zero, tensors[scale].shape, ("I8", "I32"))
        self.parts = (name, scale, *((zero,) if zero else ()))
        self.nbytes = sum(tensors[part].range.length for part in self.parts)
        self.type = tensors[name].dtype

    @property
    def form(self) -> tuple[int, ...]:
        """Outputs and inputs that share a scale, within the matrix."""
        return tuple(map(min, self._block, self.shape[-2:]))

    def read(self) -> torch.Tensor:
        """Reads the tensor in its shape as float32."""
        read = self._tensors.read
        zero = read(self._zero) if self._zero else None
        return self._scaled(read(self._name), read(self._scale), zero)

    def read_slice(self, index: int) -> torch.Tensor:
        """Reads tensor[index]; of a tensor with three dimensions that slice alone."""
        if len(self.shape) < 3 or self._zero:
            return self.read()[index]
        weight, source = self._tensors.read_slice(self._name, index), self._tensors
        return self._scaled(
            weight, source.read(self._scale) if self._single else source.read_slice(self._scale, index)
        )

    def _scaled(
        self, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None
    ) -> torch.Tensor:
        numbers, shape = weight.float(), weight.shape[-2:]
        if zero is not None:
            numbers = numbers - self._wide(zero, shape)
        return numbers * self._wide(scale, shape)

    def _wide(self, values: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Expands a value of each block, or of the whole tensor, to its elements: float32 [..., N, K]."""
        values = values.float()
        if self._single:
            return values.reshape(())
        rows, columns = shape
        # A config may name any block size; no more than the matrix is allocated.
        wide = values.repeat_interleave(min(self._block[0], rows), -2)[..., :rows, :]
        return wide.repeat_interleave(min(self._block[1], columns), -1)[..., :columns]


def open_fp8(settings: Settings, tensors: StoredTensors) -> dict[str, Weight]:
    """Opens a checkpoint with quant_method fp8.

    Raises:
        ModelRefused: another type than E4M3, or blocks out of bounds.
        MissingTensor: scales are missing, or a shape or type is wrong.
    """
    require_known(settings, ("fmt", "weight_block_size", "scale_fmt"))
    choice(settings, "scale_fmt", ("ue8m0", "float", None))
    choice(settings, "fmt", ("e4m3",), "e4m3")
    block = block_sides(settings.get("weight_block_size") or [128, 128], "weight_block_size")
    names = tensors.names()
    packed = {name for name in names if tensors[name].dtype == "F8_E4M3"}
    made = {
        name: ScaledWeight(tensors, name, _scale_name(name, names), block, ("F8_E4M3",)) for name in packed
    }
    return with_rest(made, tensors, names)


def block_sides(value: object, key: str) -> Block:
    """Returns the two sides of a block from a quantization_config.

    Raises:
        ModelRefused: the value is not a pair of whole numbers from 1 to LARGEST_GROUP.
    """
    match value:
        case [int() as rows, int() as columns] if (
            1 <= min(rows, columns) <= max(rows, columns) <= LARGEST_GROUP
        ):
            return rows, columns
    raise refused(f"two sides from 1 to {LARGEST_GROUP} as {key}", value, CHECK_ORIGIN)


def _scale_name(name: str, names: set[str]) -> str:
    """Returns the name of the scales, which are factors: `_scale_inv` by DeepSeek, `_scale` by some converters."""
    plain = f"{name}_scale"
    return plain if plain in names else name + _SUFFIX
