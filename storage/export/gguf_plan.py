"""Exports as GGUF: experts as Q4_1 or Q8_0; other matrices as F16, or Q8_0, Q5_1 or Q4_1 where the store has codes."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

from edgemoe.errors import ModelRefused, UserError
from edgemoe.storage.convert.config import Config
from edgemoe.storage.export.dense import DenseTensors
from edgemoe.storage.export.gguf_blocks import BLOCK, blocks_bytes, encode, q8_0
from edgemoe.storage.export.gguf_fields import add_fields, architecture_of, header, sizes
from edgemoe.storage.export.levels import Levels, layer_level
from edgemoe.storage.export.matrices import StoreExperts
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
from edgemoe.storage.files.untrusted import foreign_code
from edgemoe.storage.formats.gguf_names import OUTSIDE
from edgemoe.storage.record.offsets import align

_ACTION = "export as compressed-tensors or safetensors"
_KINDS = {8: Kind.Q8_0, 4: Kind.Q4_1}
_GROUPED = {6: Kind.Q8_0, 5: Kind.Q5_1, 4: Kind.Q4_1}
"""Bits of codes in groups -> type of a dense tensor. GGUF has no type for such 6-bit codes: they are coded again."""

_LARGEST = torch.finfo(torch.float16).max

RowOrder = Callable[[torch.Tensor], torch.Tensor]
"""The rows of a dense tensor in the order and number of the file's."""


class GgufPlan:
    """A model as one GGUF file, or as the parts of one.

    Args:
        experts: the store's experts.
        family: the family of the model.
        config: the store's config.json.
        levels: bits of each expert.

    Attributes:
        files, small_files, copied: see Plan.

    Raises:
        ModelRefused: the reader of GGUF files knows no such architecture, tensor or tokenizer.
        UserError: levels differ in a layer, or have no type.
    """

    def __init__(self, experts: StoreExperts, family: ExportNames, config: Config, levels: Levels) -> None:
        self._experts, self._config, self._levels = experts, config, levels
        self._name, self._architecture = architecture_of(config)
        own_head = self._architecture.own_head
        self._dense = dense = DenseTensors(experts.dense, family.in_checkpoint, own_head=own_head)
        self._repeats = config["num_attention_heads"] // (
            config.get("num_key_value_heads") or config["num_attention_heads"]
        )
        self._sizes = sizes(config, self._architecture)
        self._kinds = {layer: _KINDS[layer_level(levels, layer, "GGUF", (8, 4))] for layer in experts.layers}
        if uneven := [m.cols for m in experts.geometry.matrices if m.cols % BLOCK]:
            wanted = f"matrices of whole blocks of {BLOCK} inputs for GGUF"
            raise UserError(wanted, f"{uneven[0]} inputs", "export as safetensors")
        names = {name: self._named(name) for name in dense.names}
        outside = Unit()
        for name, theirs in names.items():
            if not theirs.startswith("blk."):
                self._add_dense(outside, name, theirs)
        units = [_padded(outside)]
        for layer in experts.layers:
            unit = Unit()
            for name, theirs in names.items():
                if theirs.startswith(f"blk.{layer}."):
                    self._add_dense(unit, name, theirs)
            self._add_experts(unit, layer)
            units.append(_padded(unit))
        self.files = self._files(shards(units))
        self.small_files: dict[str, bytes] = {}
        self.copied: list[str] = []

    def _files(self, groups: list[list[Unit]]) -> list[PlannedFile]:
        total = sum(len(unit.tensors) for units in groups for unit in units)
        out = []
        for number, units in enumerate(groups):
            writer = gguf.GGUFWriter(None, self._name)
            if not number:
                with foreign_code("a tokenizer and sizes that a GGUF file can have", _ACTION):
                    add_fields(writer, self._experts.directory, self._config)
            if len(groups) > 1:
                writer.add_uint16(gguf.Keys.Split.LLM_KV_SPLIT_NO, number)
                writer.add_uint16(gguf.Keys.Split.LLM_KV_SPLIT_COUNT, len(groups))
                writer.add_int32(gguf.Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT, total)
            for unit in units:
                for name, (kind, shape) in unit.tensors.items():
                    size, stored = blocks_bytes(kind, shape), gguf.quant_shape_to_byte_shape(shape, kind)
                    writer.add_tensor_info(name, stored, np.dtype(np.uint8), size, raw_dtype=kind)
            part = f"-{number + 1:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
            out.append(PlannedFile(f"model{part}.gguf", header(writer), units))
        return out

    def _named(self, name: str) -> str:
        """The name in the file of a dense tensor of a checkpoint."""
        stem, _, last = name.rpartition(".")
        if last == "weight":
            for theirs, ours in OUTSIDE.items():
                if stem == ours:
                    return f"{theirs}.weight"
            if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem):
                for theirs, ours in self._architecture.names(self._name).items():
                    if match[2] == ours:
                        return f"blk.{match[1]}.{theirs}.weight"
        raise ModelRefused(f"a tensor of {self._name} for a GGUF file", name, _ACTION)

    def _add_dense(self, unit: Unit, name: str, theirs: str) -> None:
        shape, kind = self._dense.shape(name), Kind.F32
        if len(shape) == 2 and "ffn_gate_inp" not in theirs:
            kind = Kind.Q8_0 if self._dense.is_coded(name) and shape[1] % BLOCK == 0 else Kind.F16
            kind = _GROUPED[self._dense.bits(name)] if self._dense.is_grouped(name) else kind
        part = theirs.split(".")[-2]
        order: RowOrder = _as_stored
        if (key := self._architecture.paired_rows.get(part)) is not None:
            order = partial(_paired, heads=int(self._sizes[self._architecture.keys[key]]))
        elif part in self._architecture.repeated_heads:
            width = int(self._sizes["attention.key_length"])
            order = partial(_repeated, width=width, times=self._repeats)
            shape = shape[0] * self._repeats, *shape[1:]
        unit.tensors[theirs] = kind, shape
        run = partial(self._dense_work, name, kind, order, len(unit.regions))
        unit.work.append(Work(self._dense.nbytes(name) + 2 * blocks_bytes(kind, shape), run))
        unit.regions.append(align(blocks_bytes(kind, shape), gguf.GGUF_DEFAULT_ALIGNMENT))

    def _dense_work(self, name: str, kind: Kind, order: RowOrder, region: int) -> Made:
        if self._dense.is_grouped(name):
            own = self._dense.affine(name, order)
            blocks = torch.empty(own.shape[0], blocks_bytes(kind, (own.shape[1],)), dtype=torch.uint8)
            encode(kind, own, blocks)
            return Made([(region, raw(blocks))])
        if kind is Kind.Q8_0:
            codes, scales = map(order, self._dense.codes(name))
            wide = scales.half().unsqueeze(1).expand(-1, codes.shape[1] // BLOCK)
            blocks = torch.empty(codes.shape[0], blocks_bytes(kind, codes.shape[1:]), dtype=torch.uint8)
            q8_0(codes.view(torch.uint8), wide, blocks)
            return Made([(region, raw(blocks))])
        weight = order(self._dense.read(name))
        if kind is Kind.F16 and weight.numel() and float(weight.abs().max()) > _LARGEST:
            raise UserError(f"weights of at most {_LARGEST:.0f} in {name} for F16", "larger ones", _ACTION)
        return Made([(region, raw(weight.to(torch.float16 if kind is Kind.F16 else torch.float32)))])

    def _add_experts(self, unit: Unit, layer: int) -> None:
        gate_up, down = self._experts.geometry.matrices
        count, kind = self._experts.count(layer), self._kinds[layer]
        shapes = [(gate_up.rows // 2, gate_up.cols)] * 2 + [(down.rows, down.cols)]
        first = len(unit.regions)
        for part, shape in zip(("gate", "up", "down"), shapes, strict=True):
            whole = count, *shape
            unit.tensors[f"blk.{layer}.ffn_{part}_exps.weight"] = kind, whole
            unit.regions.append(align(blocks_bytes(kind, whole), gguf.GGUF_DEFAULT_ALIGNMENT))
        size = sum(blocks_bytes(kind, shape) for shape in shapes)
        make = partial(_expert_work, kind, first)
        add_experts(unit, self._experts, self._levels, layer, size, make)


def _expert_work(kind: Kind, first: int, expert: Expert) -> Made:
    """Makes the blocks of an expert's gate, up and down, whose regions follow from `first` on."""
    made, errors = [], Errors()
    for matrix in expert.read():
        rows, cols = matrix.shape
        blocks = torch.empty(rows, blocks_bytes(kind, (cols,)), dtype=torch.uint8)
        for start, end in matrix.pieces():
            part = matrix.rows(start, end)
            exported = encode(kind, part.at(expert.level), blocks[start:end])
            if expert.compared:
                errors.add(expert.errors(part, exported.weights()))
        made.append(blocks)
    return Made([(first + part, raw(blocks)) for part, blocks in enumerate(made)], errors)


def _as_stored(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _paired(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows [N, ...] in llama.cpp's order: rows i and i + half of every head one after the other."""
    return tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _repeated(tensor: torch.Tensor, width: int, times: int) -> torch.Tensor:
    """Rows [N, ...] of heads of `width`, each head `times` times: [N * times, ...]."""
    heads = tensor.view(-1, width, *tensor.shape[1:])
    return heads.repeat_interleave(times, 0).view(-1, *tensor.shape[1:])


def _padded(unit: Unit) -> Unit:
    """Adds the zeros after every tensor that does not end where the next one begins."""

    def zeros() -> Made:
        pairs = zip(unit.tensors.values(), unit.regions, strict=True)
        rest = [size - blocks_bytes(*spec) for spec, size in pairs]
        return Made([(region, memoryview(bytes(n))) for region, n in enumerate(rest) if n])

    unit.work.append(Work(0, zeros))
    return unit
