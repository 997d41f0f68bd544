"""Exports in safetensors: bf16 weights, or compressed-tensors' symmetric integers with a scale per group.

weight_packed   int32 [N, K * bits / 32]   code + 2^(bits - 1), lowest bits first
weight_scale    bf16 [N, K / group]
weight_shape    int64 [2]                  (N, K)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any

import torch

from edgemoe.errors import UserError
from edgemoe.storage.convert.checkpoint import COMPANIONS
from edgemoe.storage.convert.config import Config
from edgemoe.storage.export.dense import DenseTensors
from edgemoe.storage.export.levels import Levels, layer_level
from edgemoe.storage.export.matrices import Affine, StoreExperts
from edgemoe.storage.export.multipliers import without_multipliers
from edgemoe.storage.export.names import ExportNames
from edgemoe.storage.export.plan import (
    Errors,
    Expert,
    Made,
    PlannedFile,
    Unit,
    Work,
    add_experts,
    raw,
    shards,
)
from edgemoe.storage.export.symmetric import Symmetric, int4, int8
from edgemoe.storage.files.header import header_bytes, tensor_bytes
from edgemoe.storage.files.tensors import INDEX_NAME, WEIGHTS_NAME

_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32"}

_WIDEST_GROUP = 128
"""Consecutive inputs that share a scale, at most: the widest group of GPU kernels."""


class CheckpointPlan:
    """A checkpoint in one or more safetensors files.

    Args:
        experts: the store's experts.
        family: the family of the model.
        config: the store's config.json.
        levels: bits of each expert.

    Attributes:
        files, small_files, copied: see Plan.
    """

    def __init__(self, experts: StoreExperts, family: ExportNames, config: Config, levels: Levels) -> None:
        self._experts, self._levels = experts, levels
        self._dense, self._family, config = self._form(family, config)
        # Experts first: their sizes are multiples of every element's size, so that all tensors begin at one.
        units = [*(self._layer_unit(layer) for layer in experts.layers), self._dense_unit()]
        groups = shards(units)
        names = [
            WEIGHTS_NAME if len(groups) == 1 else f"model-{i:05d}-of-{len(groups):05d}.safetensors"
            for i in range(1, len(groups) + 1)
        ]
        self.files = [_file(name, group) for name, group in zip(names, groups, strict=True)]
        self.small_files = {}
        if len(names) > 1:
            self.small_files[INDEX_NAME] = _index(self.files)
        self.small_files["config.json"] = _json(self._config(config))
        self.copied = [
            name for name in COMPANIONS if name in experts.manifest.files and name != "config.json"
        ]

    def _form(
        self, family: ExportNames, config: Config
    ) -> tuple[DenseTensors, ExportNames, Mapping[str, Any]]:
        """The dense weights, names and config of the checkpoint."""
        # Not every loader ties the head to the embedding, so that a tied model gets a head of its own.
        dense = DenseTensors(self._experts.dense, family.in_checkpoint, own_head=True)
        return dense, family, config

    def _config(self, config: Config) -> dict[str, Any]:
        """config.json of the exported weights."""
        kept = {key: value for key, value in config.items() if key != "quantization_config"}
        return kept | {"tie_word_embeddings": False}

    def _dense_unit(self) -> Unit:
        unit, dense = Unit(), self._dense
        for name in sorted(dense.names, key=lambda name: -dense.dtype(name).itemsize):
            unit.tensors[name] = _NAMES[dense.dtype(name)], dense.shape(name)
            size = dense.nbytes(name) + tensor_bytes(*unit.tensors[name])
            unit.work.append(Work(size, partial(self._dense_work, name)))
        unit.regions.append(sum(tensor_bytes(*spec) for spec in unit.tensors.values()))
        return unit

    def _dense_work(self, name: str) -> Made:
        return Made([(0, raw(self._dense.read(name)))])

    def _layer_unit(self, layer: int) -> Unit:
        """The experts of a layer in bf16: one tensor per matrix, or, where the family's checkpoints fuse them, two."""
        geometry, count = self._experts.geometry, self._experts.count(layer)
        gate_up, down = geometry.matrices
        inner, hidden = gate_up.rows // 2, gate_up.cols
        unit = Unit()
        if self._family.fused_checkpoints:
            shapes = [(gate_up.rows, hidden), (down.rows, down.cols)]
            if self._family.transposed:
                shapes = [shape[::-1] for shape in shapes]
            for name, shape in zip(self._family.fused(layer)[0], shapes, strict=True):
                unit.tensors[name] = "BF16", (count, *shape)
                unit.regions.append(2 * count * prod(shape))
        else:
            for expert in range(count):
                names = self._family.separate(layer, expert) or ()
                for name, shape in zip(
                    names, ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True
                ):
                    unit.tensors[name] = "BF16", shape
            unit.regions.append(2 * count * geometry.weights)
        add_experts(unit, self._experts, self._levels, layer, 2 * geometry.weights, self._bf16)
        return unit

    def _bf16(self, expert: Expert) -> Made:
        made, errors = [], Errors()
        for matrix in expert.read():
            weight = torch.empty(matrix.shape, dtype=torch.bfloat16)
            for start, end in matrix.pieces():
                part, out = matrix.rows(start, end), weight[start:end]
                out.copy_(part.at(expert.level).weights())
                if expert.compared:
                    errors.add(expert.errors(part, out))
            made.append(weight)
        if not self._family.fused_checkpoints:
            return Made([(0, raw(weight)) for weight in made], errors)
        fused = [torch.cat(made[:2]), made[2]]
        if self._family.transposed:
            fused = [weight.t() for weight in fused]
        return Made([(region, raw(weight)) for region, weight in enumerate(fused)], errors)


class CompressedPlan(CheckpointPlan):
    """A pack-quantized checkpoint of compressed-tensors: experts as integers, one by one; all other weights in bf16.

    Raises:
        UserError: levels differ in a layer or have no integers, the family's experts have no names for it, or the
            groups do not divide the matrices.
    """

    def __init__(self, experts: StoreExperts, family: ExportNames, config: Config, levels: Levels) -> None:
        self._bits = {
            layer: layer_level(levels, layer, "compressed-tensors", (8, 4)) for layer in experts.layers
        }
        self._group = min(_WIDEST_GROUP, *(matrix.group for matrix in experts.geometry.matrices))
        if uneven := [m.cols for m in experts.geometry.matrices if m.cols % self._group]:
            raise UserError(
                f"matrices of whole groups of {self._group} inputs for compressed-tensors",
                f"{uneven[0]} inputs",
                "export as safetensors",
            )
        if family.separate(experts.layers[0], 0) is None:
            raise UserError(
                "a family whose experts engines load one by one from compressed-tensors",
                f"{config['model_type']}",
                "export as safetensors",
            )
        super().__init__(experts, family, config, levels)

    def _form(
        self, family: ExportNames, config: Config
    ) -> tuple[DenseTensors, ExportNames, Mapping[str, Any]]:
        if family.quantized_as is None:
            return super()._form(family, config)
        return without_multipliers(self._experts.dense, family, family.quantized_as, config)

    def _config(self, config: Config) -> dict[str, Any]:
        schemes = {
            bits: [layer for layer, found in self._bits.items() if found == bits]
            for bits in sorted(set(self._bits.values()), reverse=True)
        }
        groups = {}
        for number, (bits, layers) in enumerate(schemes.items()):
            which = "|".join(map(str, layers))
            targets = ["Linear"] if len(schemes) == 1 else [rf"re:.*layers\.({which})\..*experts.*"]
            groups[f"group_{number}"] = {
                "targets": targets,
                "weights": {
                    "num_bits": bits,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": self._group,
                    "dynamic": False,
                },
                "input_activations": None,
                "output_activations": None,
                "format": "pack-quantized",
            }
        matrices = [name for name in self._dense.names if len(self._dense.shape(name)) == 2]
        return super()._config(config) | {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "quantization_status": "compressed",
                "config_groups": groups,
                "ignore": sorted({name.removesuffix(".weight") for name in matrices} | {"lm_head"}),
            }
        }

    def _layer_unit(self, layer: int) -> Unit:
        gate_up, down = self._experts.geometry.matrices
        shapes = [(gate_up.rows // 2, gate_up.cols)] * 2 + [(down.rows, down.cols)]
        unit, bits, group = Unit(), self._bits[layer], self._group
        for expert in range(self._experts.count(layer)):
            stems = [name.removesuffix(".weight") for name in self._family.separate(layer, expert) or ()]
            for stem in stems:
                unit.tensors[f"{stem}.weight_shape"] = "I64", (2,)
            for stem, (rows, cols) in zip(stems, shapes, strict=True):
                unit.tensors[f"{stem}.weight_packed"] = "I32", (rows, cols * bits // 32)
            for stem, (rows, cols) in zip(stems, shapes, strict=True):
                unit.tensors[f"{stem}.weight_scale"] = "BF16", (rows, cols // group)
        unit.regions.append(sum(tensor_bytes(*spec) for spec in unit.tensors.values()))
        size = unit.regions[0] // self._experts.count(layer)
        add_experts(unit, self._experts, self._levels, layer, size, self._packed)
        return unit

    def _packed(self, expert: Expert) -> Made:
        bits = self._bits[expert.layer]
        shapes, codes, scales, errors = [], [], [], Errors()
        for matrix in expert.read(self._experts.geometry.max_level):
            rows, cols = matrix.shape
            packed = torch.empty(rows, cols * bits // 8, dtype=torch.uint8)
            scale = torch.empty(rows, cols // self._group, dtype=torch.bfloat16)
            for start, end in matrix.pieces():
                part = matrix.rows(start, end)
                made = _quantized(part, bits, self._group)
                packed[start:end], scale[start:end] = pack(made.codes, bits), made.scale
                if expert.compared:
                    weights = made.affine().weights()
                    errors.add(expert.errors(part, weights, made.kept, made.scale.numel()))
            shapes.append(torch.tensor(matrix.shape))
            codes.append(packed)
            scales.append(scale)
        return Made([(0, raw(tensor)) for tensor in (*shapes, *codes, *scales)], errors)


def _quantized(source: Affine, bits: int, group: int) -> Symmetric:
    return int4(source, group) if bits == 4 else int8(source, group, torch.bfloat16)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs uint8 codes [N, K] of 4 or 8 bits, lowest bits first, into uint8 [N, K * bits / 8]: int32's bytes."""
    if bits == 8:
        return codes
    pairs = codes.contiguous().numpy().view("<u2")
    return torch.from_numpy((pairs | (pairs >> 4)).astype("uint8"))


def _file(name: str, units: list[Unit]) -> PlannedFile:
    specs = {name: spec for unit in units for name, spec in unit.tensors.items()}
    return PlannedFile(name, header_bytes(specs, {"format": "pt"}, 64), units)


def _index(files: list[PlannedFile]) -> bytes:
    total = sum(sum(file.regions[1:]) for file in files)
    places = {name: file.name for file in files for unit in file.units for name in unit.tensors}
    return _json({"metadata": {"total_size": total}, "weight_map": places})


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"


PlanMaker = Callable[[StoreExperts, ExportNames, Config, Levels], Any]
"""Makes the plan of an export in one format."""
