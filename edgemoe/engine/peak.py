"""The most memory that an open model has taken of what the limits limit: the one place that decides what counts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from edgemoe.machine.device import Device
from edgemoe.machine.process import ResidentMemory, reset_peak, return_free_memory
from edgemoe.memory.overhead import EXPERT_BYTES
from edgemoe.memory.workspace import TEXT_BYTES

_GROWTH = 1 << 20
"""Growth of the program since the model began to load from which freed memory goes back to the system."""


class PeakMemory:
    """Counts the most memory that a model takes. Thread-safe.

    On a device that is the driver's count of the process. In RAM it is measured by how much the process grows, without
    pages of libraries' files: from this object's making on, and after `pause` within `counting` alone. What
    it grows by in between belongs to the program: a line that is typed, a template, the variables of a script. All
    growth while the model computes counts as the model's, since nothing tells whose it is. A server reads requests at
    the same time, so its count is bounded by what is reserved (`bound`).

    Args:
        device: the device that the model is computed on; None: the CPU.
    """

    def __init__(self, device: Device | None) -> None:
        reset_peak()
        self._device, self._lock = device, threading.Lock()
        self._blocks = 1
        """Blocks of `counting` that are under way; before `pause` all the time is one."""
        self._model = self._most = self._process = 0
        """Bytes of the model when counting last began, its peak, and the peak of the whole process."""
        self._reserved: Callable[[], int] | None = None
        self._before = ResidentMemory.now()
        self._program = self._before.anonymous

    @property
    def bytes(self) -> int:
        """Peak of the model's memory."""
        if self._device:
            return self._device.peak()
        with self._lock:
            self._read()
            return min(self._most, self._reserved()) if self._reserved else self._most

    @property
    def process_bytes(self) -> int:
        """Peak of the whole process's resident memory since the model began to load."""
        with self._lock:
            self._read()
            return self._process

    def pause(self, experts: int, context: int) -> None:
        """Ends the count of all that the process takes: from now on `counting` alone counts.

        The model also takes some memory outside `counting`: experts are read, with the interpreter's data of each, and
        a prompt becomes tokens. The most of both counts from now on.

        Args:
            experts: number of experts of the model.
            context: most tokens of a sequence.
        """
        with self._lock:
            self._end()
            self._model += EXPERT_BYTES * experts + TEXT_BYTES * context
            self._most = max(self._most, self._model)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts the growth of the process in the block as the model's. Blocks of several threads may overlap."""
        if self._device:
            yield
            return
        with self._lock:
            self._begin()
        try:
            yield
        finally:
            with self._lock:
                self._end()

    def bound(self, reserved: Callable[[], int]) -> None:
        """Bounds the count in RAM from now on, as the process also grows for other work while the model computes.

        Args:
            reserved: returns the most bytes of the limits that were reserved at once: the model never takes more.
        """
        self._reserved = reserved

    def _begin(self) -> None:
        now = self._read()
        self._blocks += 1
        if self._blocks > 1:
            return
        if now.anonymous - self._model > self._program + _GROWTH:
            return_free_memory()  # else the model's memory could hide in memory that the program has freed
            now = ResidentMemory.now()
        self._before = replace(now, highest=now.resident) if reset_peak() else now

    def _end(self) -> None:
        self._read()
        self._blocks -= 1
        if not self._blocks:
            return_free_memory()  # what goes back at the next block's beginning is the program's alone then
            now = ResidentMemory.now()
            self._model += now.anonymous - self._before.anonymous
            self._before = now

    def _read(self) -> ResidentMemory:
        """Reads the process's memory, and raises the peaks."""
        now, before = ResidentMemory.now(), self._before
        self._process = max(self._process, now.highest)
        if self._blocks:
            # Where the system cannot reset its peak an earlier one says nothing about this block.
            most = now.highest if now.highest > before.highest else now.resident
            # Pages of files that come after the peak would hide a part of it: an earlier reading may have counted more.
            grown = most - max(now.files, before.files) - before.anonymous
            self._most = max(self._most, self._model + grown)
        return now
