"""The blocks of an expert in a memory tier, for kernels that read planes and for kernels that read nibbles.

PlaneForm, for edgemoe's own kernel: one block per plane, with the bytes of the disk.

    block base  group parameters | top 2 bits of every code      levels 2, 4 and 8
    block d4    the next 2 bits                                  levels 4 and 8
    block d8    the last 4 bits                                  level 8

MergedForm, for torch's 4-bit kernel: p4, merged once on arrival, and p0 at level 8.

    block p4    group parameters | merged nibbles code >> 4      levels 2, 4 and 8
    block p0    nibbles code & 15, as d8 is on disk              level 8

A record's prefix at level 4 is exactly as long as a p4 block, so it is read directly into the block and merged in
place. In MergedForm level 2 occupies a whole p4 block too, with the low two bits at the mid-point: it saves reads, not
memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from edgemoe.storage.base import (
    LABELS,
    PLANES_OF_LEVEL,
    BlockKind,
    Blocks,
    ExpertKey,
    Plane,
    PlaneReader,
    ResidentForm,
    Source,
)
from edgemoe.storage.record.layout import Layout
from edgemoe.storage.record.offsets import MatrixSpec, RecordGeometry
from edgemoe.storage.record.planes import Bytes, base_of, merge, midpoint
from edgemoe.storage.record.trimmed import expand

P4 = "p4"
P0 = "p0"


class PlaneForm(ResidentForm):
    """One block per plane: planes keep their bytes, and half the bits take half the memory.

    Args:
        geometry: the geometry of the store.
        store_layout: layout of the store's records.
        layout: layout that the kernel reads. Where the two differ, every plane is packed again on arrival, which takes
            longer than the read.
    """

    def __init__(self, geometry: RecordGeometry, store_layout: Layout, layout: Layout) -> None:
        self._order = _Order(geometry, store_layout, layout) if store_layout != layout else None
        self._parameters, self._low = geometry.parameter_bytes, _LowCodes(geometry, store_layout)
        levels = {Plane.BASE: 2, Plane.D4: 4, Plane.D8: 8}
        self.kinds = tuple(
            BlockKind(plane.label, span.length, levels[plane])
            for plane, span in zip(Plane, geometry.planes, strict=False)
        )

    def level_in(self, layer: int, level: int) -> int:
        """`level`, or the layer's highest level."""
        return self._low.level_in(layer, level)

    def rewritten(self, resident: int, level: int) -> tuple[str, ...]:
        """Names of the planes between the two levels; planes that are resident never change."""
        return tuple(kind.name for kind in self.kinds if resident < kind.level <= level)

    def fill(
        self, reader: PlaneReader, key: ExpertKey, level: int, into: Blocks, source: Source | None
    ) -> int:
        """Copies the planes of the source that have a block in `into`, and reads all others with one call."""
        resident = source.level if source else 0
        for kind in self.kinds if source else ():
            if source and kind.name in into and kind.name in source.blocks:
                np.copyto(_bytes(into[kind.name]), _bytes(source.blocks[kind.name]))
        planes = list(Plane)[PLANES_OF_LEVEL[resident] : PLANES_OF_LEVEL[level]]
        if not planes:
            return 0
        labels = LABELS[PLANES_OF_LEVEL[resident] : PLANES_OF_LEVEL[level]]
        blocks = list(map(into.__getitem__, labels))
        if planes[-1] is Plane.D8:
            blocks[-1] = self._low.place(key, blocks[-1])
        read = reader.read(key, planes[0], planes[-1], blocks)
        if planes[-1] is Plane.D8:
            self._low.expand(key, into[labels[-1]])
        if self._order:
            for plane in planes:
                codes = _bytes(into[plane.label])[self._parameters if plane is Plane.BASE else 0 :]
                (self._order.change_low if plane is Plane.D8 else self._order.change_plane)(codes)
        return read


class MergedForm(ResidentForm):
    """Blocks p4 and p0, for torch's kernel.

    Args:
        geometry: the geometry of the store.
        store_layout: layout of the store's records.
        layout: layout that this machine's kernel reads. Where the two differ, every expert is packed again on arrival,
            which takes about ten times as long as its merge.
    """

    def __init__(self, geometry: RecordGeometry, store_layout: Layout, layout: Layout) -> None:
        self._order = _Order(geometry, store_layout, layout) if store_layout != layout else None
        parameters, codes = geometry.parameter_bytes, geometry.codes_bytes
        self._parameters, self._half, self._low = parameters, codes // 2, _LowCodes(geometry, store_layout)
        self.kinds = (BlockKind(P4, parameters + codes, level=2),)
        if geometry.max_level == 8:
            self.kinds += (BlockKind(P0, geometry.low_bytes, level=8),)

    def level_in(self, layer: int, level: int) -> int:
        """`level`, or the layer's highest level."""
        return self._low.level_in(layer, level)

    def rewritten(self, resident: int, level: int) -> tuple[str, ...]:
        """Names of the new blocks: p4 for a promotion from below level 4, p0 for a promotion to level 8."""
        return (() if resident >= min(level, 4) else (P4,)) + ((P0,) if level == 8 > resident else ())

    def fill(
        self, reader: PlaneReader, key: ExpertKey, level: int, into: Blocks, source: Source | None
    ) -> int:
        """Copies complete blocks of the source, and reads the rest; an absent expert with one call."""
        resident = source.level if source else 0
        needs_p4 = P4 in into and resident < min(level, 4)
        needs_p0 = P0 in into and resident < 8
        if source:
            for name in (P4, P0):
                if name in into and name in source.blocks and not (name == P4 and needs_p4):
                    np.copyto(_bytes(into[name]), _bytes(source.blocks[name]))
        read = 0
        if needs_p4 and not resident:
            read = self._read_whole(reader, key, level, into)
        else:
            if needs_p4:
                assert source is not None
                read += self._promote(reader, key, into[P4], source.blocks[P4])
            if needs_p0:
                read += reader.read(key, Plane.D8, Plane.D8, [self._low.place(key, into[P0])])
                self._low_arrived(key, into[P0])
        return read

    def _read_whole(self, reader: PlaneReader, key: ExpertKey, level: int, into: Blocks) -> int:
        p4, at = into[P4], self._parameters
        codes = _bytes(p4[at:])
        if level == 2:
            read = reader.read(key, Plane.BASE, Plane.BASE, [p4[:at], p4[at + self._half :]])
            midpoint(codes)
        else:
            # base and d4 change places: merge reads d4 | base.
            buffers = [p4[:at], p4[at + self._half :], p4[at : at + self._half]]
            if level == 8:
                buffers.append(self._low.place(key, into[P0]))
            read = reader.read(key, Plane.BASE, Plane.D8 if level == 8 else Plane.D4, buffers)
            merge(codes)
            if level == 8:
                self._low_arrived(key, into[P0])
        self._pack_again(p4[self._parameters :])
        return read

    def _promote(self, reader: PlaneReader, key: ExpertKey, p4: memoryview, old: memoryview) -> int:
        """Fills level 4's p4 from level 2's and d4, the only plane that is read."""
        at = self._parameters
        read = reader.read(key, Plane.D4, Plane.D4, [p4[at : at + self._half]])
        new, before = _bytes(p4), _bytes(old)
        new[:at] = before[:at]
        codes = before[at:]
        if self._order:
            codes = self._order.back(codes)
        base_of(codes, new[at + self._half :])
        merge(new[at:])
        self._pack_again(p4[at:])
        return read

    def _pack_again(self, codes: memoryview) -> None:
        if self._order:
            self._order.change(_bytes(codes))

    def _low_arrived(self, key: ExpertKey, p0: memoryview) -> None:
        self._low.expand(key, p0)
        if self._order:
            self._order.change_low(_bytes(p0))


class WholeForm(ResidentForm):
    """Wraps a form: a promotion reads the whole expert again, and the blocks of its lower level go (DyMoE 4.4.2).

    So an expert is at one level or not at all: no blocks are left of one that loses some.

    Args:
        form: the form whose blocks are used.
    """

    def __init__(self, form: ResidentForm) -> None:
        self._form, self.kinds = form, form.kinds

    def level_in(self, layer: int, level: int) -> int:
        """The level of the wrapped form."""
        return self._form.level_in(layer, level)

    def rewritten(self, resident: int, level: int) -> tuple[str, ...]:
        """Names of all kinds at `level`, where it is above the resident one."""
        return tuple(kind.name for kind in self.kinds_at(level)) if level > resident else ()

    def fill(
        self, reader: PlaneReader, key: ExpertKey, level: int, into: Blocks, source: Source | None
    ) -> int:
        """Fills blocks as the wrapped form, without a source of a lower level."""
        usable = source if source and self.builds_on(source.level, level) else None
        return self._form.fill(reader, key, level, into, usable)

    def builds_on(self, resident: int, level: int) -> bool:
        """Whether the resident blocks are the expert at `level` or above."""
        return resident >= level


class _LowCodes:
    """Reads d8 of layers with fewer than 8 bits into the end of its block, and expands it to the block's nibbles."""

    def __init__(self, geometry: RecordGeometry, store_layout: Layout) -> None:
        self._geometry, self._stored = geometry, store_layout
        layers = {layer: geometry.of_layer(layer) for layer in geometry.layer_numbers}
        self._trimmed = {layer: own for layer, own in layers.items() if own.is_trimmed}
        self._read_bytes = {layer: own.planes[Plane.D8].length for layer, own in self._trimmed.items()}
        """Layers whose d8 is shorter than its block -> its bytes."""

    def level_in(self, layer: int, level: int) -> int:
        """`level`, or the layer's highest level."""
        return min(level, self._geometry.of_layer(layer).max_level)

    def place(self, key: ExpertKey, block: memoryview) -> memoryview:
        """Where to read d8 of an expert."""
        size = self._read_bytes.get(key.layer)
        return block if size is None else block[-size:]

    def expand(self, key: ExpertKey, block: memoryview) -> None:
        """Makes nibbles, in the stored layout, of what was read."""
        if geometry := self._trimmed.get(key.layer):
            expand(_bytes(self.place(key, block)).copy(), geometry, self._stored, _bytes(block))


class _Order:
    """Packs an expert's codes from the stored layout into the used one."""

    def __init__(self, geometry: RecordGeometry, store_layout: Layout, layout: Layout) -> None:
        self._geometry, self._stored, self._used = geometry, store_layout, layout

    def change(self, nibbles: Bytes) -> None:
        """Packs a nibble array [codes_bytes] again, in place."""
        nibbles[:] = self._permuted(nibbles, self._stored, self._used)

    def change_low(self, nibbles: Bytes) -> None:
        """Packs a nibble array [low_bytes] again, in place."""
        places = zip(self._geometry.matrices, self._geometry.low_offsets(), strict=True)
        low = [(spec, at) for spec, at in places if spec.limit > 4]
        nibbles[:] = self._permuted(nibbles, self._stored, self._used, low)

    def back(self, nibbles: Bytes) -> Bytes:
        """Returns a nibble array of the used layout in the stored layout."""
        return self._permuted(nibbles, self._used, self._stored)

    def change_plane(self, plane: Bytes) -> None:
        """Packs a two-bit plane [codes_bytes / 2] again, in place, as the upper bits of nibbles."""
        nibbles = np.empty(2 * plane.size, np.uint8)
        nibbles[plane.size :] = plane
        midpoint(nibbles)
        base_of(self._permuted(nibbles, self._stored, self._used), plane)

    def _permuted(
        self,
        codes: Bytes,
        stored: Layout,
        layout: Layout,
        places: Sequence[tuple[MatrixSpec, int]] | None = None,
    ) -> Bytes:
        """Packs nibbles of the matrices at `places`, which have an offset each; None: all of them, as p4 has them."""
        out = np.zeros_like(codes)
        for spec, at in places or [(spec, at) for spec, _, at in self._geometry.matrix_offsets()]:
            pieces = stored.cut(torch.from_numpy(codes), at, spec.nibble_bytes)
            packed = layout.pack(stored.unpack(pieces, spec.padded_rows, spec.padded_cols))
            layout.cut(torch.from_numpy(out), at, spec.nibble_bytes).copy_(packed.view(layout.pieces, -1))
        return out


def _bytes(block: memoryview) -> Bytes:
    return np.frombuffer(block, np.uint8)
