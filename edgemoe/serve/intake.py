"""State that requests of all models of a server share: limits, bodies, and the threads that read and prepare them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.requests import Request

from edgemoe.machine.process import resident_bytes, return_free_memory
from edgemoe.serve.bodies import Bodies, PicturesInMemory
from edgemoe.serve.compiling import Compiling
from edgemoe.serve.limits import Limits
from edgemoe.serve.workers import Workers

KEPT_BYTES = 32 << 20
"""Growth of the process by a prompt's text from which freed memory goes back to the system."""

Result = TypeVar("Result")


@dataclass
class Intake:
    """Takes requests in, whatever their model. For the event loop's thread.

    Args:
        limits: times and sizes of one request.
        bodies: bodies that are read or used.
        pictures: bytes of the pictures of requests that wait for an answer or get one.
        parsing: threads that read bodies.
        preparing: threads that make prompts.
        compiling: threads that compile the forms of answers.
    """

    limits: Limits = field(default_factory=Limits)
    bodies: Bodies = field(default_factory=Bodies)
    pictures: PicturesInMemory = field(default_factory=PicturesInMemory)
    parsing: Workers = field(default_factory=lambda: Workers(2, "bodies"))
    preparing: Workers = field(default_factory=lambda: Workers(2, "prompts"))
    compiling: Compiling = field(default_factory=Compiling)

    async def prepared(self, work: Callable[[], Result]) -> Result:
        """Calls a function that tokenizes a text, on a thread; the memory of long texts goes back to the system."""
        return await self.preparing.run(_returning_memory, work)


def _returning_memory(work: Callable[[], Result]) -> Result:
    before = resident_bytes()
    try:
        return work()
    finally:
        if resident_bytes() - before > KEPT_BYTES:
            return_free_memory()


def client_of(request: Request) -> str:
    """Names the client of a request by its address: all of them have the same key."""
    return request.client.host if request.client else ""
