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
        self.resident_before, self._files = resident_bytes(), file_backed_bytes()

    def exclude_libraries(self) -> None:
        """Excludes pages of libraries' files that have become resident since the making: they are the program's."""
        self.resident_before += max(file_backed_bytes() - self._files, 0)

    @property
    def bytes(self) -> int:
        """Peak of the model's memory.

        In RAM that is the operating system's count of the process's resident memory, less its memory before loading and
        the pages of libraries that loading and a first step touch; on a device the driver's count of the process.
        """
        if self._device:
            return self._device.peak()
        return max(peak_resident_bytes() - self.resident_before, 0)

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Excludes memory that is allocated inside the block, such as tables of a library, from `bytes`.

        No step may run within the block: its memory would be excluded too.
        """
        before = peak_resident_bytes()
        yield
        self.resident_before += max(peak_resident_bytes() - before, 0)
