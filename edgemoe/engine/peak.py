"""The most memory that an open model has taken of what --vram-limit limits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from edgemoe.machine.device import Device
from edgemoe.machine.process import file_backed_bytes, peak_resident_bytes, reset_peak, resident_bytes


class PeakMemory:
    """Counts from its making on: the process's resident memory, or on a device the memory of the process there.

    Args:
        device: the device that the model is computed on; None: the CPU.

    Attributes:
        resident_before: bytes of resident memory that belong to the program and not to the model.
    """

    def __init__(self, device: Device | None) -> None:
        reset_peak()
        self._device = device
        self.resident_before, self._files, self._most = resident_bytes(), file_backed_bytes(), 0

    @property
    def bytes(self) -> int:
        """Peak of the model's memory.

        In RAM that is the operating system's count of the process's resident memory, less its memory before loading and
        the pages of libraries' files that have become resident since: both are the program's. On a device it is the
        driver's count of the process.
        """
        if self._device:
            return self._device.peak()
        files = max(file_backed_bytes() - self._files, 0)
        # Pages that come after the peak would hide a part of it: an earlier call may have counted more.
        self._most = max(self._most, peak_resident_bytes() - self.resident_before - files)
        return self._most

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Excludes memory that is allocated inside the block, such as tables of a library, from `bytes`.

        No step may run within the block: its memory would be excluded too.
        """
        before = peak_resident_bytes()
        yield
        self.resident_before += max(peak_resident_bytes() - before, 0)
