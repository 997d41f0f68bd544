"""The times and sizes of one request."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The times and sizes of one request.

    Args:
        answer_seconds: time until its last answer has ended, with the wait for its model; None: no limit.
        bodies_bytes: most bytes of the bodies of all requests together that come, or whose prompts are made.
        body_bytes: most bytes of its body: a million tokens of text or more.
        body_seconds: time in which all of its body must have come.
        compile_seconds: time in which an answer's grammar must be compiled, the wait for its turn included; the first
            one of a model waits for its vocabulary.
        pictures_bytes: most bytes of the pictures of all requests together that wait for an answer or get one.
        ping_seconds: time without a chunk after which a stream sends a sign of life, so that no proxy or client gives
            it up.
        progress_seconds: time between two chunks of a prompt's progress.
        thinking_budget: most tokens of reasoning in answers to requests that say nothing of it; None: no limit.
    """

    answer_seconds: float | None = None
    bodies_bytes: int = 64 << 20
    body_bytes: int = 8 << 20
    body_seconds: float = 30.0
    compile_seconds: float = 60.0
    pictures_bytes: int = 64 << 20
    ping_seconds: float = 5.0
    progress_seconds: float = 0.5
    thinking_budget: int | None = None

    def deadline(self) -> float | None:
        """The time of the running event loop at which a request that begins now is over; None: no limit."""
        return self.answer_seconds and asyncio.get_running_loop().time() + self.answer_seconds
