"""The experts of a store as affine codes: w = (code - middle) * step + centre, group by group."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import local

import torch

from edgemoe.errors import UserError
from edgemoe.storage.base import PLANES_OF_LEVEL, ExpertKey, Plane
from edgemoe.storage.files.unbuffered import aligned
from edgemoe.storage.record.decode import RecordCodes
from edgemoe.storage.record.encode import Quantized
from edgemoe.storage.record.layout import LAYOUTS
from edgemoe.storage.record.offsets import MatrixSpec
from edgemoe.storage.record.planes import Bytes
from edgemoe.storage.store.manifest import Manifest
from edgemoe.storage.store.reader import RecordReader

MIDDLE = {8: 135.5, 4: 8.0, 2: 7.5}
"""Level -> the code whose weight is the centre, among codes of 8 bits at level 8 and of 4 bits below. A code of level 2
is 4 * (code >> 6) + 1, whose weight is the middle of the four codes of level 4 that share these bits."""

_PIECE = 1 << 19
"""Weights computed in float32 at a time: fewer take longer in calls, more leave a CPU's cache."""


@dataclass(frozen=True)
class Affine:
    """A matrix [N, K] of an expert at one level.

    Args:
        codes: uint8 [N, K]: 0..255 at level 8, 0..15 below.
        step: float32 [N, ceil(K / group)], the difference of the weights of neighbouring codes.
        centre: float32 [N, ceil(K / group)].
        middle: the code, maybe between two, whose weight is the centre.
        group: consecutive inputs that share a step and a centre.
    """

    codes: torch.Tensor
    step: torch.Tensor
    centre: torch.Tensor
    middle: float
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        rows, cols = self.codes.shape
        return rows, cols

    @cached_property
    def offset(self) -> torch.Tensor:
        """The weight of code 0, float32 [N, ceil(K / group)]."""
        return self.centre - self.middle * self.step

    def rows(self, start: int, end: int) -> Affine:
        """The matrix [end - start, K] of rows start..end."""
        return Affine(
            self.codes[start:end], self.step[start:end], self.centre[start:end], self.middle, self.group
        )

    def at(self, level: int) -> Affine:
        """A store's matrix at `level`, or at its own if that is lower: 8, 4, 2, or 0, where all weights are zero."""
        eight = self.middle == MIDDLE[8]
        if MIDDLE.get(level) == self.middle or (level == 8 and not eight):
            return self
        codes, scale = (self.codes >> 4, self.step * 16) if eight else (self.codes, self.step)
        if not level:
            return Affine(codes, torch.zeros_like(scale), torch.zeros_like(scale), MIDDLE[4], self.group)
        if level == 2:
            codes = (codes & 12) | 1
        return Affine(codes, scale, self.centre, MIDDLE[level], self.group)

    def regrouped(self, group: int) -> Affine:
        """Splits the matrix into narrower groups without changing its weights; `group` divides its own."""
        times = self.group // group
        if times == 1:
            return self
        groups = -(-self.shape[1] // group)
        step, centre = (t.repeat_interleave(times, 1)[:, :groups] for t in (self.step, self.centre))
        return Affine(self.codes, step.contiguous(), centre.contiguous(), self.middle, group)

    def weights(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Computes the weights [N, K], some rows at a time."""
        out = torch.empty(self.shape, dtype=dtype)
        for start, end in self.pieces():
            out[start:end] = self.rows(start, end)._weights()
        return out

    def pieces(self) -> list[tuple[int, int]]:
        """Ranges of rows that are computed at a time."""
        rows, cols = self.shape
        step = max(_PIECE // cols, 1)
        return [(start, min(start + step, rows)) for start in range(0, rows, step)]

    def _weights(self) -> torch.Tensor:
        rows, cols = self.shape
        step, offset = self.step.unsqueeze(-1), self.offset.unsqueeze(-1)
        if cols % self.group:
            padded = torch.nn.functional.pad(self.codes, (0, -cols % self.group))
            whole = padded.float().view(rows, -1, self.group).mul_(step).add_(offset)
            return whole.view(rows, -1)[:, :cols]
        return self.codes.float().view(rows, -1, self.group).mul_(step).add_(offset).view(rows, cols)


class StoreExperts:
    """Reads experts of a store at any of its levels. A context manager; thread-safe except for its end.

    Args:
        directory: the directory of the store.
        manifest: the manifest of the store.

    Raises:
        MissingTensor, TruncatedFile, ReadFailed, StoreBusy, UserError: from RecordReader.open.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory, self.manifest, self.geometry = directory, manifest, manifest.geometry
        self.layers = tuple(sorted(manifest.layers))
        self._layout = LAYOUTS[manifest.layout]
        self._reader = RecordReader.open(directory, manifest)
        self._buffers = local()

    def __enter__(self) -> StoreExperts:
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.close()

    @property
    def dense(self) -> Path:
        """The file of the dense weights."""
        return self.directory / self.manifest.dense_name

    def count(self, layer: int) -> int:
        """Experts of a layer."""
        return len(self.manifest.layers[layer].records)

    def read(self, layer: int, expert: int, level: int) -> tuple[Affine, Affine, Affine]:
        """Reads and verifies an expert's gate [I, H], up [I, H] and down [H, I].

        Their codes lie in arrays of this thread that its next call overwrites.

        Args:
            layer, expert: the expert's place.
            level: 8, 4, 2 or 0, at most the store's highest; a matrix with fewer bits is read at its own level.

        Raises:
            TruncatedFile, ChecksumMismatch, ReadFailed: with layer, expert, plane, path and offset.
            UserError: the store has no such level.
        """
        if level > self.geometry.max_level:
            raise UserError(
                f"a level of at most {self.geometry.max_level}, the store's highest",
                str(level),
                "choose a lower level, or convert the model with a higher --max-level",
            )
        # Below level 4 a matrix of level 4 is lowered, where the store has one.
        own = self.geometry.of_layer(layer)
        read = max(min(level, own.max_level), min(4, own.max_level))
        if not hasattr(self._buffers, "codes"):
            self._buffers.codes = RecordCodes(self.geometry, self._layout)
            self._buffers.record = aligned(self.geometry.record_bytes)
        record = self._record(ExpertKey(layer, expert), own.prefix_bytes(read), read)
        pairs = zip(own.matrices, self._buffers.codes.unpack(record, read, layer), strict=True)
        gate_up, down = (
            _affine(spec, quantized, min(read, spec.limit)).at(level) for spec, quantized in pairs
        )
        inner = gate_up.shape[0] // 2
        return gate_up.rows(0, inner), gate_up.rows(inner, 2 * inner), down

    def _record(self, key: ExpertKey, size: int, level: int) -> Bytes:
        buffer: Bytes = self._buffers.record[:size]
        self._reader.read(key, Plane.BASE, Plane(PLANES_OF_LEVEL[level] - 1), [buffer.data])
        return buffer


def _affine(spec: MatrixSpec, quantized: Quantized, level: int) -> Affine:
    codes, parameters = quantized
    scale, centre = (t.t()[: spec.rows].contiguous() for t in parameters.float().unbind(-1))
    step = scale / 16 if level == 8 else scale
    return Affine(codes[: spec.rows, : spec.cols], step, centre, MIDDLE[level], spec.group)
