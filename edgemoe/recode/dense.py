"""Codes dense matrices of 4 to 6 bits with error feedback: Hessians of their inputs, then one matrix after another."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial

import torch

from edgemoe.calibrate.windows import Window
from edgemoe.console.progress import CountProgress
from edgemoe.families.base import Family
from edgemoe.kernels.native.columns import calibrated_codes
from edgemoe.models.store_model import StoreModel
from edgemoe.recode.dense_inputs import hessians_of
from edgemoe.recode.request import RecodeRequest
from edgemoe.storage.record.offsets import MatrixSpec
from edgemoe.storage.store import dense_groups, dense_shapes
from edgemoe.storage.store.dense import DenseWeights
from edgemoe.storage.threads import in_order, one_core_each

MEMORY = 1_500_000_000
"""Bytes: limit of the Hessians that exist at a time, next to the model. A single one is always allowed."""


class DenseCoding:
    """Makes the bytes of every matrix in groups.

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
        self._left, self._made = list(weights.grouped), dict[str, torch.Tensor]()

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

    def _coded(self, advance: Callable[[], None], name: str) -> torch.Tensor:
        if name not in self._made:
            names = self._next()
            wholes = {each: self._family.in_whole(each) for each in names}
            sizes = [self._hessian_bytes(each) for each in names]
            others = sum(sizes) + max(sizes)  # of one layer's inputs in the window that runs, too
            hessians = hessians_of(self._store, self._windows, set(wholes.values()), self._request, others)
            with one_core_each(self._threads) as pool:
                tasks = (
                    (self._bytes(each), partial(self._one, each, hessians[wholes[each]])) for each in names
                )
                with closing(in_order(pool, tasks, MEMORY)) as coded:
                    for each, matrix in zip(names, coded, strict=True):
                        self._made[each] = matrix
                        advance()
        return self._made.pop(name)

    def _next(self) -> list[str]:
        """The next matrices whose Hessians fit."""
        names, size = list[str](), 0
        while self._left:
            more = self._hessian_bytes(self._left[0])
            if names and size + more > MEMORY:
                break
            names.append(self._left.pop(0))
            size += more
        return names

    def _hessian_bytes(self, name: str) -> int:
        """Bytes of the Hessian of a matrix's inputs."""
        return 4 * int(self._weights.shape(name)[1]) ** 2

    def _bytes(self, name: str) -> int:
        """Bytes that a matrix takes while it is coded."""
        rows, cols = self._weights.shape(name)
        return 4 * (4 * rows * cols + 4 * cols**2)

    def _one(self, name: str, hessian: torch.Tensor) -> torch.Tensor:
        """Codes a matrix."""
        weight = self._weights.read(name).float()
        rows, cols = weight.shape
        spec = MatrixSpec.of(name, rows, cols, dense_shapes.GROUP)
        bits = self._weights.bits
        codes, parameters = calibrated_codes(weight, hessian, spec, {bits: 1.0}, bits)
        return dense_groups.packed(codes, parameters, bits)
