"""The experts of a store as affine codes: w = (code - middle) * step + centre, group by group."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import local

import numpy as np
import torch

from storage.base import PLANES_OF_LEVEL, ExpertKey, Plane
from storage.errors import UserError
from storage.layout import LAYOUTS
from storage.manifest import Manifest
from storage.planes import Bytes, merge, midpoint
from storage.reader import RecordReader
from storage.record import MatrixSpec
from storage.unbuffered import aligned

MIDDLE = {8: 135.5, 4: 8.0, 2: 8.0}
"""Level -> the code whose weight is the centre, among codes of 8 bits at level 8 and of 4 bits below."""

_PIECE = 1 << 17
"""Weights computed in float32 at a time, so that their copies stay in a CPU's cache."""


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

    def regrouped(self, group: int) -> Affine:
        """The same matrix in narrower groups; `group` divides its own."""
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
        directory: of the store.
        manifest: of the store.

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

    def count(self, layer: int) -> int:
        """Experts of a layer."""
        return len(self.manifest.layers[layer].records)

    def read(self, layer: int, expert: int, level: int) -> tuple[Affine, Affine, Affine]:
        """Reads and verifies an expert's gate [I, H], up [I, H] and down [H, I].

        At level 0, where an expert is skipped, all weights are zero.

        Args:
            layer, expert: the expert's place.
            level: 8, 4, 2 or 0, at most the store's highest.

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
        read = level or 2
        record = self._record(ExpertKey(layer, expert), read)
        gate_up, down = self._matrices(record, read)
        if not level:
            gate_up, down = _zero(gate_up), _zero(down)
        inner = gate_up.shape[0] // 2
        return gate_up.rows(0, inner), gate_up.rows(inner, 2 * inner), down

    def _record(self, key: ExpertKey, level: int) -> Bytes:
        """A record's prefix at `level`, in a buffer of this thread that its next call overwrites."""
        size = self.geometry.prefix_bytes(level)
        buffer: Bytes | None = getattr(self._buffers, "bytes", None)
        if buffer is None or buffer.size < size:
            buffer = self._buffers.bytes = aligned(self.geometry.record_bytes)
        last = Plane(PLANES_OF_LEVEL[level] - 1)
        self._reader.read(key, Plane.BASE, last, [buffer[:size].data])
        return buffer

    def _matrices(self, record: Bytes, level: int) -> list[Affine]:
        geometry = self.geometry
        at, half = geometry.parameter_bytes, geometry.codes_bytes // 2
        p4 = np.empty(geometry.codes_bytes, np.uint8)
        p4[half:] = record[at : at + half]
        if level == 2:
            midpoint(p4)
        else:
            p4[:half] = record[at + half : at + 2 * half]
            merge(p4)
        p0 = record[geometry.planes[2].offset :] if level == 8 else None
        out = []
        for spec, parameters_at, codes_at in geometry.matrix_offsets():
            codes = self._nibbles(p4, codes_at, spec)
            if p0 is not None:
                codes = (codes << 4) | self._nibbles(p0, codes_at, spec)
            raw = record[parameters_at : parameters_at + spec.parameter_bytes].copy()
            shape = (spec.padded_cols // spec.group, spec.padded_rows, 2)
            scale, centre = torch.from_numpy(raw).view(torch.bfloat16).view(shape).float().unbind(-1)
            scale, centre = (t.t()[: spec.rows].contiguous() for t in (scale, centre))
            if level == 2:
                centre = centre + scale / 2
            step = scale / 16 if level == 8 else scale
            out.append(Affine(codes[: spec.rows, : spec.cols], step, centre, MIDDLE[level], spec.group))
        return out

    def _nibbles(self, array: Bytes, at: int, spec: MatrixSpec) -> torch.Tensor:
        spans = self._layout.spans(at, spec.nibble_bytes, self.geometry.codes_bytes)
        packed = torch.from_numpy(np.concatenate([array[span] for span in spans]))
        return self._layout.unpack(packed, spec.padded_rows, spec.padded_cols)


def _zero(matrix: Affine) -> Affine:
    nothing = torch.zeros_like(matrix.step)
    return Affine(matrix.codes, nothing, nothing, matrix.middle, matrix.group)
