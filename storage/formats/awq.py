"""AWQ, version `gemm`, and AutoRound with AWQ's packing: 4-bit codes packed along the outputs.

qweight  int32 [K, N / 8]        field i of a word holds output 8 * word + ORDER[i]
qzeros   int32 [G, N / 8]        zero points, in the same order
scales   float [G, N]

w[n, k] = scales[g, n] * (qweight[k, n] - qzeros[g, n])
"""

from __future__ import annotations

import torch

from edgemoe.storage.files.tensors import StoredTensors
from edgemoe.storage.formats.base import (
    Settings,
    Weight,
    choice,
    expect,
    fields,
    group_size,
    matrix_shape,
    require_known,
)
from edgemoe.storage.formats.grouped import GroupedWeight, Packing, Parts
from edgemoe.storage.formats.plain import FLOATS, with_rest

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output of every 4-bit field of a word, lowest field first."""

_FIELD_OF = [ORDER.index(output) for output in range(8)]
_PARTS = ("qweight", "qzeros", "scales")


class AwqWeight(GroupedWeight):
    """A packed matrix.

    Args:
        tensors: the tensors of the checkpoint.
        stem: name of the stored parts up to the last dot.
        group: consecutive inputs that share a scale; None: all inputs.

    Raises:
        MissingTensor: a part is missing, or its shape contradicts the other parts or the config.
    """

    def __init__(self, tensors: StoredTensors, stem: str, group: int | None) -> None:
        columns, words = matrix_shape(tensors, f"{stem}.qweight")
        super().__init__(tensors, stem, (8 * words, columns), Packing(4, group))
        expect(tensors, f"{stem}.qweight", (columns, words), ("I32",))
        expect(tensors, f"{stem}.qzeros", (self._groups, words), ("I32",))
        expect(tensors, f"{stem}.scales", (self._groups, 8 * words), FLOATS)
        self._made_of(f"{stem}.{part}" for part in _PARTS)

    def _unpack(self) -> Parts:
        read, stem = self._tensors.read, self._stem
        codes = _outputs(read(f"{stem}.qweight")).t().contiguous()
        zeros = _outputs(read(f"{stem}.qzeros")).float().t()
        return codes, read(f"{stem}.scales").float().t(), zeros


def _outputs(packed: torch.Tensor) -> torch.Tensor:
    """Unpacks int32 [n, N / 8] into uint8 [n, N], outputs in ascending order."""
    words = fields(packed, 4).view(packed.shape[0], -1, 8)
    return words[:, :, _FIELD_OF].flatten(1)


def open_awq(settings: Settings, tensors: StoredTensors) -> dict[str, Weight]:
    """Opens an AWQ checkpoint.

    Raises:
        ModelRefused: other bits than 4, a group out of bounds, or a version with another packing.
        MissingTensor: a part is missing, or its shape contradicts the other parts or the config.
    """
    require_known(
        settings,
        ("bits", "w_bit", "version", "group_size", "q_group_size", "zero_point", "data_type"),
    )
    choice(settings, "data_type", ("int",), "int")
    choice(settings, "bits", (4,), settings.get("w_bit"))
    choice(settings, "version", ("gemm", "GEMM"), "gemm")
    group = group_size(settings, "group_size", settings.get("q_group_size", -1))
    stems = {name.removesuffix(".qweight") for name in tensors.names() if name.endswith(".qweight")}
    made = {f"{stem}.weight": AwqWeight(tensors, stem, group) for stem in stems}
    return with_rest(made, tensors, tensors.names())
