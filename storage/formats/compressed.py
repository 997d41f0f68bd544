"""compressed-tensors, the format of llm-compressor: integers packed in int32 or as int8, or FP8.

pack-quantized   weight_packed      int32 [N, K * bits / 32]    code + 2^(bits - 1), lowest bits first
                 weight_scale       float [N, G]
                 weight_zero_point  int32 [N * bits / 32, G]    packed along N; absent: 0
                 weight_shape       int64 [2]                   (N, K)
                 weight_g_idx       int32 [K]                   with activation order only
int-quantized    weight             int8 [N, K]     weight_scale  float [N, G]; or one per block or matrix
float-quantized  weight             F8_E4M3 [N, K]  weight_scale  as int-quantized

w[n, k] = weight_scale[n, g] * (code[n, k] - zero[n, g])
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from edgemoe.errors import DamagedData, ModelRefused
from edgemoe.storage.files.tensors import StoredTensors
from edgemoe.storage.files.untrusted import DOWNLOAD_AGAIN
from edgemoe.storage.formats.base import (
    LARGEST_GROUP,
    Settings,
    Weight,
    choice,
    expect,
    fields,
    group_size,
    matrix_shape,
    refused,
)
from edgemoe.storage.formats.fp8 import ACTIVATION_SCALES, ScaledWeight, block_sides
from edgemoe.storage.formats.grouped import GroupedWeight, Packing, Parts
from edgemoe.storage.formats.plain import FLOATS, with_rest

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_STRATEGIES = ("group", "channel", "tensor", "block")
_PARTS = ("packed", "scale", "zero_point", "shape", "g_idx")


@dataclass(frozen=True)
class Scheme:
    """The quantization scheme of one config group.

    Args:
        bits: the number of bits of a code.
        block: (outputs, inputs) that share a scale.
        symmetric: whether zero points are absent.
        act_order: whether the inputs of a group may lie anywhere.
    """

    bits: int
    block: tuple[int, int]
    symmetric: bool
    act_order: bool


class PackedWeight(GroupedWeight):
    """A pack-quantized matrix.

    Raises:
        MissingTensor: a part is missing, or its shape contradicts the other parts or the config.
    """

    def __init__(self, tensors: StoredTensors, stem: str, scheme: Scheme) -> None:
        rows, words = matrix_shape(tensors, f"{stem}.weight_packed")
        shape = rows, words * 32 // scheme.bits
        index = f"{stem}.weight_g_idx" if scheme.act_order else None
        packing = Packing(scheme.bits, scheme.block[1], scheme.act_order)
        super().__init__(tensors, stem, shape, packing, index)
        self._scheme = scheme
        expect(tensors, f"{stem}.weight_packed", (rows, words), ("I32",))
        expect(tensors, f"{stem}.weight_scale", (rows, self._groups), FLOATS)
        expect(tensors, f"{stem}.weight_shape", (2,), ("I64", "I32"))
        if not scheme.symmetric:
            packed_rows = -(-rows * scheme.bits // 32)
            expect(tensors, f"{stem}.weight_zero_point", (packed_rows, self._groups), ("I32",))
        if index:
            expect(tensors, index, shape[1:], ("I32",))
        self._made_of(f"{stem}.weight_{part}" for part in _PARTS)

    def _unpack(self) -> Parts:
        bits, read, stem = self._scheme.bits, self._tensors.read, f"{self._stem}.weight"
        if (found := tuple(read(f"{stem}_shape").tolist())) != self.shape:
            raise DamagedData(
                f"a weight_shape of {list(self.shape)} for {stem} in {self._tensors.directory}",
                str(list(found)),
                DOWNLOAD_AGAIN,
            )
        codes = fields(read(f"{stem}_packed"), bits)
        scales = read(f"{stem}_scale").float()
        if self._scheme.symmetric:
            return codes, scales, torch.full_like(scales, 1 << (bits - 1))
        zeros = fields(read(f"{stem}_zero_point").t().contiguous(), bits)
        return codes, scales, zeros.float().t()[: self.shape[0]]


def open_compressed(settings: Settings, tensors: StoredTensors) -> dict[str, Weight]:
    """Opens a compressed-tensors checkpoint.

    Raises:
        ModelRefused: an unknown format, values out of bounds, or several schemes for weights of one type.
        MissingTensor: a part is missing, or its shape contradicts the other parts or the config.
    """
    schemes = _schemes(settings)
    names = {name for name in tensors.names() if not name.endswith(ACTIVATION_SCALES)}
    out: dict[str, Weight] = {}
    for name in names:
        stem, _, last = name.rpartition(".")
        kind = {"I8": "int", "F8_E4M3": "float"}.get(tensors[name].dtype) if last == "weight" else None
        if last == "weight_packed":
            out[f"{stem}.weight"] = PackedWeight(tensors, stem, _only(schemes, "int", name))
        elif kind:
            block, scale = _only(schemes, kind, name).block, f"{name}_scale"
            out[name] = ScaledWeight(tensors, name, scale, block, (tensors[name].dtype,))
    return with_rest(out, tensors, names)


def _schemes(settings: Settings) -> dict[str, list[Scheme]]:
    """Returns the config's schemes for weights of type int and of type float."""
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        action = "check that config.json belongs to this checkpoint"
        raise refused("an object of objects as config_groups", groups, action)
    out: dict[str, list[Scheme]] = {"int": [], "float": []}
    for group in groups.values():
        choice({"format": group.get("format") or settings.get("format")}, "format", _FORMATS)
        weights = group.get("weights")
        if isinstance(weights, dict):
            kind, scheme = _scheme(weights)
            if scheme not in out[kind]:
                out[kind].append(scheme)
    return out


def _scheme(weights: Mapping[str, Any]) -> tuple[str, Scheme]:
    kind = choice(weights, "type", ("int", "float"), "int")
    bits = choice(weights, "num_bits", (4, 8) if kind == "int" else (8,))
    strategy = choice(weights, "strategy", _STRATEGIES)
    block = (1, LARGEST_GROUP)
    if strategy == "group":
        block = (1, group_size(weights) or LARGEST_GROUP)
    elif strategy == "block":
        block = block_sides(weights.get("block_structure"), "block_structure")
    symmetric = choice(weights, "symmetric", (True, False), True)
    order = choice(weights, "actorder", (None, "group", "dynamic", "weight", "static", False, True))
    return kind, Scheme(bits, block, symmetric, order in ("group", "dynamic", True))


def _only(schemes: Mapping[str, list[Scheme]], kind: str, name: str) -> Scheme:
    if len(schemes[kind]) != 1:
        raise ModelRefused(
            f"one scheme for weights of type {kind} in quantization_config, for {name}",
            f"{len(schemes[kind])} schemes",
            "use a checkpoint with one scheme for all weights",
        )
    return schemes[kind][0]
