"""prefetch.transitions: levels that change between steps, which no request waits for."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import SimpleQueue

import pytest
from device_double import DoubleDevice
from device_rig import DeviceRig
from fetch_rig import WAIT, Rig, after, broken, rigs
from integrity import check_integrity
from toys import MERGED, SLICED, ToyForm, contents, disk_bytes, expected, put

from edgemoe.cache.base import Lease
from edgemoe.cache.device_arena import on_device
from edgemoe.errors import ChecksumMismatch
from edgemoe.prefetch.counts import LookaheadCounts
from edgemoe.storage.base import ExpertKey

A, B, C, D, E, F = (ExpertKey(0, e) for e in range(6))
UPPER = disk_bytes(2, 4)

rig = pytest.fixture(rigs)


def cold(rig: type[Rig], base: int = 6, upper: int = 6, *, resident: str = "ABCDEF", **options) -> Rig:
    """A rig with so many blocks of both kinds, and experts resident at 2."""
    r = rig(SLICED, {"base": base, "d4": upper}, **options)
    for name in resident:
        put(r.vram, SLICED, ExpertKey(0, ord(name) - ord("A")), 2)
    return r


def change(r: Rig, promote: Mapping[ExpertKey, int], demote: Mapping[ExpertKey, int] = {}, **options) -> None:
    """Sets what changes, and starts it."""
    r.fetcher.change_levels(demote, promote, **{"rate": None} | options)
    r.fetcher.advance_changes()


def begin(r: Rig, promote: Mapping[ExpertKey, int], slow: Sequence[ExpertKey]) -> Callable[[], None]:
    """Starts promotions, and waits until the reads of the slow ones have begun; the result lets these end."""
    begun, gates = zip(*map(r.reader.delay, slow), strict=True)
    change(r, promote)
    assert all(event.wait(WAIT) for event in begun)
    return lambda: [gate.set() for gate in gates] and None


def fetch(r: Rig, levels: Mapping[ExpertKey, int]) -> None:
    """Does what Rig.fetch does while moves have leases and reservations."""
    with r.fetcher.request(levels) as request:
        came = [lease for leases in request for lease in leases if _right(r, lease, levels)]
    assert sorted(lease.key for lease in came) == sorted(levels)
    check_integrity(r.vram)


def _right(r: Rig, lease: Lease, levels: Mapping[ExpertKey, int]) -> bool:
    return lease.level >= levels[lease.key] and contents(lease.blocks) == expected(
        r.form, lease.key, lease.level
    )


def end_moves(r: Rig, *keys: ExpertKey) -> None:
    """Waits for the reads of some moves, and publishes them."""
    r.landed(*keys)
    r.fetcher.advance_changes()
    r.whole()


def test_a_demoted_expert_frees_its_block_at_once(rig: type[Rig]) -> None:
    """A's only upper block is free for B in the same call, without a read; only the missing plane of B is read."""
    r = cold(rig, upper=1)
    put(r.vram, SLICED, A, 4)
    change(r, {B: 4}, {A: 2})
    assert r.vram.level_of(A) == 2
    end_moves(r, B)
    assert r.vram.resident() == dict.fromkeys((A, C, D, E, F), 2) | {B: 4}
    assert r.reader.bytes == UPPER
    counts = r.fetcher.take_counts()
    assert counts.transitions == {"promoted": 1, "demoted": 1, "deferred": 0, "moved_bytes": UPPER}
    assert (counts.ssd_bytes, counts.requests, counts.speculated) == (UPPER, 0, 0)


def test_a_promotion_is_published_between_steps_alone(rig: type[Rig]) -> None:
    """Complete or not, B has its old level until the next call; a request in between is a hit at that level."""
    r = cold(rig)
    begin(r, {B: 4}, [B])()
    r.landed(B)
    assert r.vram.level_of(B) == 2
    with r.fetcher.request({B: 2}) as request:
        assert [lease.level for lease in next(request)] == [2]
    r.fetcher.advance_changes(start=False)
    assert r.vram.level_of(B) == 4
    r.whole()


def test_free_blocks_alone_are_taken(rig: type[Rig]) -> None:
    """With every upper block in use B waits, counted once; it comes as soon as one is free."""
    r = cold(rig, upper=1)
    put(r.vram, SLICED, A, 4)
    change(r, {B: 4, C: 4})
    for _ in range(3):
        r.fetcher.advance_changes()
    assert (r.reader.reads, r.vram.level_of(A)) == ([], 4)
    assert r.fetcher.take_counts().deferred == 1
    r.vram.drop(A, 2)
    r.fetcher.advance_changes()
    end_moves(r, B)
    assert (r.vram.level_of(B), r.vram.level_of(C)) == (4, 2)
    assert r.fetcher.take_counts().deferred == 1


def test_two_promotions_are_under_way_at_once(rig: type[Rig]) -> None:
    """The next ones begin as these are published, the most urgent first."""
    r = cold(rig)
    go = begin(r, {D: 4, C: 4, B: 4, A: 4}, [D, C])
    r.fetcher.advance_changes()
    assert r.fetcher.transfers.moving.keys() == {D, C}
    go()
    r.landed(D)
    r.landed(C)
    r.fetcher.advance_changes()
    assert r.fetcher.transfers.moving.keys() == {B, A}
    end_moves(r, B, A)
    assert {*r.reader.reads[:2]} == {D, C}


def test_the_rate_bounds_bytes_a_second(rig: type[Rig]) -> None:
    """Promotions of 4,096 bytes at 4,096 per second: one at once, then one each second, two after a rest."""
    r = cold(rig)
    moved = []
    r.fetcher.change_levels({}, dict.fromkeys((A, B, C, D, E, F), 4), rate=4096)
    for now in (0.0, 0.5, 1.0, 1.9, 2.0, 9.0, 9.9, 10.9):
        r.clock.now = now
        r.fetcher.advance_changes()
        r.landed(*r.fetcher.transfers.moving)
        r.fetcher.advance_changes(start=False)
        moved.append(sum(level == 4 for level in r.vram.resident().values()))
    assert moved == [1, 1, 2, 2, 3, 5, 5, 6]
    r.whole()


def test_bytes_without_a_rate_are_no_debt(rig: type[Rig]) -> None:
    """After unlimited moves the first one under a rate begins at once."""
    r = cold(rig)
    change(r, {A: 4, B: 4})
    r.fetcher.advance_changes(settle=True)
    change(r, {C: 4}, rate=1.0)
    end_moves(r, C)
    assert r.vram.level_of(C) == 4


def test_a_prompt_starts_nothing(rig: type[Rig]) -> None:
    """Before a prompt nothing is demoted and no read begins; complete reads are published."""
    r = cold(rig)
    put(r.vram, SLICED, A, 4)
    change(r, {B: 4})
    r.landed(B)
    r.fetcher.change_levels({A: 2}, {C: 4}, rate=None)
    r.fetcher.advance_changes(start=False)
    assert (r.vram.level_of(A), r.vram.level_of(B), r.vram.level_of(C)) == (4, 4, 2)
    assert not r.fetcher.transfers.moving
    r.fetcher.advance_changes()
    end_moves(r, C)
    assert (r.vram.level_of(A), r.vram.level_of(C)) == (2, 4)


@pytest.mark.parametrize("base", [6, 4])
def test_a_slow_read_delays_no_request(rig: type[Rig], base: int) -> None:
    """While A and B are read for ever: hits at once, misses from a disk with one reader, and misses that evict."""
    r = cold(rig, base, resident="ABCD", workers=1)
    go = begin(r, {A: 4, B: 4}, [A, B])
    fetch(r, {A: 2, B: 2, C: 2})
    fetch(r, {E: 2, C: 2, F: 2, A: 2})
    # In 4 blocks, of which the moves pin 2, three experts come one after another.
    fetch(r, {C: 2, D: 2, E: 2})
    assert r.fetcher.transfers.moving.keys() == {A, B}
    go()
    end_moves(r, A, B)
    assert (r.vram.level_of(A), r.vram.level_of(B)) == (4, 4)


def test_a_failed_read_leaves_its_expert_as_it_was(rig: type[Rig]) -> None:
    """Nothing is raised, its block is free again, and the next change tries it again."""
    r = cold(rig, upper=1)
    r.reader.errors[A] = broken(A)
    change(r, {A: 4})
    end_moves(r, A)
    assert r.vram.resident()[A] == 2
    assert r.vram.blocks.room(("d4",)) == 1
    assert r.fetcher.take_counts().transitions == dict.fromkeys(
        ("promoted", "demoted", "deferred", "moved_bytes"), 0
    )
    r.fetcher.advance_changes()
    assert r.reader.reads == [A]
    r.reader.errors.clear()
    change(r, {A: 4})
    end_moves(r, A)
    assert r.vram.level_of(A) == 4


@pytest.mark.parametrize("level", [2, 4])
def test_a_request_takes_a_move_over(rig: type[Rig], level: int) -> None:
    """An absent expert on its way to 2 is read once for a request at 2, and its upper plane alone for one at 4."""
    r = cold(rig, resident="")
    go = begin(r, {A: 2}, [A])
    with r.fetcher.request({A: level, B: 2}) as request:
        assert [lease.key for lease in next(request)] == [B]
        go()
        [lease] = next(request)
        assert contents(lease.blocks) == expected(SLICED, A, level)
    end_moves(r)
    assert r.reader.bytes == disk_bytes(0, 2) + disk_bytes(0, level)
    counts = r.fetcher.take_counts()
    assert (counts.speculated, counts.speculated_used, counts.speculated_cancelled) == (1, 1, 0)
    assert (counts.promoted, counts.moved_bytes, counts.wasted_bytes) == (0, 0, 0)
    assert counts.lookahead == {0: LookaheadCounts(hidden_bytes=disk_bytes(0, 2))}


@pytest.mark.parametrize("lasting", [False, True])
def test_a_failed_move_is_read_again_on_demand(
    rig: type[Rig], monkeypatch: pytest.MonkeyPatch, lasting: bool
) -> None:
    """The error of a move is never raised; the error of the request's own read is."""
    r = cold(rig, resident="")
    r.reader.errors[A] = broken(A)
    go = begin(r, {A: 2}, [A])
    if not lasting:
        after(monkeypatch, r.vram, "abandon", r.reader.errors.clear)
    with r.fetcher.request({A: 2}) as request:
        go()
        if lasting:
            with pytest.raises(ChecksumMismatch, match="expert 0"):
                next(request)
        else:
            assert [lease.key for lease in next(request)] == [A]
    end_moves(r)
    assert r.reader.reads == [A, A]
    counts = r.fetcher.take_counts()
    assert (counts.speculated, counts.speculated_used) == (1, 0)


def test_a_request_that_ends_early_ends_what_it_took_over(rig: type[Rig]) -> None:
    """A move that has begun is waited for, and its expert becomes resident."""
    r = cold(rig, resident="B")
    go = begin(r, {A: 2}, [A])
    with r.fetcher.request({A: 2, B: 2}) as request:
        assert [lease.key for lease in next(request)] == [B]
        go()
    r.whole()
    assert r.vram.resident() == {A: 2, B: 2}
    assert not r.fetcher.transfers.under_way
    counts = r.fetcher.take_counts()
    assert (counts.speculated, counts.speculated_used) == (1, 1)


@pytest.fixture
def unbegun(monkeypatch: pytest.MonkeyPatch, rig: type[Rig]) -> Iterator[Rig]:
    """A rig of two base blocks whose moves never begin: A, resident, to 4, and C, absent, to 2."""
    r = cold(rig, 2, 2, resident="A")
    r.fetcher.change_levels({}, {A: 4}, rate=None)
    r.fetcher.advance_changes(settle=True)
    r.vram.drop(A, 2)
    with monkeypatch.context() as patch:
        patch.setattr(r.fetcher.transfers._movers, "_tickets", SimpleQueue())
        change(r, {A: 4, C: 2})
        assert r.fetcher.transfers.moving.keys() == {A, C}
        r.fetcher.take_counts()
        yield r


def test_a_demand_takes_the_blocks_of_a_move_that_has_not_begun(unbegun: Rig) -> None:
    """B and D come into two blocks that were a move's source and another one's target."""
    assert sorted(unbegun.fetch({B: 2, D: 2})) == [B, D]
    assert unbegun.fetcher.take_counts().speculated_cancelled == 0
    unbegun.fetcher.advance_changes(start=False)
    assert unbegun.fetcher.changes.idle


def test_a_move_that_has_not_begun_is_replaced(unbegun: Rig) -> None:
    """Another change, or the end of all, cancels it without a read, and frees its block."""
    reads = len(unbegun.reader.reads)
    unbegun.fetcher.change_levels({}, {}, rate=None)
    assert not unbegun.fetcher.transfers.moving
    unbegun.whole()
    change(unbegun, {C: 2})
    unbegun.fetcher.release_pins()
    unbegun.whole()
    assert len(unbegun.reader.reads) == reads
    assert unbegun.fetcher.take_counts().speculated_cancelled == 0


def test_a_change_leaves_a_move_that_a_request_has_taken_over(unbegun: Rig) -> None:
    """C is requested while its move waits: other changes end A's move, and the request alone ends C's."""
    under_way = unbegun.fetcher.transfers.under_way
    with unbegun.fetcher.request({C: 2}):
        taken_over = under_way[C]
        unbegun.fetcher.change_levels({}, {}, rate=None)
        kept = under_way.get(C) is taken_over
        taken_over.done = not kept  # the end of the request would wait for ever
    assert kept
    counts = unbegun.fetcher.take_counts()
    assert (counts.speculated, counts.speculated_cancelled) == (1, 1)
    unbegun.whole()


def test_a_request_cancels_a_move_below_its_level(unbegun: Rig) -> None:
    """C was to come to 2 and is wanted at 4: one read brings all of it, and the move counts as cancelled."""
    fetch(unbegun, {C: 4})
    assert unbegun.reader.reads[-1:] == [C]
    counts = unbegun.fetcher.take_counts()
    assert counts.ssd_bytes == disk_bytes(0, 4)
    assert (counts.speculated, counts.speculated_used, counts.speculated_cancelled) == (1, 0, 1)


def test_a_demand_without_any_other_block_waits_for_a_move(
    rig: type[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A's move has pinned the tier's only base block: B comes once it has ended."""
    r = cold(rig, 1, 1, resident="A")
    go, waits = begin(r, {A: 4}, [A]), []
    await_done = r.fetcher.transfers.await_done

    def opening(among, seconds=None):
        waits.append([transfer.key for transfer in among])
        go()
        await_done(among, seconds)

    monkeypatch.setattr(r.fetcher.transfers, "await_done", opening)
    assert r.fetch({B: 2}) == [B]
    assert waits[0] == [A]
    assert r.vram.resident() == {B: 2}
    assert r.fetcher.take_counts().promoted == 1
    r.fetcher.advance_changes()
    assert r.fetcher.changes.idle


@pytest.mark.parametrize("end", ["release_pins", "close", "fill"])
def test_what_ends_all_pins_ends_moves(rig: type[Rig], monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """A move that has begun is waited for and published; moves that wait are dropped."""
    r = cold(rig, resident="ABC")
    go = begin(r, {A: 4, B: 4, C: 4}, [A, B])
    ended = r.fetcher.changes.end
    monkeypatch.setattr(r.fetcher.changes, "end", lambda counts: (go(), ended(counts)))
    calls: dict[str, Callable[[], None]] = {
        "fill": lambda: r.fetcher.fill([D], [2], lambda: True),
    }
    calls.get(end, getattr(r.fetcher, end))()
    assert r.fetcher.changes.idle
    r.whole()
    assert r.vram.resident() == {A: 4, B: 4, C: 2} | ({D: 2} if end in calls else {})


def test_moves_go_on_when_a_token_promotes(rig: type[Rig]) -> None:
    """D comes while A and B are read, and what waits is not dropped."""
    r = cold(rig, resident="ABC")
    go = begin(r, {A: 4, B: 4, C: 4}, [A, B])
    r.fetcher.promote({D: 2})
    assert r.vram.resident() == {A: 2, B: 2, C: 2, D: 2}
    assert r.fetcher.transfers.moving.keys() == {A, B}
    go()
    r.landed(A, B)
    r.fetcher.advance_changes()
    end_moves(r, C)
    assert r.vram.resident() == {A: 4, B: 4, C: 4, D: 2}


def test_an_unwanted_move_is_taken_back(rig: type[Rig]) -> None:
    """A and B are on their way when another look wants B and C: no more than two are hot in the end."""
    r = cold(rig, upper=3)
    go = begin(r, {A: 4, B: 4}, [A, B])
    change(r, {B: 4, C: 4})
    go()
    r.fetcher.advance_changes(settle=True)
    r.whole()
    assert {key for key, level in r.vram.resident().items() if level == 4} == {B, C}
    assert r.fetcher.take_counts().transitions == {
        "promoted": 3, "demoted": 1, "deferred": 0, "moved_bytes": 3 * UPPER
    }  # fmt: skip


@pytest.mark.parametrize("rate", [None, 1.0])
def test_settling_ends_with_all_that_fits(rig: type[Rig], rate: float | None) -> None:
    """At any rate: three come into three blocks, one fails, and what finds no block is dropped."""
    r = cold(rig, upper=3)
    r.reader.errors[B] = broken(B)
    r.fetcher.change_levels({}, dict.fromkeys((A, B, C, D, E), 4), rate=rate)
    r.fetcher.advance_changes(settle=True)
    r.whole()
    assert r.vram.resident() == {A: 4, B: 2, C: 4, D: 4, E: 2, F: 2}
    assert r.fetcher.changes.idle


@pytest.mark.parametrize("settle", [False, True])
def test_ctrl_c_leaves_the_tiers_whole(rig: type[Rig], monkeypatch: pytest.MonkeyPatch, settle: bool) -> None:
    """SIGINT between a reservation and the end of its call is raised after the call; the move goes on."""
    r = cold(rig)
    r.fetcher.change_levels({}, {A: 4}, rate=None)
    with monkeypatch.context() as patch:
        after(patch, r.vram.eviction, "victims", lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            r.fetcher.advance_changes(settle=settle)
    assert r.fetcher.transfers.moving.keys() == {A}
    end_moves(r, A)
    assert r.vram.level_of(A) == 4


def test_a_wait_to_settle_can_be_interrupted(rig: type[Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGINT while a read hangs is raised within the wait; the read may end later."""
    r = cold(rig)
    go = begin(r, {A: 4}, [A])
    await_done = r.fetcher.transfers.await_done

    def interrupted(among, seconds=None):
        signal.raise_signal(signal.SIGINT)
        await_done(among, seconds)

    monkeypatch.setattr(r.fetcher.transfers, "await_done", interrupted)
    with pytest.raises(KeyboardInterrupt):
        r.fetcher.advance_changes(settle=True)
    monkeypatch.undo()
    go()
    end_moves(r, A)
    assert r.vram.level_of(A) == 4


@pytest.mark.parametrize("form", [MERGED, SLICED], ids=["merged", "sliced"])
def test_a_move_comes_from_dram(rig: type[Rig], form: ToyForm) -> None:
    """With two tiers in RAM what DRAM has is not read; a part of it is completed from disk; it is in one tier after."""
    r = rig(form, 6, 6)
    put(r.dram, form, A, 2)
    put(r.dram, form, B, 2)
    change(r, {A: 2, B: 4})
    end_moves(r, A, B)
    assert (r.vram.resident(), r.dram.resident()) == ({A: 2, B: 4}, {})
    assert r.reader.bytes == UPPER
    counts = r.fetcher.take_counts()
    assert (counts.ssd_bytes, counts.moved_bytes) == (UPPER, UPPER + counts.dram_bytes)
    assert counts.dram_bytes > 0
    assert counts.dram_hits == 0


def test_moves_and_spills_of_the_same_experts(rig: type[Rig]) -> None:
    """A full fast tier: a request evicts to DRAM while a move has a source there, and nothing is lost."""
    r = rig(SLICED, {"base": 2, "d4": 2}, 2)
    put(r.vram, SLICED, A, 2)
    put(r.dram, SLICED, B, 2)
    go = begin(r, {B: 4}, [B])
    fetch(r, {C: 2})
    assert r.dram.resident() == {A: 2, B: 2}
    go()
    end_moves(r, B)
    assert (r.vram.resident(), r.dram.resident()) == ({B: 4, C: 2}, {A: 2})


@pytest.mark.parametrize("dram", [None, 6])
def test_moves_into_a_device(dram: int | None) -> None:
    """Kernels read the bytes of each expert's level while others move, from DRAM or through staging buffers."""
    device = DoubleDevice(1, threaded=True)
    r = DeviceRig(device, 6, dram)
    r.fetch(dict.fromkeys((A, B, C, D), 2))
    if dram:
        put(r.dram, SLICED, E, 4)
    r.fetcher.change_levels({}, {A: 4, B: 8, E: 4}, rate=None)
    for _ in range(20):
        r.fetcher.advance_changes()
        r.fetch({A: 2, B: 2, C: 2, D: 2})
    r.fetcher.advance_changes(settle=True)
    assert r.vram.resident() == {A: 4, B: 8, C: 2, D: 2, E: 4}
    r.fetcher.change_levels({A: 2, B: 2}, {C: 8, D: 8}, rate=None)
    r.fetcher.advance_changes(settle=True)
    r.fetch({A: 2, B: 2, C: 8, D: 8, E: 4})
    assert r.reader.reads.count(E) == (0 if dram else 1)
    r.close()


def loaded(device: DoubleDevice, hot: Mapping[ExpertKey, int] = {}, **options) -> DeviceRig:
    """A rig on a device whose fast tier has A to D at 2, and whose DRAM has them at 4; and experts at higher levels."""
    r = DeviceRig(device, 6, 12, **options)
    r.fetch(dict.fromkeys((A, B, C, D), 2) | hot)
    for key in (A, B, C, D):
        r.dram.drop(key)
        put(r.dram, SLICED, key, 4)
    return r


def test_copies_are_published_once_a_device_has_made_them() -> None:
    """Until then a request is a hit at the old level, whose kernels wait for nothing; all copies begin at once."""
    device = DoubleDevice(haste=0)
    r = loaded(device)
    change(r, dict.fromkeys((A, B, C), 4))
    assert r.fetcher.transfers.moving.keys() == {A, B, C}
    r.fetcher.advance_changes()
    with r.fetcher.request({A: 2}) as request:
        [lease] = next(request)
        assert (lease.level, lease.arriving) == (2, ())
    for transfer in list(r.fetcher.transfers.moving.values()):
        transfer.load._copied.wait()
    r.fetcher.advance_changes()
    assert r.vram.resident() == {A: 4, B: 4, C: 4, D: 2}
    assert not r.vram.arriving([A, B, C])
    assert r.fetcher.take_counts().promoted == 3
    r.close()


def test_a_move_waits_for_the_kernels_that_read_its_block() -> None:
    """The block that A gives up is overwritten after the kernel that was launched last, without any request since."""
    device = DoubleDevice(haste=0)
    r = loaded(device, {A: 8}, arenas=on_device)  # no poison, which waits for the kernel as well
    [lease] = [r.vram.acquire(A, 8)]
    device.launch(lease.blocks)
    r.vram.release(lease)
    change(r, {B: 4}, {A: 2})
    for transfer in r.fetcher.transfers.moving.values():
        transfer.load._copied.wait()
    assert device.broken == []
    r.fetcher.advance_changes()
    assert (r.vram.level_of(A), r.vram.level_of(B)) == (2, 4)
    r.close()


def test_a_copy_that_a_device_refuses_leaves_its_expert_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its block is free again, and the device's error is not raised."""
    device = DoubleDevice()
    r = loaded(device)

    def refuse(pairs, after):
        raise RuntimeError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(device, "copy", refuse)
        change(r, {A: 4})
        r.fetcher.advance_changes()
    assert r.fetcher.changes.idle
    assert r.vram.level_of(A) == 2
    r.close()


def test_a_move_evicts_nothing_from_a_devices_second_tier() -> None:
    """A kernel that was launched before may read an expert there: A comes through a staging buffer."""
    device = DoubleDevice(1)
    r = DeviceRig(device, 6, 2)
    r.fetch({A: 2, B: 2})
    r.fetcher.release_pins()
    for key in (A, B):
        r.dram.drop(key)
    r.fetch({C: 8, D: 8})
    before = r.dram.resident()
    assert before == {C: 8, D: 8}
    r.fetcher.change_levels({}, {A: 4, E: 2}, rate=None)
    r.fetcher.advance_changes(settle=True)
    assert (r.vram.level_of(A), r.vram.level_of(E)) == (4, 2)
    assert r.dram.resident() == before
    r.close()
