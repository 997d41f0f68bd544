"""prefetch.device_path on a device that works late and out of order, and that finds each mistake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from device_double import DoubleDevice, poisoned
from device_rig import DeviceRig, turmoil
from fetch_rig import broken
from pairwise import pairwise as few_cases
from toys import MERGED, SLICED, WholeToy, disk_bytes, expected

from edgemoe.cache.device_arena import pinned
from edgemoe.cache.lru import PooledLRU
from edgemoe.cache.plane_tier import PlaneTier
from edgemoe.errors import ChecksumMismatch, DoesNotFit
from edgemoe.prefetch import device_path
from edgemoe.prefetch.device_path import DevicePath, Staging
from edgemoe.storage.base import ExpertKey

A, B, C, D = (ExpertKey(0, expert) for expert in range(4))


@pytest.fixture
def rig() -> Iterator[Callable[..., DeviceRig]]:
    """Makes rigs, and closes them after the test."""
    made: list[DeviceRig] = []

    def make(*args, **kwargs) -> DeviceRig:
        made.append(DeviceRig(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


SHAPES = {
    "one expert": (1, None),
    "few": (3, None),
    "a smaller DRAM": (4, 2),
    "a larger DRAM": (2, 8),
    "everything in DRAM": (3, 12),
}


@pytest.mark.e2e
@few_cases(alone=["haste"], threaded=[False, True], shape=SHAPES, haste=[0.0, 0.3, 0.9])
def test_kernels_see_their_own_experts(rig, shape, haste, threaded):
    """In any order of copies and kernels a kernel reads its own expert, and no block is overwritten under it."""
    for seed in range(2):
        device = DoubleDevice(seed, haste=haste, threaded=threaded)
        turmoil(rig(device, *SHAPES[shape]), seed)


@pytest.mark.e2e
@pytest.mark.parametrize("form", [SLICED, WholeToy(SLICED)], ids=["planes", "whole"])
@pytest.mark.parametrize(("vram", "dram"), [(1, None), (4, 2), (2, 8)])
def test_kernels_see_their_own_experts_in_one_pool(rig, vram, dram, form):
    """So too where blocks of all kinds share their bytes, and a new block lies across parts of old ones."""
    for seed in range(2):
        device = DoubleDevice(seed, haste=0.3, threaded=True)
        turmoil(rig(device, vram, dram, form=form, policy=PooledLRU), seed)


def unwaited_arrivals(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DoubleDevice, "await_copies", lambda device, events: None)


def unwaited_kernels(patch: pytest.MonkeyPatch) -> None:
    copy = DoubleDevice.copy
    patch.setattr(DoubleDevice, "copy", lambda device, pairs, after: copy(device, pairs, None))


def unmarked_kernels(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DevicePath, "computed", lambda path: None)


def lost_event(patch: pytest.MonkeyPatch) -> None:
    publish = PlaneTier.publish
    patch.setattr(PlaneTier, "publish", lambda tier, reservation, arriving=None: publish(tier, reservation))


def lost_event_of_a_promotion(patch: pytest.MonkeyPatch) -> None:
    publish = PlaneTier.publish

    def without_events(tier, reservation, arriving=None):
        if reservation.lease:
            tier.residents.leases[reservation.lease].arriving = ()
        return publish(tier, reservation, arriving)

    patch.setattr(PlaneTier, "publish", without_events)


def missed_publication(patch: pytest.MonkeyPatch) -> None:
    end = device_path._Upload.end
    patch.setattr(device_path._Upload, "end", lambda load, *, complete: end(load, complete=False))


def early_publication(patch: pytest.MonkeyPatch) -> None:
    """Publishes experts that were read and not copied."""
    upload = device_path._Upload._copy

    def nothing(load, read):
        into, load.reservation = load.reservation, _Nothing
        upload(load, read)
        load.reservation = into

    patch.setattr(device_path._Upload, "_copy", nothing)


class _Nothing:
    into: dict = {}  # noqa: RUF012 - never changed


def hurried_staging(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Staging, "take", lambda staging: staging._free.get())


def hurried_sources(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DevicePath, "keep", lambda path, lease, until: path.dram.release(lease))


MISTAKES = (
    unwaited_arrivals,
    unwaited_kernels,
    unmarked_kernels,
    lost_event,
    lost_event_of_a_promotion,
    missed_publication,
    early_publication,
    hurried_staging,
    hurried_sources,
)


@pytest.mark.e2e
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_each_mistake_is_found(monkeypatch, mistake):
    """With one step of the order left out, some run of the test above fails."""
    found = 0
    for seed in range(16):
        for vram, dram in ((3, None), (4, 2), (2, 8), (2, 3)):
            with monkeypatch.context() as patch:
                mistake(patch)
                # With haste 0 work is done only when a caller waits, so that a mistake does the most harm.
                rig = DeviceRig(DoubleDevice(seed, haste=0.1 * (seed % 2)), vram, dram)
                try:
                    turmoil(rig, seed)
                    rig.device.end()
                except AssertionError:
                    found += 1
                finally:
                    rig.fetcher.transfers.workers.close()
            if found:
                return
    pytest.fail("no run failed")


def test_dram_keeps_experts_on_their_way_to_vram(rig):
    """An expert that VRAM has evicted comes back without a read, and was never copied from VRAM."""
    r = rig(DoubleDevice(), 1, 3)
    for key in (A, B, C):
        r.fetch({key: 4})
    assert r.vram.resident() == {C: 4}
    assert r.dram.resident() == {A: 4, B: 4, C: 4}
    r.fetcher.take_counts()
    r.fetch({A: 4})
    counts = r.fetcher.take_counts()
    assert (counts.ssd_bytes, counts.dram_hits, counts.spilled_bytes) == (0, 1, 0)
    assert counts.dram_bytes == SLICED.bytes_at(4)
    assert r.reader.reads == [A, B, C]


def test_experts_in_vram_grow_old_in_dram(rig):
    """DRAM evicts the expert that VRAM has all the time, for it is never requested from DRAM."""
    r = rig(DoubleDevice(), 2, 2)
    for key in (B, C, D):
        r.fetch({A: 4, key: 4})
    assert r.vram.resident() == {A: 4, D: 4}
    assert r.dram.resident() == {C: 4, D: 4}


@pytest.mark.parametrize(
    ("vram", "dram", "level", "read", "copied"),
    [
        (0, 2, 4, disk_bytes(2, 4), SLICED.bytes_at(2)),
        (0, 8, 4, 0, SLICED.bytes_at(4)),
        (2, 0, 4, disk_bytes(2, 4), 0),
        (2, 4, 8, disk_bytes(4, 8), SLICED.bytes_at(4) - SLICED.bytes_at(2)),
        (4, 2, 8, disk_bytes(4, 8), 0),
        (2, 8, 4, 0, SLICED.bytes_at(4) - SLICED.bytes_at(2)),
    ],
)
def test_only_planes_in_no_tier_are_read(rig, vram, dram, level, read, copied):
    """A plane that VRAM has is not moved, a plane that DRAM has is copied, and others are read."""
    r = rig(DoubleDevice(), 2, 2)
    r.fetch({A: 8})
    r.vram.drop(A, vram)
    r.dram.drop(A, dram)
    assert (r.vram.level_of(A), r.dram.level_of(A)) == (vram, dram)
    r.fetcher.take_counts()
    r.fetch({A: level})
    counts = r.fetcher.take_counts()
    assert (counts.ssd_bytes, counts.dram_bytes) == (read, copied)


def test_one_batch_of_copies_an_expert(rig):
    """All planes of an expert are copied in one batch, from a read or from DRAM."""
    device = DoubleDevice()
    r = rig(device, 1, 2)
    r.fetch({A: 8})
    r.fetch({B: 8})
    r.fetch({A: 8})
    assert device.batches == 3


def test_a_hit_does_not_wait_for_a_copy(rig):
    """A resident expert comes in an earlier list than an expert whose copy is under way."""
    r = rig(DoubleDevice(haste=0), 3, 3)
    r.fetch({A: 4, B: 4})
    r.fetch({C: 4})
    r.vram.drop(B)
    with r.fetcher.request({A: 4, B: 4}) as request:
        assert [[lease.key for lease in leases] for leases in request] == [[A], [B]]


def test_a_kernel_waits_for_its_own_copy_alone(rig):
    """A speculative copy, enqueued before the demanded one, is under way while the demanded expert is computed."""
    r = rig(DoubleDevice(haste=0), 3, 3)
    r.fetch({A: 4, B: 4})
    r.vram.drop(A)
    r.vram.drop(B)
    with r.fetcher.request({}):
        r.fetcher.read_ahead({B: 4, A: 4})
    ahead, wanted = (r.fetcher.transfers.under_way[key].load._copied for key in (B, A))
    with r.fetcher.request({A: 4}) as request:
        [lease] = next(request)
        assert r.device.launch(lease.blocks) == expected(SLICED, A, 4)
        assert (ahead.finished, wanted.finished) == (False, True)
        assert next(request, None) is None


def test_copied_experts_come_in_one_list(rig):
    """Experts whose copies are under way share a kernel launch, which waits for all of the copies."""
    r = rig(DoubleDevice(haste=0), 3, 3)
    r.fetch({A: 4, B: 4, C: 4})
    for key in (A, B, C):
        r.vram.drop(key)
    with r.fetcher.request({A: 4, B: 4, C: 4}) as request:
        assert [sorted(lease.key for lease in leases) for leases in request] == [[A, B, C]]


def test_speculative_copies_from_dram_are_counted(rig):
    """Bytes that a prediction copies from DRAM count as hidden for a wanted expert, and else as wasted."""
    r = rig(DoubleDevice(), 3, 6)
    r.fetch({A: 4, B: 4})
    r.vram.drop(A)
    r.vram.drop(B)
    r.fetch({C: 4}, {A: 4, B: 4})
    r.fetcher.take_counts()
    r.fetch({A: 4})
    counts = r.fetcher.take_counts()
    assert (counts.ssd_bytes, counts.vram_hits) == (0, 1)
    assert (counts.hidden_bytes, counts.wasted_bytes) == (SLICED.bytes_at(4), SLICED.bytes_at(4))


def test_a_failed_read_leaves_everything_whole(rig):
    """The error names the expert, no plane of it is resident, and once the disk recovers it is read again."""
    r = rig(DoubleDevice(), 2, 2)
    r.fetch({A: 2})
    r.reader.errors[A] = broken(A)
    with pytest.raises(ChecksumMismatch, match="expert 0"):
        r.fetch({A: 8, B: 4})
    assert (r.vram.level_of(A), r.dram.level_of(A)) == (2, 2)
    r.reader.errors.clear()
    r.fetch({A: 8, B: 4})


def test_a_refused_copy_leaves_everything_whole(rig, monkeypatch):
    """Where the device refuses a copy, its error is raised, and no expert is resident."""
    device = DoubleDevice()
    r = rig(device, 2, 2)
    with monkeypatch.context() as patch:

        def refuse(pairs, after):
            raise RuntimeError("no copy today")

        patch.setattr(device, "copy", refuse)
        with pytest.raises(RuntimeError, match="no copy today"):
            r.fetch({A: 4})
    assert (r.vram.resident(), r.dram.resident()) == ({}, {})
    r.fetch({A: 4})


def test_memory_that_cannot_be_pinned_makes_a_smaller_tier(caplog):
    """About the same fraction of every kind stays, pinned as a whole, and a warning names the bytes."""
    wanted = dict.fromkeys(SLICED.kinds, 32)
    whole = sum(kind.size * count for kind, count in wanted.items())
    device = DoubleDevice(pinnable=whole // 2)
    arenas = pinned(device, "dram", wanted)
    capacities = [arena.capacity for arena in arenas.values()]
    assert all(14 <= capacity <= 16 for capacity in capacities)
    kept = sum(kind.size * capacity for kind, capacity in zip(SLICED.kinds, capacities, strict=True))
    assert sum(device.pinned.values()) == kept
    assert f"{whole} bytes" in caplog.text
    assert f"allows {kept}" in caplog.text
    for arena in arenas.values():
        assert len({arena.unused.pop() for _ in range(arena.capacity)}) == arena.capacity
        assert arena.available == 0
        arena.close()
    assert device.pinned == {}


def test_memory_of_dropped_arenas_is_unpinned():
    """Memory that is returned to the system is not registered with a device."""
    device = DoubleDevice()
    arenas = pinned(device, "dram", dict.fromkeys(SLICED.kinds, 2))
    assert device.pinned
    del arenas
    assert device.pinned == {}


def test_staging_needs_pinned_memory():
    """Where the system pins nothing, no expert can be copied to a device, and the error says so."""
    with pytest.raises(DoesNotFit, match="ulimit"):
        Staging(DoubleDevice(pinnable=0), SLICED.kinds, 2)


def test_a_form_that_rewrites_blocks_is_refused(rig):
    """Raising an expert must only add blocks, for blocks are never copied back from a device."""
    r = rig(DoubleDevice(), 1)
    with pytest.raises(ValueError, match="never change"):
        DevicePath(r.vram, None, MERGED, r.device, r.staging)


def test_a_tier_lies_in_one_allocation():
    """All kinds of blocks lie in one allocation of the device, and none overlaps another."""
    sizes = []

    class Counting(DoubleDevice):
        def allocate(self, size):
            sizes.append(size)
            return super().allocate(size)

    counts = {kind: n for n, kind in enumerate(SLICED.kinds, 2)}
    arenas = poisoned(Counting(), counts)
    assert sizes == [sum(kind.size * count for kind, count in counts.items())]
    views = [arenas[kind.name].views[i] for kind, count in counts.items() for i in range(count)]
    starts = sorted((view.data_ptr(), len(view)) for view in views)
    assert all(start + size == following for (start, size), (following, _) in pairwise(starts))
