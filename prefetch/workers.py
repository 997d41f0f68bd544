"""Threads that do transfers: what is demanded first, what is only a guess behind it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from queue import SimpleQueue
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)

MANY = 8
"""Waiting items that more threads are for: a prompt's layer has more, a token's no more than its experts."""


class Workers(Generic[Item]):
    """A fixed number of threads over a queue of two classes, each in the order of submission. Thread-safe.

    Bare threads and a queue in C: a future for each of some thousand items a second would cost more than
    what most of them do outside of the kernel.

    Args:
        count: threads, 1 or more. They are daemons: a process that forgets close still ends.
        run: what is done with an item, on one of the threads. It must not raise: nobody would see it.
        bulk: threads that there are while MANY or more items wait that are not `ahead`: a disk gives more to many at
            a time, but few items are then done one after another, where whoever waits for the first could begin.

    Raises:
        ValueError: count is below 1.
    """

    def __init__(self, count: int, run: Callable[[Item], None], *, bulk: int = 0) -> None:
        if count < 1:
            raise ValueError(f"{count} workers: want at least 1")
        self.count = count
        self.closed = False
        self._do = run
        self._lock = threading.Lock()
        self._demand: OrderedDict[Item, None] = OrderedDict()
        self._ahead: OrderedDict[Item, None] = OrderedDict()
        self._busy = 0
        # One for every item ever submitted. Who takes one goes on until there is nothing to do for it, so that an item
        # which it leaves to those at work is done by them; then tickets of items that are done wake it for nothing.
        self._tickets: SimpleQueue[bool] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"transfer-{i}", daemon=True)
            for i in range(max(count, bulk))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, item: Item, *, ahead: bool = False) -> None:
        """Queues an item that is not queued; `ahead`: behind all that is submitted without, whenever.

        Raises:
            ValueError: closed.
        """
        if self.closed:
            raise ValueError("the workers are closed")
        with self._lock:
            (self._ahead if ahead else self._demand)[item] = None
        self._tickets.put(True)

    def hasten(self, item: Item) -> None:
        """Puts an item that was submitted `ahead` among the others. Without effect once it has begun."""
        with self._lock:
            if item in self._ahead:
                del self._ahead[item]
                self._demand[item] = None

    def withdraw(self, item: Item) -> bool:
        """Whether the item had not begun; it never will then."""
        with self._lock:
            for queue in (self._demand, self._ahead):
                if item in queue:
                    del queue[item]
                    return True
        return False

    def close(self) -> None:
        """Waits for what was submitted and ends the threads. Idempotent; called by one thread."""
        if not self.closed:
            self.closed = True
            for _ in self._threads:
                self._tickets.put(False)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while self._tickets.get():
            item = self._take()
            while item is not None:
                self._do(item)
                item = self._take(done=1)

    def _take(self, *, done: int = 0) -> Item | None:
        with self._lock:
            self._busy -= done
            if self._busy >= self.count and len(self._demand) < MANY:
                return None
            for queue in (self._demand, self._ahead):
                if queue:
                    self._busy += 1
                    return queue.popitem(last=False)[0]
        return None
