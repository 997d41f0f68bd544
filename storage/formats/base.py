"""What every source format gives: the tensors of a model by transformers' names, as floats or as 4-bit codes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from storage.errors import MissingTensor, ModelRefused
from storage.tensors import StoredTensors
from storage.untrusted import shortened

Settings = Mapping[str, Any]
"""The quantization_config of a config.json; nothing in it is believed."""

GROUPS = (256, 128, 64, 32)
"""Groups that a record can have, widest first."""

LARGEST_GROUP = 131_072
"""As large as the largest input size that a config may ask for."""


@dataclass(frozen=True)
class FourBit:
    """A matrix [N, K] whose weights are uniform 4-bit codes: w = (code - 8) * scale + centre.

    Args:
        codes: uint8 [N, K], 0..15.
        scale: float32 [N, ceil(K / group)]; may be negative.
        centre: float32 [N, ceil(K / group)].
        group: consecutive inputs that share both; one of GROUPS.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    centre: torch.Tensor
    group: int

    def weights(self) -> torch.Tensor:
        """float32 [N, K]: what the codes stand for in the source."""
        columns = self.codes.shape[1]

        def wide(values: torch.Tensor) -> torch.Tensor:
            return values.repeat_interleave(self.group, 1)[:, :columns]

        return (self.codes.float() - 8) * wide(self.scale) + wide(self.centre)

    def rows(self, start: int, end: int) -> FourBit:
        """The matrix [end - start, K] of these rows."""
        return FourBit(self.codes[start:end], self.scale[start:end], self.centre[start:end], self.group)

    def below(self, other: FourBit) -> FourBit:
        """This matrix with another of the same K and group under it."""
        return FourBit(
            torch.cat((self.codes, other.codes)),
            torch.cat((self.scale, other.scale)),
            torch.cat((self.centre, other.centre)),
            self.group,
        )


Matrix = torch.Tensor | FourBit
"""A matrix [N, K] as floats, or as the codes that its source has."""


class Weight(ABC):
    """One tensor of a model, however it is stored. Thread-safe; nothing is read before `read`.

    Attributes:
        shape: of the tensor as transformers has it.
        parts: names of the stored tensors that it is made of.
        nbytes: of them on disk.
        group: of its exact 4-bit codes; None where it has none that a record could keep.
    """

    shape: tuple[int, ...]
    parts: tuple[str, ...]
    nbytes: int
    group: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type that `read` gives.

        Raises:
            ModelRefused: the tensor holds no floating-point weights.
        """
        return torch.float32

    @abstractmethod
    def read(self) -> torch.Tensor:
        """The tensor in floating point.

        Raises:
            ModelRefused: as dtype.
            TruncatedFile: a file has become shorter.
        """

    def read_slice(self, index: int) -> torch.Tensor:
        """read()[index], in the memory of a slice where the format can."""
        return self.read()[index]

    def codes(self) -> FourBit:
        """The tensor's own codes. Only where `group` is not None."""
        raise NotImplementedError


Opener = Callable[[Settings, StoredTensors], dict[str, Weight]]
"""(quantization_config, stored tensors) -> the model's tensors by name, every one checked as far as headers say."""


def choice(settings: Settings, key: str, allowed: tuple[object, ...], default: object = None) -> Any:
    """settings[key], or the default, if it is one of those allowed (of the same type: true is not 1).

    Raises:
        ModelRefused: it is something else.
    """
    value = settings.get(key, default)
    if not any(type(value) is type(known) and value == known for known in allowed):
        raise ModelRefused(
            f"{key} among {', '.join(map(str, allowed))} in quantization_config",
            shortened(value),
            "use the checkpoint that this one was quantized from",
        )
    return value


def group_size(settings: Settings, key: str = "group_size", default: object = None) -> int | None:
    """The group that a quantization_config names; None for one over the whole input (-1 or null).

    Raises:
        ModelRefused: no whole number from 1 to LARGEST_GROUP.
    """
    value = settings.get(key, default)
    if value in (-1, None) and not isinstance(value, float):
        return None
    if type(value) is not int or not 1 <= value <= LARGEST_GROUP:
        raise ModelRefused(
            f"a group from 1 to {LARGEST_GROUP}, or -1, as {key} in quantization_config",
            shortened(value),
            "check the origin of this checkpoint",
        )
    return value


def record_group(group: int, columns: int) -> int | None:
    """The widest group a record can have in which a source's groups are whole; None if there is none.

    Args:
        group: of the source.
        columns: inputs of the matrix; a last group may be short only where the record's is the source's own.
    """
    for ours in GROUPS:
        if ours == group or (group % ours == 0 and columns % ours == 0):
            return ours
    # One group over all inputs has no boundary inside to keep.
    return next((g for g in GROUPS if columns % g == 0), None) if group >= columns else None


def regroup(values: torch.Tensor, group: int, ours: int, columns: int) -> torch.Tensor:
    """[N, ceil(K / group)] a source's group -> [N, ceil(K / ours)] a record's group, which is no wider."""
    wide = values.repeat_interleave(max(group // ours, 1), 1)
    return wide[:, : -(-columns // ours)] if group < columns else values.expand(-1, -(-columns // ours))


def fields(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned fields of `bits` (2, 4 or 8), lowest bits first, out of the last dimension of integers.

    Args:
        packed: uint8 or int32 [..., n], contiguous.

    Returns:
        uint8 [..., n * 8 * itemsize / bits].
    """
    raw = packed.view(torch.uint8)
    if bits == 8:
        return raw
    mask = (1 << bits) - 1
    return torch.stack([(raw >> shift) & mask for shift in range(0, 8, bits)], -1).flatten(-2)


def expect(tensors: StoredTensors, name: str, shape: tuple[int, ...], types: tuple[str, ...]) -> None:
    """Makes sure that a stored tensor is what the config and the tensors beside it imply.

    Args:
        types: safetensors' names of the element types that will do.

    Raises:
        MissingTensor: it is not there, or of another shape or type.
    """
    found = "no such tensor"
    if name in tensors:
        if tensors.shape(name) == shape and tensors.type_name(name) in types:
            return
        found = f"{tensors.type_name(name)} of shape {list(tensors.shape(name))}"
    raise MissingTensor(
        f"tensor {name}, {' or '.join(types)} of shape {list(shape)}, in {tensors.directory}",
        found,
        "download the checkpoint again; its config.json may belong to another one",
    )


def matrix_shape(tensors: StoredTensors, name: str) -> tuple[int, int]:
    """The shape of a stored tensor that must be a matrix with something in it.

    Raises:
        MissingTensor: it is none.
    """
    shape = tensors.shape(name)
    if len(shape) != 2 or 0 in shape:
        raise MissingTensor(
            f"a matrix in {name} of {tensors.directory}",
            f"shape {list(shape)}",
            "download the checkpoint again",
        )
    return shape[0], shape[1]
