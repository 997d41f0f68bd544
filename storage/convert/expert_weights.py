"""An expert's matrices from a checkpoint, stored as separate tensors or fused over a layer's experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Protocol

import torch

from edgemoe.errors import DamagedData, MissingTensor, ModelRefused
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.source_bits import Found, SourceMatrix, choose_geometry
from edgemoe.storage.files.untrusted import DOWNLOAD_AGAIN
from edgemoe.storage.formats.base import Weight
from edgemoe.storage.formats.source_codes import Matrix, SourceCodes
from edgemoe.storage.record.offsets import MatrixSpec, RecordGeometry

_WEIGHT, _BIAS = ".weight", ".bias"


class ExpertNames(Protocol):
    """Sizes and tensor names of a model's experts. Immutable."""

    @property
    def moe_layers(self) -> Sequence[int]:
        """Layers with experts, ascending."""

    @property
    def experts(self) -> int:
        """Experts of every layer with experts."""

    @property
    def hidden(self) -> int:
        """The size H of a hidden state."""

    @property
    def intermediate(self) -> int:
        """An expert's inner size I."""

    @property
    def gated(self) -> bool:
        """Whether experts have a gate."""

    @property
    def transposed(self) -> bool:
        """Whether fused tensors are [E, H, 2I] and [E, I, H]."""

    @property
    def either_way(self) -> bool:
        """Whether transposed fused tensors may also be [E, 2I, H] and [E, H, I], which their shapes show."""

    def separate(self, layer: int, expert: int) -> tuple[str, ...] | None:
        """Names of an expert's gate [I, H], where it has one, up [I, H] and down [H, I]; None if the family has only
        fused tensors.
        """

    def fused(self, layer: int) -> Sequence[tuple[str, str]]:
        """Pairs of names, one for each naming in use: gate and up [E, 2I, H], rows in the order of the model's gating,
        or up [E, I, H] alone, and down [E, H, I]. A checkpoint has one of the pairs.
        """

    def is_expert(self, name: str) -> bool:
        """Whether a tensor of this name holds expert weights, of any layer and expert."""

    def is_router(self, name: str) -> bool:
        """Whether a tensor of this name is a router's weight, which is never quantized."""

    def is_outer(self, name: str) -> bool:
        """Whether a tensor of this name is the weight of the embedding or the head."""

    def keeps_rows(self, name: str) -> bool:
        """Whether a dense matrix of this name has at least 8 bits: an embedding, a head, one that is read in parts."""

    def keeps_precision(self, name: str) -> bool:
        """Whether a dense tensor of this name stays float32, as the model computes with it."""

    def is_unused(self, name: str) -> bool:
        """Whether a tensor of this name is outside of the model, such as a layer for multi-token prediction."""


class ExpertWeights:
    """All experts of a checkpoint. Thread-safe.

    Attributes:
        layers: numbers of the layers with experts, ascending.
        count: experts of every layer in `layers`.
        names: the names of all tensors that hold expert weights.

    Raises:
        MissingTensor: an expert's tensor is missing or has another shape than the config. No weights are read.
        ModelRefused: the checkpoint has more experts than the config, or they are not floating point.
    """

    def __init__(self, checkpoint: Checkpoint, family: ExpertNames) -> None:
        self._checkpoint, self._family = checkpoint, family
        self.layers = tuple(family.moe_layers)
        self.count = family.experts
        self._hidden, self._inner = family.hidden, family.intermediate
        self.names = {
            name for name in checkpoint.names() if family.is_expert(name) and not family.is_unused(name)
        }
        self._biases = {
            name for name in checkpoint.names() if name.endswith(_BIAS) and family.is_expert(_weight_of(name))
        }
        self.names |= self._biases
        self._fused = {
            layer: pair for layer in self.layers for pair in family.fused(layer) if pair[0] in self.names
        }
        self._check_names()
        first, last = (MatrixSpec.of(*sides) for sides in matrix_sides(family))
        self._specs = first, last
        self.sources: Found = {layer: self._sources(layer) for layer in self.layers}
        """Layer -> what the checkpoint has of both matrices."""

    def has_codes(self, max_level: int | None) -> bool:
        """Whether a store up to `max_level`, or to any level if None, keeps the source's codes of all matrices."""
        return all(each.kept_bits(max_level) for layer in self.sources.values() for each in layer)

    def geometry(self, max_level: int | None) -> RecordGeometry:
        """Computes the geometry of the records.

        Args:
            max_level: 8 or 4, the highest level to store; None: as many bits as the source can fill.

        Raises:
            ModelRefused: level 8 where no matrix can fill more than 4 bits.
        """
        return choose_geometry(self._specs, self.sources, max_level, self._checkpoint.directory)

    def layer_bytes(self, layer: int) -> int:
        """Bytes of a layer's expert weights on disk."""
        return sum(self._checkpoint[name].nbytes for name, _ in self._wanted(layer))

    def read(self, layer: int, expert: int) -> tuple[Matrix, Matrix]:
        """Reads the matrices of matrix_sides, a gate first: codes if the source has any for a matrix, or floats.

        Raises:
            DamagedData: a weight is NaN or infinite; with layer, expert and matrix.
            ModelRefused, TruncatedFile: from Weight.read.
        """
        matrices = self._read(layer, expert)
        for (matrix, *_), weight in zip(matrix_sides(self._family), matrices, strict=True):
            parts = (weight.scale, weight.centre) if isinstance(weight, SourceCodes) else (weight,)
            if not all(all_finite(part) for part in parts):
                raise DamagedData(
                    f"finite weights in layer {layer}, expert {expert}, matrix {matrix}",
                    f"NaN or infinity in {self._checkpoint.directory}",
                    DOWNLOAD_AGAIN,
                )
        return matrices

    def _read(self, layer: int, expert: int) -> tuple[Matrix, Matrix]:
        source = self._checkpoint
        if layer in self._fused:
            first, second = (
                weight.t().contiguous() if turned else weight
                for weight, turned in (
                    (source[name].read_slice(expert), self._is_transposed(name, shape))
                    for name, shape in self._plain(layer)
                )
            )
            return first, second
        names = self._separate(layer, expert)
        for name in names:
            self._require_zeros(name.removesuffix(_WEIGHT) + _BIAS)
        *parts, down = (source[name] for name in names)
        return _joined(parts), _joined([down])

    def _require_zeros(self, bias: str) -> None:
        """Raises ModelRefused for a bias next to an expert's matrix that is not 0: experts have none."""
        if bias in self._biases and bool(self._checkpoint[bias].read().any()):
            raise ModelRefused(
                f"experts without biases, or with zeros as {bias} in {self._checkpoint.directory}",
                "other values",
                "use a checkpoint of this family without biases of experts",
            )

    def _sources(self, layer: int) -> tuple[SourceMatrix, SourceMatrix]:
        """The tensors from which a layer's two matrices are made, with their types."""
        if layer in self._fused:
            names = [[name] for name in self._fused[layer]]
        else:
            of_experts = [self._separate(layer, expert) for expert in range(self.count)]
            names = [[name for each in of_experts for name in each[:-1]], [each[-1] for each in of_experts]]
        first, down = (
            SourceMatrix.of((self._checkpoint[name] for name in of_matrix), self.count * spec.weights)
            for of_matrix, spec in zip(names, self._specs, strict=True)
        )
        return first, down

    def _wanted(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields name and shape of every tensor that holds a layer's experts."""
        if layer in self._fused:
            for name, (count, rows, columns) in self._plain(layer):
                turned = self._is_transposed(name, (count, rows, columns))
                yield name, (count, columns, rows) if turned else (count, rows, columns)
            return
        for expert in range(self.count):
            *parts, down = self._separate(layer, expert)
            yield from ((part, (self._inner, self._hidden)) for part in parts)
            yield down, (self._hidden, self._inner)

    def _plain(self, layer: int) -> tuple[tuple[str, tuple[int, int, int]], ...]:
        """Names of a layer's two fused tensors, and their shapes as the modules have them."""
        first, second = (
            (name, (self.count, rows, columns))
            for name, (_, rows, columns) in zip(self._fused[layer], matrix_sides(self._family), strict=True)
        )
        return first, second

    def _is_transposed(self, name: str, plain: tuple[int, int, int]) -> bool:
        """Whether a fused tensor, whose shape is `plain` where it is not, is transposed in the checkpoint."""
        if not self._family.transposed or not self._family.either_way:
            return self._family.transposed
        return name not in self.names or self._checkpoint[name].shape != plain

    def _separate(self, layer: int, expert: int) -> tuple[str, ...]:
        names = self._family.separate(layer, expert)
        if names is None:
            wanted = " or ".join(pair[0] for pair in self._family.fused(layer))
            raise MissingTensor(f"{wanted} in {self._checkpoint.directory}", "no such tensor", DOWNLOAD_AGAIN)
        return names

    def _check_names(self) -> None:
        unclaimed = self.names - self._biases
        for layer in self.layers:
            for name, shape in self._wanted(layer):
                found = self._checkpoint[name].shape if name in self.names else None
                if found != shape:
                    raise MissingTensor(
                        f"tensor {name} of shape {shape} in {self._checkpoint.directory}",
                        f"shape {found}" if found else "no such tensor",
                        DOWNLOAD_AGAIN,
                    )
                _ = self._checkpoint[name].dtype
                unclaimed.discard(name)
        if unclaimed:
            raise ModelRefused(
                f"{self.count} experts in each of {len(self.layers)} layers, as config.json says",
                f"{len(unclaimed)} more tensors with expert weights, first {min(unclaimed)}",
                "check that config.json belongs to this checkpoint",
            )


def matrix_sides(family: ExpertNames) -> tuple[tuple[str, int, int], tuple[str, int, int]]:
    """Name, rows and columns of both matrices of an expert's record; experts without a gate have `up` alone."""
    inner, hidden = family.intermediate, family.hidden
    first = ("gate_up", 2 * inner, hidden) if family.gated else ("up", inner, hidden)
    return first, ("down", hidden, inner)


def _joined(parts: Sequence[Weight]) -> Matrix:
    """The rows of some tensors one after another: codes, if all of them have any."""
    if all(part.group is not None for part in parts):
        return reduce(SourceCodes.append, (part.codes() for part in parts))
    read = [part.read() for part in parts]
    return torch.cat(read) if len(read) > 1 else read[0]


def _weight_of(bias: str) -> str:
    """The name of the matrix that a bias lies next to."""
    return bias.removesuffix(_BIAS) + _WEIGHT


def all_finite(weight: torch.Tensor) -> bool:
    """Whether a floating-point tensor has no NaN and no infinity. Allocates no tensor of that size."""
    if not weight.numel():
        return True
    low, high = torch.aminmax(weight)
    return bool(torch.isfinite(low) & torch.isfinite(high))
