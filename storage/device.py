"""Contract of a device with memory of its own: one allocation, copies on their own time, and events between them.

Two lines of work run beside the host. *Compute* runs kernels in the order in which the host launches them; *copies*
bring bytes from host memory into the device's. Neither waits for the other but where an event says so:

    host     read ─ copy ─ publish ─ await_copies ─ launch ─ computed ─ release ─ copy into the freed block
    copies          └───────────────► event ┐                   │                  ▲
    compute                                 └────────► kernel ──┴───────► event ───┘

Whoever reads bytes that a copy brings waits for that copy's event, whoever overwrites bytes that a kernel reads gives
the kernel's event to the copy, and nobody waits for all of a device. The host itself waits for kernels in one place:
`to_host`, where what it has to know comes back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Event(ABC):
    """A point in the work of a device. Thread-safe; once done, always done."""

    @abstractmethod
    def done(self) -> bool:
        """Whether all work up to it has ended. Does not wait."""

    @abstractmethod
    def wait(self) -> None:
        """Holds the calling thread until it is done."""


class Recorder(ABC):
    """Notes kernels in pieces instead of running them, so that each piece can be launched as one. Used by one thread.

    A piece reads and writes the memory that it was noted with, and what it has made stays where it is: launched
    again in the same order, pieces make the same of what that memory then holds.
    """

    @abstractmethod
    def noting(self) -> AbstractContextManager[None]:
        """Within it pieces are noted; what is launched between two of them runs. An error ends the open piece."""

    @abstractmethod
    def begin(self) -> None:
        """Begins a piece: kernels launched from now on are noted and do not run. The host may wait for nothing."""

    @abstractmethod
    def end(self) -> Callable[[], None]:
        """Ends the piece. Each call of what is returned launches it; it has not run yet."""


class Device(ABC):
    """See the module. `copy`, and events, may be used by any thread; the rest by the one that launches kernels.

    Attributes:
        place: as torch calls it.
        counts_own: whether the driver tells this process's memory from others'. Where it does not, `driver_bytes` and
            `peak` are upper estimates.
    """

    place: torch.device
    counts_own: bool = True

    @property
    def name(self) -> str:
        """As leases and messages call it: cuda:0."""
        return str(self.place)

    @abstractmethod
    def allocate(self, size: int) -> torch.Tensor:
        """Memory of the device, uint8 [size], undefined; given back with its last reference.

        Raises:
            torch.OutOfMemoryError: there is not so much.
        """

    @abstractmethod
    def pin(self, memory: memoryview) -> bool:
        """Registers host memory, so that copies from it need not wait for the host. False: the system refuses.

        Args:
            memory: whole pages, which stay mapped until `unpin`.
        """

    @abstractmethod
    def unpin(self, memory: memoryview) -> None:
        """Takes back one `pin` that was granted; no copy from it is under way any more."""

    @abstractmethod
    def copy(self, pairs: Sequence[tuple[memoryview, torch.Tensor]], after: Event | None) -> Event:
        """Enqueues one batch of copies from the host, and an event behind them.

        Copies into the same bytes happen in the order of the calls. No other order is promised.

        Args:
            pairs: (host bytes, device's bytes), equally long; host bytes must not change until the event is done.
            after: nothing is written before this is done; None: at once.

        Raises:
            RuntimeError: the device refused; nothing of the batch is under way any more.
        """

    @abstractmethod
    def await_copies(self, events: Iterable[Event]) -> None:
        """Has kernels launched from now on wait for copies. The host does not."""

    @abstractmethod
    def computed(self) -> Event:
        """An event behind every kernel launched so far."""

    @abstractmethod
    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies in RAM of what kernels launched so far make of some tensors: one wait, however many they are."""

    @abstractmethod
    def recorder(self) -> Recorder:
        """One for the kernels of a step."""

    @abstractmethod
    def free_unused(self) -> None:
        """Gives memory that was allocated for activations, and is not in use now, back to the system."""

    @abstractmethod
    def cap(self, size: int) -> None:
        """Lets no more than `size` bytes be allocated from now on, and counts `peak` anew.

        What was allocated and is not in use is given back first. An allocation beyond is torch.OutOfMemoryError.
        """

    @abstractmethod
    def driver_bytes(self) -> int:
        """Bytes that the process takes of the device beside all that it allocates, now and while it runs."""

    @abstractmethod
    def room(self) -> int:
        """Bytes of the device that this process may take in all, as far as others leave it."""

    @abstractmethod
    def peak(self) -> int:
        """The most bytes of the device that the process has had: by the driver's count, or see `counts_own`."""
