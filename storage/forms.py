"""How an expert lies in a memory tier on a CPU: p4 merged once on arrival, p0 beside it at level 8.

    block p4    group parameters | merged nibbles code >> 4      levels 2, 4 and 8
    block p0    nibbles code & 15, as d8 is on disk              level 8

A record's prefix at level 4 is exactly as long as a p4 block, so it is scattered straight into the block and
merged where it lies. Level 2 occupies a whole p4 block too (its low two bits at the mid-point): on a CPU it
saves reads, not memory.
"""

from __future__ import annotations

import numpy as np
import torch

from storage.base import BlockKind, Blocks, ExpertKey, Plane, PlaneReader, ResidentForm, Source
from storage.layout import Layout
from storage.planes import Bytes, base_of, merge, midpoint
from storage.record import RecordGeometry

P4 = "p4"
P0 = "p0"


class CpuForm(ResidentForm):
    """The resident form of every `cpu-*` layout.

    Args:
        geometry: of the store.
        stored: the layout that the store's records are packed in.
        used: the layout that this machine's kernel wants. Where the two differ, every expert is
            re-laid out as it arrives, which costs some ten times its merge.
    """

    def __init__(self, geometry: RecordGeometry, stored: Layout, used: Layout) -> None:
        self._geometry = geometry
        self._relay = None if stored == used else (stored, used)
        parameters, codes = geometry.parameter_bytes, geometry.codes_bytes
        self._parameters, self._half = parameters, codes // 2
        self.kinds = (BlockKind(P4, parameters + codes, level=2),)
        if geometry.max_level == 8:
            self.kinds += (BlockKind(P0, codes, level=8),)

    def rewritten(self, held: int, level: int) -> tuple[str, ...]:
        """See ResidentForm. Only 0 -> any and 2 -> any need a new p4."""
        return (() if held >= min(level, 4) else (P4,)) + ((P0,) if level == 8 > held else ())

    def fill(
        self, reader: PlaneReader, key: ExpertKey, level: int, into: Blocks, source: Source | None
    ) -> int:
        """See ResidentForm. One read call for an expert that is nowhere in memory."""
        held = source.held if source else 0
        needs_p4 = P4 in into and held < min(level, 4)
        needs_p0 = P0 in into and held < 8
        if source:
            for name in (P4, P0):
                if name in into and name in source.blocks and not (name == P4 and needs_p4):
                    np.copyto(_bytes(into[name]), _bytes(source.blocks[name]))
        read = 0
        if needs_p4 and not held:
            read = self._read_whole(reader, key, level, into)
        else:
            if needs_p4:
                assert source is not None
                read += self._promote(reader, key, into[P4], source.blocks[P4])
            if needs_p0:
                read += reader.read(key, Plane.D8, Plane.D8, [into[P0]])
                self._re_lay(into[P0])
        return read

    def _read_whole(self, reader: PlaneReader, key: ExpertKey, level: int, into: Blocks) -> int:
        p4, at = into[P4], self._parameters
        codes = _bytes(p4[at:])
        if level == 2:
            read = reader.read(key, Plane.BASE, Plane.BASE, [p4[:at], p4[at + self._half :]])
            midpoint(codes)
        else:
            # base and d4 change places on their way in: that is how merge wants them.
            buffers = [p4[:at], p4[at + self._half :], p4[at : at + self._half]]
            if level == 8:
                buffers.append(into[P0])
            read = reader.read(key, Plane.BASE, Plane.D8 if level == 8 else Plane.D4, buffers)
            merge(codes)
            if level == 8:
                self._re_lay(into[P0])
        self._re_lay(p4[self._parameters :])
        return read

    def _promote(self, reader: PlaneReader, key: ExpertKey, p4: memoryview, old: memoryview) -> int:
        """Level 2's p4 to level 4's: reads d4 only."""
        at = self._parameters
        read = reader.read(key, Plane.D4, Plane.D4, [p4[at : at + self._half]])
        new, held = _bytes(p4), _bytes(old)
        new[:at] = held[:at]
        codes = held[at:]
        if self._relay:
            stored, used = self._relay
            codes = self._permuted(codes, used, stored)
        base_of(codes, new[at + self._half :])
        merge(new[at:])
        self._re_lay(p4[at:])
        return read

    def _re_lay(self, codes: memoryview) -> None:
        """Brings a nibble array from the stored layout to the used one, in place."""
        if self._relay:
            array = _bytes(codes)
            array[:] = self._permuted(array, *self._relay)

    def _permuted(self, codes: Bytes, stored: Layout, used: Layout) -> Bytes:
        out = np.zeros_like(codes)
        for spec, _, at in self._geometry.matrix_offsets():
            end = at + spec.nibble_bytes
            nibbles = stored.unpack(torch.from_numpy(codes[at:end]), spec.padded_rows, spec.padded_cols)
            out[at:end] = used.pack(nibbles).numpy()
        return out


def _bytes(block: memoryview) -> Bytes:
    return np.frombuffer(block, np.uint8)
