"""Threads that run transfers: demanded ones first, then the ones read ahead."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from queue import SimpleQueue
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)

MANY = 8
"""Waiting items from which the scan's threads work too: a prompt's layer has more, a token no more than its experts."""

SCAN_WORKERS = 8
"""Threads that read from disk while a scan's experts wait (docs/decisions/0015)."""


class Workers(Generic[Item]):
    """Threads over a queue of two classes, each in the order of submission. Thread-safe.

    Bare threads and a queue in C: a future for each of some thousand items a second costs more than most items.

    Args:
        count: threads, 1 or more. They are daemons: a process without a call of close still ends.
        run: called with an item on one of the threads. It must not raise: no caller would see it.
        scan_count: threads while MANY or more demanded items wait: a disk gives more to many at a time, but the first
            of a few items then takes longer.
        name: name of the threads.

    Attributes:
        scanning: whether items ahead count as well as demanded ones for the scan's threads; may be set at any time.

    Raises:
        ValueError: count is below 1.
    """

    def __init__(
        self, count: int, run: Callable[[Item], None], *, scan_count: int = 0, name: str = "transfer"
    ) -> None:
        if count < 1:
            raise ValueError(f"expected at least 1 worker, got {count}")
        self.count = count
        self.closed, self.scanning = False, False
        self._call = run
        self._lock = threading.Lock()
        self._demand: OrderedDict[Item, None] = OrderedDict()
        self._ahead: OrderedDict[Item, None] = OrderedDict()
        self._busy = 0
        # One for every item ever submitted. A thread that takes one works until the queues have nothing for it, so the
        # tickets of items that other threads have taken wake a thread for nothing.
        self._tickets: SimpleQueue[bool] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(max(count, scan_count))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, item: Item, *, ahead: bool = False) -> None:
        """Queues an item; `ahead`: after every item submitted without it, now or later.

        Raises:
            ValueError: closed.
        """
        if self.closed:
            raise ValueError("the workers are closed")
        with self._lock:
            (self._ahead if ahead else self._demand)[item] = None
        self._tickets.put(True)

    def hasten(self, item: Item) -> None:
        """Makes an item submitted `ahead` a demanded one. Without effect once it has begun."""
        with self._lock:
            if item in self._ahead:
                del self._ahead[item]
                self._demand[item] = None

    def cancel(self, item: Item) -> bool:
        """Removes an item that has not begun. Returns whether it had not."""
        with self._lock:
            for queue in (self._demand, self._ahead):
                if item in queue:
                    del queue[item]
                    return True
        return False

    def close(self) -> None:
        """Waits for every submitted item and ends the threads. Idempotent; called by one thread."""
        if not self.closed:
            self.closed = True
            for _ in self._threads:
                self._tickets.put(False)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        """Waits for a ticket, then works until the queues have nothing for this thread."""
        busy = False
        while busy or self._tickets.get():
            with self._lock:
                self._busy -= busy
                waiting = len(self._demand) + (len(self._ahead) if self.scanning else 0)
                queue = self._demand or self._ahead
                busy = bool(queue) and (self._busy < self.count or waiting >= MANY)
                self._busy += busy
                item = queue.popitem(last=False)[0] if busy else None
            if item is not None:
                self._call(item)
