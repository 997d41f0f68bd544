"""Forms of two and three block kinds whose bytes say what they are, for tests of tiers and transfers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Event

import numpy as np
import torch

from cache.base import Tier
from storage.base import (
    PLANES_OF_LEVEL,
    BlockKind,
    Blocks,
    ExpertKey,
    Plane,
    PlaneReader,
    ResidentForm,
    Source,
)

PLANE_BYTES = {Plane.BASE: 1000, Plane.D4: 200, Plane.D8: 30}
"""What the toy disk says it read for a plane."""


def disk_bytes(held: int, level: int) -> int:
    """Bytes the toy disk reads for the planes that an expert at `held` lacks at `level`."""
    return sum(PLANE_BYTES[Plane(i)] for i in range(PLANES_OF_LEVEL[held], PLANES_OF_LEVEL[level]))


class ToyForm(ResidentForm):
    """A block's bytes name its expert, its kind and the level its contents are of."""

    def __init__(self, kinds: Sequence[BlockKind], merged: bool) -> None:
        self.kinds = tuple(kinds)
        self.merged = merged

    def content(self, key: ExpertKey, kind: str, level: int) -> bytes:
        """What the block of a kind holds of an expert that is complete at `level`."""
        size = next(k.size for k in self.kinds if k.name == kind)
        of = min(level, 4) if self.merged and kind == "p4" else 0
        text = f"layer {key.layer} expert {key.expert} {kind} {of};".encode()
        return (text * (size // len(text) + 1))[:size]

    def rewritten(self, held: int, level: int) -> tuple[str, ...]:
        new = [k.name for k in self.kinds_at(level) if k.level > held]
        if self.merged and held == 2 < level:
            new.insert(0, "p4")
        return tuple(new)

    def fill(self, reader, key: ExpertKey, level: int, into: Blocks, source: Source | None) -> int:
        held = source.level if source else 0
        for kind, block in source.blocks.items() if source else ():
            assert bytes(block) == self.content(key, kind, held)
        changed = self.rewritten(held, level)
        read = 0
        if held < level:
            first, last = Plane(PLANES_OF_LEVEL[held]), Plane(PLANES_OF_LEVEL[level] - 1)
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


class ToyReader(PlaneReader):
    """A disk that fails, and that makes reads wait, where it is told to."""

    def __init__(self) -> None:
        self.reads: list[ExpertKey] = []
        self.errors: dict[ExpertKey, Exception] = {}
        self.gates: dict[ExpertKey, Event] = {}
        self.begun: dict[ExpertKey, Event] = {}

    def hold(self, key: ExpertKey) -> tuple[Event, Event]:
        """(set once the read of `key` has begun, to be set before it ends)."""
        self.begun[key], self.gates[key] = Event(), Event()
        return self.begun[key], self.gates[key]

    def read(self, key, first, last, into):
        self.reads.append(key)
        if key in self.gates:
            self.begun[key].set()
            assert self.gates[key].wait(timeout=30)
        if key in self.errors:
            raise self.errors[key]
        return sum(size for plane, size in PLANE_BYTES.items() if first <= plane <= last)

    def close(self) -> None:
        pass


def write(block: memoryview | torch.Tensor, content: bytes) -> None:
    np.asarray(block)[:] = np.frombuffer(content, np.uint8)


def contents(blocks: Blocks) -> dict[str, bytes]:
    return {kind: np.asarray(block).tobytes() for kind, block in blocks.items()}


def expected(form: ToyForm, key: ExpertKey, level: int) -> dict[str, bytes]:
    """The bytes of every block of an expert at `level`."""
    return {kind.name: form.content(key, kind.name, level) for kind in form.kinds_at(level)}


def put(tier: Tier, form: ToyForm, key: ExpertKey, level: int) -> None:
    """Makes an expert resident, and the most recently used."""
    reservation = tier.reserve(key, level)
    assert reservation is not None
    for kind, block in reservation.into.items():
        write(block, form.content(key, kind, level))
    tier.release(tier.publish(reservation))


def check(tier: Tier, form: ToyForm, residents: Mapping[ExpertKey, int]) -> None:
    """Asserts that exactly `residents` are in the tier, whole and with their own bytes."""
    tier.check_integrity()
    assert tier.resident() == residents
    for key, level in residents.items():
        lease = tier.acquire(key, level)
        assert lease is not None
        assert (lease.key, lease.level) == (key, level)
        assert contents(lease.blocks) == expected(form, key, level)
        tier.release(lease)
