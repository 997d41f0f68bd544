"""Codes dense matrices of 4 to 8 bits with error feedback: Hessians of their inputs, then one matrix after another."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from itertools import takewhile

import torch

from edgemoe.calibrate.windows import Window
from edgemoe.console.progress import CountProgress
from edgemoe.families.base import Family
from edgemoe.kernels.native.columns import calibrated_codes, calibrated_rows
from edgemoe.models.store_model import StoreModel
from edgemoe.recode.dense_inputs import HEAD, hessians_of
from edgemoe.recode.plans import coding_room
from edgemoe.recode.request import RecodeRequest
from edgemoe.storage.record.nested_codes import ColumnOrder
from edgemoe.storage.record.offsets import MatrixSpec
from edgemoe.storage.store import dense_groups, dense_shapes
from edgemoe.storage.store.dense import DenseWeights, quantize_rows
from edgemoe.storage.threads import in_order, one_core_each

MEMORY = 1_500_000_000
"""Bytes: limit of the Hessians that exist at a time, next to the model, and of the matrices that are coded at a time,
next to the Hessians. A single one is always allowed."""

PIECE = 1 << 24
"""Weights of a matrix that are coded at a time."""


class DenseCoding:
    """Makes the tensors of every matrix of 8 or fewer bits.

    Args:
        store: the store, whose inputs are sampled at its highest level.
        family: names of its matrices.
        weights: the checkpoint's.
        windows: the sample.
        request: the limits.
        threads: threads that code. The result does not depend on it.
    """

    def __init__(
        self,
        store: StoreModel,
        family: Family,
        weights: DenseWeights,
        windows: Sequence[Window],
        request: RecodeRequest,
        threads: int,
    ) -> None:
        self._store, self._family, self._weights = store, family, weights
        self._windows, self._request, self._threads = windows, request, threads
        self._left, self._made = list(weights.coded), dict[str, tuple[torch.Tensor, ...]]()
        self._tied = HEAD not in map(family.in_modules, weights.names)

    def tensors(self) -> Generator[tuple[str, torch.Tensor]]:
        """Yields the tensors of the new file, one at a time.

        Raises:
            DoesNotFit: the limits are too small.
            DamagedData: the checkpoint is damaged.
        """
        with CountProgress(
            f"coding dense weights of {self._store.directory.name}", len(self._left)
        ) as progress:
            yield from self._weights.tensors(partial(self._coded, progress.advance))

    def _coded(self, advance: Callable[[], None], name: str) -> tuple[torch.Tensor, ...]:
        if name not in self._made:
            self._code_next(advance)
        return self._made.pop(name)

    def _code_next(self, advance: Callable[[], None]) -> None:
        """Codes the next matrices, whose Hessians fit."""
        largest = max(map(self._bytes, self._left))
        coding_room(largest, MEMORY)
        inputs = {each: self._input(each) for each in self._left}
        sizes = {whole: self._hessian_bytes(each) for each, whole in inputs.items() if whole}
        found = hessians_of(self._store, self._windows, sizes, self._request, MEMORY) if sizes else {}
        names = list(takewhile(lambda each: inputs[each] is None or inputs[each] in found, self._left))
        self._left = self._left[len(names) :]
        hessians = [found.get(inputs[each] or "") for each in names]
        with one_core_each(self._threads) as pool:
            tasks = (
                (self._bytes(each), partial(self._one, each, hessian))
                for each, hessian in zip(names, hessians, strict=True)
            )
            with closing(in_order(pool, tasks, coding_room(largest, MEMORY))) as coded:
                for each, tensors in zip(names, coded, strict=True):
                    self._made[each] = tensors
                    advance()

    def _input(self, name: str) -> str | None:
        """Name in the model of the matrix whose inputs a matrix is coded for; None: an embedding, which has none.

        An embedding that is the head, too, is coded for the head's inputs.
        """
        whole = self._family.in_whole(name)
        if not self._family.is_outer(name) or whole == HEAD:
            return whole
        return HEAD if self._tied else None

    def _hessian_bytes(self, name: str) -> int:
        """Bytes of the Hessian of a matrix's inputs."""
        return 4 * int(self._weights.shape(name)[1]) ** 2

    def _bytes(self, name: str) -> int:
        """Bytes that a matrix takes while it is coded."""
        rows, cols = self._weights.shape(name)
        whole = 4 * rows * cols  # as it is read, its bytes, and the bytes of its parts
        return whole + 4 * (5 * self._piece(name) * cols + 4 * cols**2)

    def _one(self, name: str, hessian: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Codes a matrix; to nearest without a Hessian."""
        if hessian is None:
            return self._weights.nearest(name)
        weight, bits, parts = self._weights.read(name), self._weights.bits(name), list[torch.Tensor]()
        if bits == 8:
            order, (_, scales) = ColumnOrder(hessian, len(hessian)), quantize_rows(weight)
            pieces = zip(weight.split(self._piece(name)), scales.split(self._piece(name)), strict=True)
            return torch.cat([calibrated_rows(part, scale, order) for part, scale in pieces]), scales
        for part in weight.split(self._piece(name)):
            spec = MatrixSpec.of(name, len(part), part.shape[1], dense_shapes.GROUP)
            codes, parameters = calibrated_codes(part.float(), hessian, spec, {bits: 1.0}, bits)
            parts.append(dense_groups.packed(codes, parameters, bits))
        return (dense_groups.joined(parts),)

    def _piece(self, name: str) -> int:
        """Rows of a matrix that are coded at a time. A row's codes do not depend on other rows."""
        rows, cols = self._weights.shape(name)
        return min(rows, max(PIECE // cols // dense_shapes.ROWS, 1) * dense_shapes.ROWS)
