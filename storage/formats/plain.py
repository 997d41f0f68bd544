"""Weights in floating point: a tensor of the file is a tensor of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from edgemoe.errors import ModelRefused
from edgemoe.storage.files.tensors import DTYPES, StoredTensors
from edgemoe.storage.files.untrusted import DOWNLOAD_AGAIN, USE_SOURCE
from edgemoe.storage.formats.base import Weight

FLOATS = ("BF16", "F16", "F32")
"""safetensors' names of the types of unquantized weights."""


class PlainWeight(Weight):
    """A stored tensor. `dtype`, `read` and `read_slice` refuse a type that is not floating point."""

    def __init__(self, tensors: StoredTensors, name: str) -> None:
        self._tensors, self._name = tensors, name
        self.shape, self.parts, self.nbytes = tensors[name].shape, (name,), tensors[name].range.length
        self.type = tensors[name].dtype

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16, float16 or float32.

        Raises:
            ModelRefused: any other type.
        """
        found = self._tensors[self._name].dtype
        if found not in FLOATS:
            raise ModelRefused(
                f"{self._name} in bfloat16, float16 or float32",
                f"{found} in {self._tensors[self._name].path}, which config.json does not explain",
                USE_SOURCE,
            )
        return DTYPES[found]

    def read(self) -> torch.Tensor:
        """Reads the tensor in its own dtype."""
        _ = self.dtype
        return self._tensors.read(self._name)

    def read_slice(self, index: int) -> torch.Tensor:
        """Reads tensor[index] alone. Raises IndexError outside 0 .. len - 1."""
        _ = self.dtype
        return self._tensors.read_slice(self._name, index)


def open_plain(tensors: StoredTensors) -> dict[str, Weight]:
    """Returns every stored tensor by its own name."""
    return with_rest({}, tensors, tensors.names())


def with_rest(
    weights: Mapping[str, Weight], tensors: StoredTensors, names: Iterable[str]
) -> dict[str, Weight]:
    """Returns a format's weights, and a PlainWeight for each of `names` that is not a part of them.

    Raises:
        ModelRefused: a tensor exists in a quantized and in a plain form.
    """
    taken = {part for weight in weights.values() for part in weight.parts}
    rest = {name: PlainWeight(tensors, name) for name in names if name not in taken}
    if twice := weights.keys() & rest.keys():
        raise ModelRefused(
            f"one form of {min(twice)} in {tensors.directory}", "a quantized and a plain form", DOWNLOAD_AGAIN
        )
    return {**weights, **rest}
