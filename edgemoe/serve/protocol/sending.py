"""The two ways a job goes out: one JSON object, or a stream of them; a client that leaves ends either."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgemoe.serve.errors import ApiError
from edgemoe.serve.job import Job
from edgemoe.serve.limits import Limits
from edgemoe.serve.protocol.reply import Reply, Shape, json_bytes, large_json_bytes

if TYPE_CHECKING:
    from edgemoe.engine.generate import Answer

MOST_SCORES = 256
"""Tokens with log probabilities of an answer that is written at once, which holds other threads up."""

ErrorBody = Callable[[ApiError], Shape]
"""Makes the error object of a protocol."""

_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx passes chunks on as they come
]


@dataclass(frozen=True)
class Delivery:
    """How a request wants its answers.

    Args:
        stream: they go out in parts, as they come; otherwise they are one object.
        usage: a stream ends with a chunk of usage.
        progress: a stream has chunks of the prompt's progress before the first token.
    """

    stream: bool
    usage: bool = False
    progress: bool = False


class WholeResponse:
    """Answers a job with one JSON object.

    Args:
        job: submitted.
        reply: the object's shape.
        error_body: makes the object of an error instead.
        limits: the server's limits on time and size.
    """

    def __init__(self, job: Job, reply: Reply, error_body: ErrorBody, limits: Limits) -> None:
        self._job, self._reply, self._error_body, self._limits = job, reply, error_body, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the job until its end, or until the client has left."""
        async with self._job:
            await _until_left(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits = self._limits
        try:
            async with (
                asyncio.timeout_at(self._job.deadline),
                aclosing(self._job.events(limits.ping_seconds)) as events,
            ):
                async for _ in events:
                    pass
            answers = [answer for answer in self._job.answers if answer]
            body = await asyncio.to_thread(self._body, answers)
            response = Response(body, media_type="application/json")
        except Exception as error:
            failed = self._job.fail(error)
            response = failed.response(self._error_body(failed))
        await response(scope, receive, send)

    def _body(self, answers: Sequence[Answer]) -> bytes:
        scores = sum(len(answer.logprobs or ()) + len(answer.prompt_logprobs or ()) for answer in answers)
        return (large_json_bytes if scores > MOST_SCORES else json_bytes)(self._reply.whole(answers))


class StreamResponse:
    """Answers a job with a stream. Headers go out at once, before the prompt runs.

    Args:
        job: submitted.
        reply: the chunks' shape.
        error_body: makes the object of an error that ends the stream.
        limits: the server's limits on time and size.
        delivery: chunks that are sent where they are wanted.
    """

    def __init__(
        self, job: Job, reply: Reply, error_body: ErrorBody, limits: Limits, delivery: Delivery
    ) -> None:
        self._job, self._reply, self._error_body = job, reply, error_body
        self._limits, self._wanted = limits, delivery

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Streams until the end, or until the client has left."""
        async with self._job:
            await _until_left(receive, self._run(send))

    async def _run(self, send: Send) -> None:
        reply = self._reply
        headers = [(b"content-type", reply.media_type), *_HEADERS]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async with asyncio.timeout_at(self._job.deadline), aclosing(self._chunks()) as chunks:
                async for chunk in chunks:
                    await _send(send, reply.ping() if chunk is None else reply.frame(chunk))
            await _send(send, reply.end())
        except Exception as error:
            failed = self._job.fail(error)
            await _send(send, reply.error(failed, self._error_body(failed)))
        await send({"type": "http.response.body", "body": b""})

    async def _chunks(self) -> AsyncGenerator[Shape | None, None]:
        """Yields every chunk; None where it is time for a sign of life."""
        job, reply, limits = self._job, self._reply, self._limits
        seen, begun = Counter[int](), set[int]()
        for index in range(len(job.prompts)):
            for chunk in reply.first(index):
                yield chunk
        progress, sent = _Progress(job, reply), time.monotonic()
        async for event in job.events(limits.progress_seconds):
            if event is None:
                news = progress.chunks() if self._wanted.progress else []
                for chunk in news:
                    yield chunk
                if news or time.monotonic() - sent >= limits.ping_seconds:
                    if not news:
                        yield None
                    sent = time.monotonic()
                continue
            sent, index, future = time.monotonic(), event.index, job.futures[event.index]
            if index not in begun:
                begun.add(index)
                for chunk in await asyncio.to_thread(reply.echo, index, future.prompt_logprobs):
                    yield chunk
            tokens = list(future.logprobs[seen[index] :])
            seen[index] += len(tokens)
            if event.answer:
                for chunk in reply.last(index, event.answer, tokens):
                    yield chunk
            elif isinstance(event.part, str):
                for chunk in reply.piece(index, event.part, tokens):
                    yield chunk
            else:
                for delta in event.part:
                    for chunk in reply.delta(index, delta, tokens):
                        yield chunk
                    tokens = []
        if self._wanted.usage:
            for chunk in reply.usage([answer for answer in job.answers if answer]):
                yield chunk


class _Progress:
    """Chunks of the progress of a job's prompts."""

    def __init__(self, job: Job, reply: Reply) -> None:
        self._job, self._reply = job, reply
        self._last: dict[int, int] = {}

    def chunks(self) -> list[Shape]:
        """One for each prompt that has moved since the last call and is not answered yet."""
        found = list[Shape]()
        for index, future in enumerate(self._job.futures):
            now = future.progress
            if now.state == "prompt" and now.done_tokens != self._last.get(index):
                self._last[index] = now.done_tokens
                found += self._reply.progress(index, now, time.monotonic() - self._job.start)
        return found


async def _send(send: Send, part: bytes) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": True})


async def _until_left(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`, and cancels it once the client has disconnected."""
    working, left = asyncio.create_task(work), asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({working, left}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        for task in (working, left):
            task.cancel()
        await asyncio.gather(working, left, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
