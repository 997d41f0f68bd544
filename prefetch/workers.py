"""Threads that do transfers, one after another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

Job = Callable[[], None]


class Workers:
    """A fixed number of threads that run jobs in the order of submission. Thread-safe.

    Bare threads and a queue in C: a future for each of some thousand jobs a second would cost more than
    what most of them do outside of the kernel.

    Args:
        count: threads, 1 or more. They are daemons: a process that forgets close still ends.

    Raises:
        ValueError: count is below 1.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"{count} workers: want at least 1")
        self.closed = False
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"transfer-{i}", daemon=True) for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Runs `job` on one of the threads. It must not raise: nobody would see it.

        Raises:
            ValueError: closed.
        """
        if self.closed:
            raise ValueError("the workers are closed")
        self._jobs.put(job)

    def close(self) -> None:
        """Waits for what was submitted and ends the threads. Idempotent; called by one thread."""
        if not self.closed:
            self.closed = True
            for _ in self._threads:
                self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
