"""Contract of a device with its own memory: allocation, copies that run while the host works, and their events.

Two queues of work run while the host works. *Compute* runs kernels in the order of their launches. *Copies*
bring bytes from host memory into device memory. A queue waits for the other only where an event says so:

    host     read ─ copy ─ publish ─ await_copies ─ launch ─ computed ─ release ─ copy into the freed block
    copies          └───────────────► event ┐                   │                  ▲
    compute                                 └────────► kernel ──┴───────► event ───┘

A kernel that reads copied bytes waits for the event of that copy. A copy that overwrites bytes waits for the event of
the last kernel that reads them. No operation waits for the whole device. The host waits for kernels in three places
only: `to_host` and `fetch`, which return results to it, and `await_computed`, after which it reads what kernels copied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Event(ABC):
    """A point in the work of a device. Thread-safe; an event that is done stays done."""

    @abstractmethod
    def done(self) -> bool:
        """Whether all work up to the event has ended. Does not wait."""

    @abstractmethod
    def wait(self) -> None:
        """Blocks the calling thread until the event is done."""


class Device(ABC):
    """A device with its own memory and two queues of work, compute and copies.

    Threads: `copy` and events may be used by any thread, all other methods by the thread that launches kernels.

    Attributes:
        place: torch's name of the device.
        counts_own: whether the driver reports the memory of this process alone. Where it does not, `driver_bytes` and
            `peak` are upper estimates.
        reads_host_memory: whether kernels read page-locked host memory at its own address.
    """

    place: torch.device
    counts_own: bool = True
    reads_host_memory: bool = False

    @property
    def name(self) -> str:
        """Name of the device in leases and messages, such as cuda:0."""
        return str(self.place)

    @abstractmethod
    def allocate(self, size: int) -> torch.Tensor:
        """Allocates device memory, uint8 [size], not initialised; freed with its last reference.

        Raises:
            torch.OutOfMemoryError: fewer than `size` bytes are free.
        """

    @abstractmethod
    def pin(self, memory: memoryview) -> bool:
        """Page-locks host memory, so that copies from it run while the host works.

        Args:
            memory: whole pages, which stay mapped until `unpin`.

        Returns:
            False if the system refuses; the memory is then pageable, as it was.
        """

    @abstractmethod
    def unpin(self, memory: memoryview) -> None:
        """Undoes one successful `pin`. No copy from the memory may be running."""

    @abstractmethod
    def copy(self, pairs: Sequence[tuple[memoryview, torch.Tensor]], after: Event | None) -> Event:
        """Enqueues one batch of copies from the host, and an event after them.

        Copies into the same bytes happen in the order of the calls. No other order is promised.

        Args:
            pairs: (host bytes, device bytes) of equal length; the caller leaves both alone until the event is done.
            after: event that must be done before the first byte is written; None: no such event.

        Raises:
            RuntimeError: the device refused; no copy of the batch is running any more.
        """

    @abstractmethod
    def await_copies(self, events: Iterable[Event]) -> None:
        """Makes kernels that are launched later wait for copies. The host does not wait."""

    @abstractmethod
    def computed(self) -> Event:
        """An event recorded after every kernel that was launched so far."""

    @abstractmethod
    def await_computed(self) -> None:
        """Blocks the calling thread until every kernel that was launched so far has run."""

    @abstractmethod
    def host_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocates zeros in host memory. Copies among the kernels, from and to it, run while the host works."""

    def capture(self, launch: Callable[[], None], pool: object | None = None) -> Callable[[], None]:
        """Captures launches, to launch them again as one.

        Args:
            launch: launches kernels and copies, with the same arguments at every call; it is called twice, once so that
                their code is loaded. Their memory stays where it is as long as the result. What they allocate belongs
                to the result.
            pool: an object that stands for memory that captures allocate from; None: memory of its own.
        """
        return self.capture_pieces(lambda cut: launch(), pool)[0]

    @abstractmethod
    def capture_pieces(
        self, launch: Callable[[Callable[[], None]], None], pool: object | None = None
    ) -> list[Callable[[], None]]:
        """Captures launches in pieces, to launch each piece again as one.

        Args:
            launch: launches kernels and copies; it is called twice, as in `capture`. It takes a function, which ends a
                piece and begins the next one when it is called.
            pool: an object that stands for memory that pieces allocate from; None: memory of their own. Memory that a
                call of `launch` has freed is used again by the calls after it with this object. So the pieces of one
                call must be launched one after another, without another call's pieces between them.
        """

    @abstractmethod
    def without_waits(self) -> AbstractContextManager[None]:
        """A block in which an operation of torch raises RuntimeError where it makes the host wait for the device."""

    @abstractmethod
    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies tensors to RAM once the kernels launched so far have run: one wait for all tensors together."""

    @abstractmethod
    def fetch(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Event]:
        """Enqueues the copy of a tensor to new memory in RAM, among the kernels, and an event after it.

        The result is valid once the event is done. A thread that waits for it stays awake: a new token waits so.
        """

    @abstractmethod
    def free_unused(self) -> None:
        """Returns memory that was allocated for activations and is not in use to the system."""

    @abstractmethod
    def cap(self, size: int | None) -> None:
        """Limits later allocations to `size` bytes in all, or ends the limit, and restarts the count of `peak`.

        Unused memory is returned first. An allocation past the limit raises torch.OutOfMemoryError.
        """

    @abstractmethod
    def driver_bytes(self) -> int:
        """Bytes of the device that the process occupies besides its allocations, for as long as it runs."""

    @abstractmethod
    def available_bytes(self) -> int:
        """Bytes of the device that this process may occupy in all: its own and the free ones."""

    @abstractmethod
    def peak(self) -> int:
        """Most bytes of the device that the process has occupied; an upper estimate unless `counts_own`."""
