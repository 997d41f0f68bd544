"""FP8 with a scale per block of a matrix (DeepSeek-V3, Qwen3 FP8), per row, or per matrix.

weight            F8_E4M3 [..., N, K]
weight_scale_inv  float   [..., ceil(N / b0), ceil(K / b1)]        b0 x b1 = 128 x 128

w[n, k] = weight[n, k] * weight_scale_inv[n / b0, k / b1]
"""

from __future__ import annotations

import torch

from storage.errors import MissingTensor, ModelRefused
from storage.formats.base import LARGEST_GROUP, Settings, Weight, choice
from storage.formats.plain import FLOATS, with_rest
from storage.tensors import StoredTensors
from storage.untrusted import shortened

SCALES = (*FLOATS, "F8_E8M0")
"""Types that scales come in."""

_SUFFIX = "_scale_inv"
ACTIVATION_SCALES = (".input_scale", ".activation_scale", ".k_scale", ".v_scale")
"""What only says how activations could be quantized as well; here they never are."""

Block = tuple[int, int]


class ScaledWeight(Weight):
    """A tensor [..., N, K] of small numbers, and a tensor of scales for its blocks.

    Args:
        tensors: of the checkpoint.
        name: of the stored tensor.
        scale: name of its scales: [..., ceil(N / b0), ceil(K / b1)]; or with one element.
        block: (b0, b1).
        types: safetensors' names of the element types the tensor may have.

    Raises:
        MissingTensor: the scales are not there, or not of that shape.
    """

    def __init__(
        self, tensors: StoredTensors, name: str, scale: str, block: Block, types: tuple[str, ...]
    ) -> None:
        self._tensors, self._name, self._scale, self._block = tensors, name, scale, block
        self.shape = tensors.shape(name)
        *outer, rows, columns = (1, 1, *self.shape)[-max(len(self.shape), 2) :]
        per_block = (*outer, -(-rows // block[0]), -(-columns // block[1]))
        found = tensors.shape(scale) if scale in tensors else None
        self._single = found in ((), (1,), (1, 1))
        right = tensors.type_name(name) in types and len(self.shape) > 1 and found is not None
        if not right or not (self._single or found == per_block) or tensors.type_name(scale) not in SCALES:
            raise MissingTensor(
                f"{name} as {' or '.join(types)} and its scales {scale} of shape {list(per_block)} in "
                f"{tensors.directory}",
                f"{tensors.type_name(name)} of shape {list(self.shape)} and "
                + (
                    "no scales"
                    if found is None
                    else f"scales {tensors.type_name(scale)} of shape {list(found)}"
                ),
                "download the checkpoint again; its config.json may belong to another one",
            )
        self.parts = (name, scale)
        self.nbytes = tensors.nbytes(name) + tensors.nbytes(scale)

    def read(self) -> torch.Tensor:
        """float32, of the tensor's shape."""
        return self._scaled(self._tensors.read(self._name), self._tensors.read(self._scale))

    def read_slice(self, index: int) -> torch.Tensor:
        """read()[index]; of three dimensions, without reading the rest."""
        if len(self.shape) < 3:
            return self.read()[index]
        weight, source = self._tensors.read_slice(self._name, index), self._tensors
        return self._scaled(
            weight, source.read(self._scale) if self._single else source.read_slice(self._scale, index)
        )

    def _scaled(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        scale = scale.float()
        if self._single:
            return weight.float() * scale.reshape(())
        rows, columns = weight.shape[-2:]
        # A block may be as large as the config cared to say; no more than the matrix is ever needed.
        wide = scale.repeat_interleave(min(self._block[0], rows), -2)[..., :rows, :]
        return weight.float() * wide.repeat_interleave(min(self._block[1], columns), -1)[..., :columns]


def open_fp8(settings: Settings, tensors: StoredTensors) -> dict[str, Weight]:
    """Opener of checkpoints with quant_method fp8.

    Raises:
        ModelRefused: another float than E4M3, blocks out of bounds.
        MissingTensor: as ScaledWeight.
    """
    choice(settings, "fmt", ("e4m3",), "e4m3")
    block = block_sides(settings.get("weight_block_size") or [128, 128], "weight_block_size")
    names = {name for name in tensors.names() if not name.endswith(ACTIVATION_SCALES)}
    packed = {name for name in names if tensors.type_name(name) == "F8_E4M3"}
    made = {
        name: ScaledWeight(tensors, name, _scale_name(name, names), block, ("F8_E4M3",)) for name in packed
    }
    return with_rest(made, tensors, names)


def block_sides(value: object, key: str) -> Block:
    """The two sides of a block, as a quantization_config has them.

    Raises:
        ModelRefused: they are not two whole numbers from 1 to LARGEST_GROUP.
    """
    match value:
        case [int() as rows, int() as columns] if (
            1 <= min(rows, columns) <= max(rows, columns) <= LARGEST_GROUP
        ):
            return rows, columns
    raise ModelRefused(
        f"two sides from 1 to {LARGEST_GROUP} as {key} in quantization_config",
        shortened(value),
        "check the origin of this checkpoint",
    )


def _scale_name(name: str, names: set[str]) -> str:
    """`_scale_inv` as DeepSeek wrote it, `_scale` as some converters do; both are multiplied by."""
    plain = f"{name}_scale"
    return plain if plain in names else name + _SUFFIX
