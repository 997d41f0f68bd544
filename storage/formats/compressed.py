"""compressed-tensors, the format of llm-compressor: integers packed in int32 or as int8, or FP8.

pack-quantized   weight_packed      int32 [N, K * bits / 32]    code + 2^(bits - 1), lowest bits first
                 weight_scale       float [N, G]
                 weight_zero_point  int32 [N * bits / 32, G]    packed along N, or int8 [N, G]; absent: 0
                 weight_shape       int64 [2]                   (N, K)
                 weight_g_idx       int32 [K]                   with activation order only
int-quantized    weight             int8 [N, K]     weight_scale  float [N, G]; or one per block or matrix
                 weight_zero_point  int8 as the scales; absent: 0
float-quantized  weight             F8_E4M3 [N, K]  weight_scale  as int-quantized

w[n, k] = weight_scale[n, g] * (code[n, k] - zero[n, g])

nvfp4-pack-quantized and mxfp4-pack-quantized: see fp4.
A config may have several schemes; the parts of a matrix show which one it has (fitting).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from edgemoe.errors import DamagedData, MissingTensor, ModelRefused
from edgemoe.storage.files.tensors import StoredTensors
from edgemoe.storage.files.untrusted import DOWNLOAD_AGAIN, USE_SOURCE
from edgemoe.storage.formats.base import (
    LARGEST_GROUP,
    OTHER_CONFIG,
    Settings,
    Weight,
    choice,
    expect,
    fields,
    group_size,
    matrix_shape,
    refused,
    require_known,
)
from edgemoe.storage.formats.fitting import fitting
from edgemoe.storage.formats.fp4 import Fp4Weight
from edgemoe.storage.formats.fp8 import ScaledWeight, block_sides
from edgemoe.storage.formats.grouped import GroupedWeight, Packing, Parts
from edgemoe.storage.formats.plain import FLOATS, with_rest

_FP4 = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", *_FP4)
_STRATEGIES = ("group", "channel", "tensor", "block")
_PARTS = ("packed", "scale", "zero_point", "shape", "g_idx")
_GROUP = ("targets", "weights", "format", "input_activations", "output_activations")
_WEIGHTS = (
    *("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "actorder"),
    *("dynamic", "observer", "observer_kwargs", "zp_dtype", "scale_dtype"),
)
_FOLDED = ("weight_input", "weight_output")
"""Places of rotations that the stored weights have already."""


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

    Args:
        tensors: the tensors of the checkpoint.
        stem: name of the stored parts up to the last dot.
        scheme: its scheme.
        check_shape: whether to read weight_shape now, which tells schemes apart.

    Raises:
        MissingTensor: a part is missing, or its shape contradicts the other parts or the config.
    """

    def __init__(
        self, tensors: StoredTensors, stem: str, scheme: Scheme, *, check_shape: bool = False
    ) -> None:
        rows, words = matrix_shape(tensors, f"{stem}.weight_packed")
        shape = rows, words * 32 // scheme.bits
        if check_shape and tuple(tensors.read(f"{stem}.weight_shape").tolist()) != shape:
            raise MissingTensor(f"{stem} with {scheme.bits} bits", "another weight_shape", DOWNLOAD_AGAIN)
        index = f"{stem}.weight_g_idx" if scheme.act_order else None
        packing = Packing(scheme.bits, scheme.block[1], scheme.act_order)
        super().__init__(tensors, stem, shape, packing, index)
        self._scheme = scheme
        expect(tensors, f"{stem}.weight_packed", (rows, words), ("I32",))
        expect(tensors, f"{stem}.weight_scale", (rows, self._groups), FLOATS)
        expect(tensors, f"{stem}.weight_shape", (2,), ("I64", "I32"))
        self._zero = f"{stem}.weight_zero_point"
        self._packed_zero = self._zero not in tensors or tensors[self._zero].dtype == "I32"
        if not scheme.symmetric or self._zero in tensors:
            packed_rows = -(-rows * scheme.bits // 32) if self._packed_zero else rows
            expect(tensors, self._zero, (packed_rows, self._groups), ("I32", "I8"))
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
        if self._zero not in self._tensors:
            return codes, scales, torch.full_like(scales, 1 << (bits - 1))
        stored = read(self._zero)
        if not self._packed_zero:
            return codes, scales, stored.float() + (1 << (bits - 1))
        zeros = fields(stored.t().contiguous(), bits)
        return codes, scales, zeros.float().t()[: self.shape[0]]


def open_compressed(settings: Settings, tensors: StoredTensors) -> dict[str, Weight]:
    """Opens a compressed-tensors checkpoint.

    Raises:
        ModelRefused: an unknown format, values out of bounds, or several schemes that fit a matrix.
        MissingTensor: a part is missing, or its shape contradicts the other parts or the config.
    """
    names = tensors.names()
    left_out = not any(name.endswith(".weight_zero_point") for name in names)
    schemes = _schemes(settings, zero_points=not left_out)
    out: dict[str, Weight] = {}
    for name in names:
        stem, _, last = name.rpartition(".")
        kind = {"I8": "int", "F8_E4M3": "float"}.get(tensors[name].dtype) if last == "weight" else None
        if last == "weight_packed" and tensors[name].dtype == "U8":
            _of_kind(schemes, "fp4", name)
            out[f"{stem}.weight"] = Fp4Weight(tensors, stem)
        elif last == "weight_packed":
            found = _of_kind(schemes, "int", name)
            packed = partial(PackedWeight, tensors, stem, check_shape=len(found) > 1)
            out[f"{stem}.weight"] = fitting(found, packed, name)
        elif kind:
            out[name] = fitting(_of_kind(schemes, kind, name), partial(_scaled, tensors, name), name)
    return with_rest(out, tensors, names)


def _scaled(tensors: StoredTensors, name: str, scheme: Scheme) -> ScaledWeight:
    """Opens a matrix of 8-bit numbers."""
    zero = f"{name}_zero_point"
    known = zero if zero in tensors or not scheme.symmetric else None
    return ScaledWeight(tensors, name, f"{name}_scale", scheme.block, (tensors[name].dtype,), known)


def _schemes(settings: Settings, *, zero_points: bool) -> dict[str, list[Scheme]]:
    """Returns the config's schemes for weights of type int, of type float, and of FP4.

    Args:
        settings: the quantization_config.
        zero_points: whether the checkpoint has any; without them all schemes are symmetric.
    """
    require_known(settings, ("config_groups", "format", "sparsity_config", "transform_config"))
    _refuse_sparse(settings)
    _refuse_rotated_inputs(settings)
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        action = "check that config.json belongs to this checkpoint"
        raise refused("an object of objects as config_groups", groups, action)
    out: dict[str, list[Scheme]] = {"int": [], "float": [], "fp4": []}
    for group in groups.values():
        choice({"format": group.get("format") or settings.get("format")}, "format", _FORMATS)
        require_known(group, _GROUP, "a config group of quantization_config")
        weights = group.get("weights")
        if isinstance(weights, dict):
            kind, scheme = _scheme(weights, zero_points=zero_points)
            if scheme not in out[kind]:
                out[kind].append(scheme)
    for found in out.values():
        found.sort(key=lambda scheme: not scheme.act_order)  # an index is read where there is one
    return out


def _refuse_sparse(settings: Settings) -> None:
    """Refuses weights that are stored without their zeros."""
    sparsity = settings.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise refused("no sparsity_config, or one of format dense,", sparsity, USE_SOURCE)


def _refuse_rotated_inputs(settings: Settings) -> None:
    """Refuses rotations of a module's inputs or outputs, which would have to be computed with each token."""
    transform = settings.get("transform_config") or {}
    groups = transform.get("config_groups") if isinstance(transform, dict) else transform
    places = []
    for scheme in groups.values() if isinstance(groups, dict) else [groups] if groups else []:
        applied = scheme.get("apply") if isinstance(scheme, dict) else None
        for each in applied if isinstance(applied, list) else [None]:
            places.append(each.get("location") if isinstance(each, dict) else None)
    if any(place not in _FOLDED for place in places):
        raise refused(
            "a transform_config whose rotations are part of the stored weights", transform, USE_SOURCE
        )


def _scheme(weights: Mapping[str, Any], *, zero_points: bool) -> tuple[str, Scheme]:
    require_known(weights, _WEIGHTS, "the weights of a config group of quantization_config")
    kind = choice(weights, "type", ("int", "float"), "int")
    bits = choice(weights, "num_bits", (4, 8))
    if kind == "float" and bits == 4:
        # Groups are the stored type's: 16 of NVFP4, 32 of MXFP4.
        choice(weights, "strategy", ("group", "tensor_group"))
        choice(weights, "group_size", (16, 32))
        choice(weights, "symmetric", (True,), True)
        return "fp4", Scheme(4, (1, weights["group_size"]), symmetric=True, act_order=False)
    strategy = choice(weights, "strategy", _STRATEGIES)
    block = (1, LARGEST_GROUP)
    if strategy == "group":
        block = (1, group_size(weights) or LARGEST_GROUP)
    elif strategy == "block":
        block = block_sides(weights.get("block_structure"), "block_structure")
    symmetric = choice(weights, "symmetric", (True, False), True) or not zero_points
    order = choice(weights, "actorder", (None, "group", "dynamic", "weight", "static", False, True))
    return kind, Scheme(bits, block, symmetric, order in ("group", "dynamic", True))


def _of_kind(schemes: Mapping[str, list[Scheme]], kind: str, name: str) -> list[Scheme]:
    if not schemes[kind]:
        raise ModelRefused(
            f"a scheme for weights of type {kind} in quantization_config, for {name}",
            "no scheme",
            OTHER_CONFIG,
        )
    return schemes[kind]
