"""Where keys and values of sequences are in each layer, as captured launches read it."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from edgemoe.kv.sequence import SequenceKV


class SequencePlaces:
    """The places of sequences' keys and values. They are made once; moved rows are subtracted for each token."""

    def __init__(self) -> None:
        self._made = WeakKeyDictionary[SequenceKV, tuple[NDArray[np.int64], NDArray[np.int64]]]()
        """Places of token 0 where no row has moved, and the bytes of a row of keys and of values; [layers, PLACE]."""

    def next_token(self, sequence: SequenceKV) -> NDArray[np.int64]:
        """Makes room for a sequence's next token, and returns the places of its keys and values.

        Returns:
            int64 [layers, PLACE], as kernels.triton.attend.PLACE, for every layer up to the last one with attention.
        """
        stored = self._made.get(sequence)
        if stored is None:
            stored = self._made[sequence] = _first_rows(sequence)
        places, row_bytes = stored
        if not sequence.window_rows:
            return places
        token, moved = range(sequence.length, sequence.length + 1), np.zeros((len(places), 1), np.int64)
        if sequence.windows:
            sequence.windows.write(token.stop)
        for layer, rows in sequence.window_rows.items():
            rows.add(token)
            moved[layer] = rows.moved
        found: NDArray[np.int64] = places - moved * row_bytes
        return found


def _first_rows(sequence: SequenceKV) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Places of the first rows of each layer's keys and values, and the bytes of a row; [layers, PLACE]."""
    from edgemoe.kernels.triton.attend import PLACE

    shape = max(sequence.slots) + 1, PLACE
    places, sizes = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for layer, slot in sequence.slots.items():
        keys, values = sequence.slices[slot]
        places[layer] = keys.data_ptr(), values.data_ptr(), keys.shape[1]
        sizes[layer] = keys.stride(1) * keys.itemsize, values.stride(1) * values.itemsize, 0
    return places, sizes
