"""The peak of a model's memory counts growth while the model loads and computes, and no memory of the program."""

from __future__ import annotations

import gc
import threading

import pytest
from servers import a_model

from edgemoe.engine import peak
from edgemoe.engine.peak import PeakMemory
from edgemoe.machine.process import ResidentMemory, return_free_memory


class System:
    """A system's counts, bytes; a test changes them."""

    def __init__(self) -> None:
        self.resident, self.highest, self.files, self.resets = 1000, 1000, 300, True
        self.freed = 0
        """Bytes that the process has freed and the system has not got back."""

    def grow(self, nbytes: int, *, files: int = 0) -> None:
        """The process grows, or shrinks where `nbytes` is negative; freed bytes are used first."""
        reused = min(max(nbytes, 0), self.freed)
        self.freed -= reused
        self.resident += nbytes - reused + files
        self.files += files
        self.highest = max(self.highest, self.resident)

    def for_a_moment(self, nbytes: int) -> None:
        """The process grows and shrinks again."""
        self.grow(nbytes)
        self.grow(-nbytes)

    def reset(self) -> bool:
        if self.resets:
            self.highest = self.resident
        return self.resets

    def trim(self) -> None:
        self.resident, self.freed = self.resident - self.freed, 0


@pytest.fixture
def system(monkeypatch) -> System:
    one = System()
    monkeypatch.setattr(peak, "_GROWTH", 0)
    monkeypatch.setattr(peak, "EXPERT_BYTES", 10)
    monkeypatch.setattr(peak, "TEXT_BYTES", 10)
    monkeypatch.setattr(peak, "reset_peak", one.reset)
    monkeypatch.setattr(peak, "return_free_memory", one.trim)
    now = classmethod(lambda _: ResidentMemory(one.resident, one.highest, one.files))
    monkeypatch.setattr(peak.ResidentMemory, "now", now)
    return one


def test_pages_of_libraries_are_no_part_of_it(system):
    """Pages that become resident at any time are left out; the model's own memory is not."""
    memory = PeakMemory(None)
    assert memory.bytes == 0
    system.grow(300, files=200)
    system.grow(0, files=400)
    assert memory.bytes == 300
    system.for_a_moment(500)
    assert memory.bytes == 800


def test_pages_that_come_or_go_later_change_no_peak(system):
    """Libraries' pages that are touched after the peak change nothing, nor do pages that the system drops."""
    memory = PeakMemory(None)
    system.for_a_moment(700)
    assert memory.bytes == 700
    system.grow(0, files=300)
    assert memory.bytes == 700
    system.grow(0, files=-500)
    assert memory.bytes == 700


@pytest.mark.parametrize("resets", [True, False], ids=["resets", "cannot reset"])
def test_memory_in_between_is_the_programs(system, resets):
    """A line that is typed is left out, for good; a step's memory counts, for a moment too where the system tells."""
    system.resets = resets
    memory = PeakMemory(None)
    system.grow(600)
    memory.pause(0, 0)
    system.grow(50)
    system.for_a_moment(4000)
    assert memory.bytes == 600
    with memory.counting():
        system.grow(10)
        system.for_a_moment(90)
    assert memory.bytes == (700 if resets else 610)
    system.grow(5000)
    assert memory.bytes == (700 if resets else 610)
    assert memory.process_bytes == 6660


def test_the_program_adds_and_hides_nothing(system):
    """Lines that come and go add nothing, and a step that takes the memory that a line has freed counts it."""
    memory = PeakMemory(None)
    system.grow(600)
    memory.pause(0, 0)
    for _ in range(5):
        system.grow(250)
        with memory.counting():
            pass
        assert memory.bytes == 600
        system.freed = 250
    with memory.counting():
        system.grow(200)
    assert memory.bytes == 800


def test_blocks_that_overlap_count_together(system):
    """Threads that compute in turn: all growth from the first block's beginning to the last one's end counts once."""
    memory = PeakMemory(None)
    memory.pause(1, 2)
    assert memory.bytes == 30
    with memory.counting():
        system.grow(100)
        with memory.counting():
            system.grow(100)
        system.grow(100)
        assert memory.bytes == 330
    system.grow(100)
    assert memory.bytes == 330


def test_what_is_reserved_bounds_a_servers_count(system):
    """Its requests are read while the model computes: they count, up to what is reserved, and no longer."""
    memory = PeakMemory(None)
    memory.bound(lambda: 500)
    system.grow(300)
    assert memory.bytes == 300
    system.grow(9000)
    assert memory.bytes == 500


@pytest.mark.e2e
def test_a_program_with_a_model(tiny_store):
    """64 MB that a program takes between answers are no part of the peak; while the model computes they are."""
    kept = []

    def take(_piece: str = "") -> None:
        kept.append(b"x" * (64 << 20))

    gc.collect()
    return_free_memory()  # the model would take what other tests have left in the heap, and the process not grow
    with a_model(tiny_store, keep=True) as model:
        plan = model.engine.plan
        model.generate("a b c", max_new_tokens=4)
        first, known = model.engine.peak.bytes, plan.dense_bytes + model.engine.memory.expert_bytes
        assert known <= first
        take()
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        model.generate("a b c d", max_new_tokens=4)
        assert first <= model.engine.peak.bytes < first + (4 << 20)
        assert model.engine.peak.process_bytes > first + (128 << 20)
        model.submit("b c", take, max_new_tokens=1).result()
        assert model.engine.peak.bytes > first + (60 << 20)
