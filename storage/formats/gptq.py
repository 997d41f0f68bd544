"""GPTQ, and AutoRound with GPTQ's packing: integers packed along the inputs.

    qweight  int32 [K * bits / 32, N]        input k in word k * bits / 32, lowest bits first
    qzeros   int32 [G, N * bits / 32]        one less than the zero point, except in `gptq_v2`; absent where `sym` is
                                             true: 2^(bits - 1)
    scales   float [G, N]
    g_idx    int32 [K]                       the group of every input; absent: k / group

    w[n, k] = scales[g, n] * (qweight[k, n] - zero[g, n])

With act-order (`desc_act`) the inputs of a group are scattered, and a record's groups are contiguous: such a matrix is
dequantized and coded again.

`dynamic` has other settings for some matrices: {"+:REGEX": {...}}, and {"-:REGEX": {}} for matrices that are not
quantized. The parts of a matrix show which settings it has (fitting).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from edgemoe.errors import ModelRefused
from edgemoe.storage.files.tensors import StoredTensors
from edgemoe.storage.files.untrusted import CHECK_ORIGIN, shortened
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
from edgemoe.storage.formats.fitting import fitting
from edgemoe.storage.formats.grouped import GroupedWeight, Packing, Parts
from edgemoe.storage.formats.plain import FLOATS, with_rest

_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_OWN = ("bits", "group_size", "sym", "desc_act", "data_type")


class GptqWeight(GroupedWeight):
    """A packed matrix.

    Raises:
        MissingTensor: a part is missing, or its shape contradicts the other parts or the config.
    """

    def __init__(self, tensors: StoredTensors, stem: str, packing: Packing) -> None:
        words, rows = matrix_shape(tensors, f"{stem}.qweight")
        shape = rows, words * 32 // packing.bits
        index = f"{stem}.g_idx" if packing.act_order or f"{stem}.g_idx" in tensors else None
        super().__init__(tensors, stem, shape, packing, index)
        expect(tensors, f"{stem}.qweight", (words, rows), ("I32",))
        if not packing.symmetric:
            expect(tensors, f"{stem}.qzeros", (self._groups, -(-rows * packing.bits // 32)), ("I32",))
        expect(tensors, f"{stem}.scales", (self._groups, rows), FLOATS)
        if index:
            expect(tensors, index, shape[1:], ("I32",))
        self._made_of(f"{stem}.{part}" for part in _PARTS)

    def _unpack(self) -> Parts:
        bits, read, stem = self._packing.bits, self._tensors.read, self._stem
        codes = fields(read(f"{stem}.qweight").t().contiguous(), bits)
        scales = read(f"{stem}.scales").float().t()
        if self._packing.symmetric:
            return codes, scales, torch.full_like(scales, 1 << (bits - 1))
        stored = fields(read(f"{stem}.qzeros"), bits).to(torch.int16)
        zeros = (stored + self._packing.zero_offset) & ((1 << bits) - 1)
        return codes, scales, zeros.float().t()[: self.shape[0]]


def open_gptq(settings: Settings, tensors: StoredTensors) -> dict[str, Weight]:
    """Opens a GPTQ checkpoint.

    Raises:
        ModelRefused: other bits than 2, 4 or 8, a group out of bounds, an unknown version, or several settings that
            fit a matrix.
        MissingTensor: a part is missing, or its shape contradicts the other parts or the config.
    """
    require_known(
        settings,
        ("dynamic", "checkpoint_format", "format", "bits", "group_size", "desc_act", "data_type"),
    )
    choice(settings, "data_type", ("int",), "int")
    named = settings.get("format") or "gptq"
    version = choice(settings, "checkpoint_format", ("gptq", "gptq_v2"), named)
    offset = 0 if version == "gptq_v2" else 1
    left_out = not any(name.endswith(".qzeros") for name in tensors.names())
    packings = [
        _packing(each, offset, left_out)
        for each in (settings, *({**settings, **other} for other in own_settings(settings, "dynamic", "-:")))
    ]
    return packed_weights(tensors, packings)


def _packing(settings: Settings, offset: int, left_out: bool) -> Packing:
    """The packing of one set of settings; `left_out`: the checkpoint has no zero points."""
    bits, group = choice(settings, "bits", (4, 8, 2)), group_size(settings, default=-1)
    act_order = choice(settings, "desc_act", (False, True), False)
    return Packing(bits, group, act_order, offset, settings.get("sym", True) is True and left_out)


def own_settings(settings: Settings, key: str, exempt: str) -> list[dict[str, Any]]:
    """Returns the settings that some matrices have of their own: known ones of the object of objects at `key`.

    Args:
        settings: the quantization_config.
        key: the key of the object.
        exempt: the beginning of names of matrices that are not quantized; "": no name says so.

    Raises:
        ModelRefused: another value, or a setting that is not known.
    """
    own = settings.get(key) or {}
    if not isinstance(own, dict) or not all(isinstance(each, dict) for each in own.values()):
        raise ModelRefused(
            f"an object of objects as {key} in quantization_config", shortened(own), CHECK_ORIGIN
        )
    found = [each for name, each in own.items() if not (exempt and name.startswith(exempt))]
    for each in found:
        require_known(each, _OWN, f"{key} of quantization_config")
    return found


def packed_weights(tensors: StoredTensors, packings: Sequence[Packing]) -> dict[str, Weight]:
    """Returns every matrix with a qweight as a GptqWeight, and every other tensor as a PlainWeight.

    Raises:
        MissingTensor: a part is missing, or its shape contradicts the other parts or the config.
        ModelRefused: several packings fit a matrix.
    """
    stems = {name.removesuffix(".qweight") for name in tensors.names() if name.endswith(".qweight")}
    # With act-order first: an index is right where inputs are in order too.
    ordered = sorted(dict.fromkeys(packings), key=lambda packing: not packing.act_order)
    made = {
        f"{stem}.weight": fitting(ordered, partial(GptqWeight, tensors, stem), f"{stem}.weight")
        for stem in stems
    }
    return with_rest(made, tensors, tensors.names())
