"""Memory that experts take while they are coded: the inputs of one layer, and everything of the experts in work."""

from __future__ import annotations

from dataclasses import dataclass

from edgemoe.console.sizes import format_size
from edgemoe.console.width import say
from edgemoe.models.store_model import StoreModel
from edgemoe.recode.plans import coding_room, require_room
from edgemoe.recode.request import IMPORTANCE, WINDOW, RecodeRequest
from edgemoe.storage.record.offsets import RecordGeometry

MEMORY = 1_500_000_000
"""Bytes: limit of all experts that are coded at a time, or wait for their write; one is always allowed."""


@dataclass(frozen=True)
class CodingMemory:
    """Bytes that the coding of a store's experts takes.

    Args:
        geometry: sizes of the records.
        levels: number of levels that a code serves.
        tokens: number of tokens in the sample.
    """

    geometry: RecordGeometry
    levels: int
    tokens: int

    @classmethod
    def of(cls, store: StoreModel, request: RecodeRequest) -> CodingMemory:
        """Counts the memory for a store, and checks that the least of it is free where the store has no such codes.

        Raises:
            DoesNotFit: less is free.
        """
        tokens = request.tokens // WINDOW * WINDOW
        made = cls(store.manifest.geometry, len(IMPORTANCE[request.favour]), tokens)
        if store.manifest.codes is None:
            require_room(made.least)
        return made

    @property
    def layer(self) -> int:
        """Most bytes for a layer: its sampled inputs in bf16 and twice in float32, and two Hessians with their sums."""
        hidden, inner = (matrix.cols for matrix in self.geometry.matrices)
        return 10 * self.tokens * hidden + 8 * (hidden**2 + inner**2)

    def expert(self, rows: int) -> int:
        """Most bytes for one expert, with its record.

        Args:
            rows: number of sampled tokens that the router sent to it.
        """
        matrices = self.geometry.matrices
        largest = max(matrix.padded_rows * matrix.padded_cols for matrix in matrices)
        columns = max(matrix.padded_cols for matrix in matrices)
        # Weights as they are read and in float32, a copy for each level, Hessian, its factor and what makes it.
        coded = 4 * self.geometry.weights + 4 * (self.levels + 2) * largest + 4 * 4 * columns**2
        # Inputs of both matrices, and their products with gate weights; the products of the first matrix.
        inputs = 4 * rows * (2 * sum(matrix.cols for matrix in matrices) + matrices[0].rows)
        return coded + inputs + self.geometry.record_bytes

    @property
    def least(self) -> int:
        """Bytes that suffice: a layer, and one expert that every token is sent to."""
        return self.layer + self.expert(self.tokens)

    @property
    def limit(self) -> int:
        """Most bytes that are used."""
        return self.layer + MEMORY

    def room(self) -> int:
        """Bytes of free memory that the coding may use; prints them on stderr.

        Raises:
            DoesNotFit: less is free than `least`.
        """
        size = coding_room(self.least, self.limit)
        say(f"memory: at most {format_size(size)} for experts that are coded")
        return size
