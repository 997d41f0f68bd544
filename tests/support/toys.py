"""Forms of two and three block kinds, whose blocks name their own content, for tests of tiers and transfers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Event

import numpy as np
import torch
from integrity import check_integrity

from edgemoe.cache.plane_tier import PlaneTier
from edgemoe.storage.base import (
    PLANES_OF_LEVEL,
    BlockKind,
    Blocks,
    ExpertKey,
    Plane,
    PlaneReader,
    ResidentForm,
    Source,
)
from edgemoe.storage.record.forms import WholeForm

PLANE_BYTES = {Plane.BASE: 1000, Plane.D4: 200, Plane.D8: 30}
"""Plane -> bytes that ToyReader returns for a read of it."""


def disk_bytes(before: int, level: int) -> int:
    """Bytes that ToyReader returns for the planes between two levels; `before` 0: for all planes up to `level`."""
    return sum(PLANE_BYTES[Plane(i)] for i in range(PLANES_OF_LEVEL[before], PLANES_OF_LEVEL[level]))


class ToyForm(ResidentForm):
    """A form in which a block's bytes name its expert, its kind and its level.

    Args:
        kinds: the kinds of blocks, the lowest first.
        merged: whether a block p4 has other bytes at level 4 than at 2, as a CPU's form has.
    """

    def __init__(self, kinds: Sequence[BlockKind], merged: bool) -> None:
        self.kinds = tuple(kinds)
        self.merged = merged

    def content(self, key: ExpertKey, kind: str, level: int) -> bytes:
        """The bytes of an expert's block of a kind, where the expert is complete at `level`."""
        size = next(k.size for k in self.kinds if k.name == kind)
        of = min(level, 4) if self.merged and kind == "p4" else 0
        text = f"layer {key.layer} expert {key.expert} {kind} {of};".encode()
        return (text * (size // len(text) + 1))[:size]

    def rewritten(self, resident: int, level: int) -> tuple[str, ...]:
        new = [k.name for k in self.kinds_at(level) if k.level > resident]
        if self.merged and resident == 2 < level:
            new.insert(0, "p4")
        return tuple(new)

    def fill(self, reader, key: ExpertKey, level: int, into: Blocks, source: Source | None) -> int:
        resident = source.level if source else 0
        for kind, block in source.blocks.items() if source else ():
            assert bytes(block) == self.content(key, kind, resident)
        changed = self.rewritten(resident, level)
        read = 0
        if resident < level:
            first, last = Plane(PLANES_OF_LEVEL[resident]), Plane(PLANES_OF_LEVEL[level] - 1)
            read = reader.read(key, first, last, [])
        for kind, block in into.items():
            write(block, self.content(key, kind, level) if kind in changed else bytes(source.blocks[kind]))
        return read


MERGED = ToyForm([BlockKind("p4", 8192, 2), BlockKind("p0", 4096, 8)], merged=True)
"""Two kinds, as on a CPU: raising 2 to 4 replaces p4."""

SLICED = ToyForm(
    [BlockKind("base", 8192, 2), BlockKind("d4", 4096, 4), BlockKind("d8", 4096, 8)], merged=False
)
"""Three kinds, as on a GPU: raising only adds."""


class WholeToy(WholeForm):
    """A toy form whose promotions read the whole expert again."""

    def __init__(self, form: ToyForm) -> None:
        super().__init__(form)
        self.content, self.merged = form.content, form.merged


class ToyReader(PlaneReader):
    """A disk without bytes, whose reads a test delays or makes fail.

    Attributes:
        reads: the expert of every read, in the order in which the reads began.
        errors: expert -> the error that its reads raise.
    """

    def __init__(self) -> None:
        self.reads: list[ExpertKey] = []
        self.errors: dict[ExpertKey, Exception] = {}
        self.gates: dict[ExpertKey, Event] = {}
        self._begun: dict[ExpertKey, Event] = {}

    def delay(self, key: ExpertKey) -> tuple[Event, Event]:
        """Delays reads of `key`. Returns (an event that a read sets as it begins, one that lets the reads end)."""
        self._begun[key], self.gates[key] = Event(), Event()
        return self._begun[key], self.gates[key]

    def read(self, key, first, last, into):
        self.reads.append(key)
        if key in self.gates:
            self._begun[key].set()
            assert self.gates[key].wait(timeout=30)
        if key in self.errors:
            raise self.errors[key]
        return sum(size for plane, size in PLANE_BYTES.items() if first <= plane <= last)


def write(block: memoryview | torch.Tensor, content: bytes) -> None:
    """Overwrites a block in RAM or in a double's memory."""
    np.asarray(block)[:] = np.frombuffer(content, np.uint8)


def contents(blocks: Blocks) -> dict[str, bytes]:
    """Copies the bytes of every block."""
    return {kind: np.asarray(block).tobytes() for kind, block in blocks.items()}


def expected(form: ToyForm | WholeToy, key: ExpertKey, level: int) -> dict[str, bytes]:
    """The bytes of every block of an expert at `level`."""
    return {kind.name: form.content(key, kind.name, level) for kind in form.kinds_at(level)}


def put(tier: PlaneTier, form: ToyForm | WholeToy, key: ExpertKey, level: int) -> None:
    """Makes an expert resident at `level`, as the most recently used one."""
    reservation = tier.reserve(key, level)
    assert reservation is not None
    for kind, block in reservation.into.items():
        write(block, form.content(key, kind, level))
    tier.release(tier.publish(reservation))


def check(tier: PlaneTier, form: ToyForm | WholeToy, residents: Mapping[ExpertKey, int]) -> None:
    """Asserts that the tier has exactly `residents`, each at its level and with its own bytes."""
    check_integrity(tier)
    assert tier.resident() == residents
    for key, level in residents.items():
        lease = tier.acquire(key, level)
        assert lease is not None
        assert (lease.key, lease.level) == (key, level)
        assert contents(lease.blocks) == expected(form, key, level)
        tier.release(lease)
