"""Requests that wait for their turn: clients in turn, and each client's own requests in the order of arrival."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Generic, Protocol, TypeVar


class OfClient(Protocol):
    """A request of a client, by its name."""

    client: str


Request = TypeVar("Request", bound=OfClient)


class Arrivals(Generic[Request]):
    """A queue for each client that has requests waiting. Thread-safe.

    A client whose first request leaves goes to the end of the line, and so does a new one: between two requests of a
    client comes at most one of each other client.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_client: dict[str, deque[Request]] = {}
        """Client -> its requests, at least one; the client whose turn it is first."""

    def add(self, request: Request) -> None:
        """Adds a request after its client's others."""
        with self._lock:
            self._of_client.setdefault(request.client, deque()).append(request)

    def first(self) -> Request | None:
        """Returns the request whose turn it is; None: no request waits."""
        return next(iter(self), None)

    def take(self) -> Request:
        """Removes the request whose turn it is; the next client's turn begins. There must be one."""
        with self._lock:
            client = next(iter(self._of_client))
            queue = self._of_client.pop(client)
            taken = queue.popleft()
            if queue:
                self._of_client[client] = queue
            return taken

    def remove(self, request: Request) -> None:
        """Removes a request, where it waits; turns stay as they are."""
        with self._lock:
            queue = self._of_client.get(request.client, deque())
            if request in queue:
                queue.remove(request)
                if not queue:
                    del self._of_client[request.client]

    def __iter__(self) -> Iterator[Request]:
        with self._lock:
            return iter(list(chain.from_iterable(self._of_client.values())))

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._of_client.values()))
