"""One request's answers on their way: submitted, streamed to the event loop, cancelled when it leaves."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from edgemoe.serve.errors import UNAVAILABLE, ApiError

if TYPE_CHECKING:
    from edgemoe.api.answer_reader import AnswerReader, Delta
    from edgemoe.api.answers import AnswerFuture
    from edgemoe.api.choices import Choices
    from edgemoe.api.model import Model
    from edgemoe.engine.generate import Answer


ENDING = (
    "expected an answer, got the end of the server: send the request again once it has been started again"
)
"""Message of the error that answers get where the server ends before them."""


@dataclass(frozen=True)
class Event:
    """News of one answer: a part of it, or all of it at its end.

    Args:
        index: number of the answer in its request.
        part: text, or what its reader has found in it; "" with `answer`.
        answer: the whole one.
    """

    index: int
    part: str | Sequence[Delta]
    answer: Answer | None = None


@dataclass(frozen=True)
class Wanted:
    """An answer that a request wants.

    Args:
        prompt: token ids.
        choices: how it is generated.
        reader: finds its parts; None: it is text.
        on_answer: called with a whole answer that has a reader, before the client has its end, in the thread that
            computes.
    """

    prompt: list[int]
    choices: Choices
    reader: AnswerReader | None = None
    on_answer: Callable[[Answer], None] = lambda answer: None


class Job:
    """The answers of one request. Use it as an asynchronous context manager: leaving it cancels what has not ended.

    Args:
        model: computes them.
        answers: each answer.
        kind: a word for the list of requests.
        client: address of the sender.
        on_end: called once, when the job is left.
    """

    def __init__(
        self,
        model: Model,
        answers: Sequence[Wanted],
        kind: str,
        client: str,
        on_end: Callable[[Job], None] = lambda job: None,
    ) -> None:
        self._model, self._wanted, self.kind, self.client = model, list(answers), kind, client
        self._events, self._loop = asyncio.Queue[Event | BaseException](), asyncio.get_running_loop()
        self._left, self._on_end = False, on_end
        self.start = time.monotonic()
        self.prompts = [list(each.prompt) for each in answers]
        self.readers = [each.reader for each in answers]
        self.futures: list[AnswerFuture] = []
        self.answers: list[Answer | None] = [None] * len(self.prompts)
        self.error: ApiError | None = None
        """The error that ended it."""
        self.deadline: float | None = None
        """Time of the event loop at which it ends by an error; None: no limit."""

    async def submit(self) -> None:
        """Submits every answer.

        Raises:
            as Model.submit; nothing of the job is left then.
        """
        try:
            await asyncio.to_thread(self._submit)
        except BaseException as error:
            self.fail(error)
            self.leave()
            raise

    def _submit(self) -> None:
        for index, each in enumerate(self._wanted):
            show = partial(self._piece, index)
            future = self._model.submit(each.prompt, show, client=self.client, **each.choices)
            self.futures.append(future)
            future.add_done_callback(partial(self._end, index))
            if self._left:  # while it was submitted
                future.cancel()
                return

    def _piece(self, index: int, piece: str) -> bool:
        """Takes a piece of an answer; returns whether it is complete."""
        reader = self.readers[index]
        self._put(Event(index, reader.feed(piece) if reader else piece))
        return reader is not None and reader.full

    def _end(self, index: int, future: Future[Answer]) -> None:
        if future.cancelled():
            self._put(ApiError(503, ENDING, kind=UNAVAILABLE))
        elif error := future.exception():
            self._put(error)
        else:
            answer, wanted = future.result(), self._wanted[index]
            if wanted.reader:
                self._put(Event(index, wanted.reader.end()))
                wanted.on_answer(answer)
            self._put(Event(index, "", answer))

    def _put(self, event: Event | BaseException) -> None:
        news = not isinstance(event, Event) or event.part or event.answer
        if news and not self._left:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def events(self, pause: float) -> AsyncGenerator[Event | None, None]:
        """Yields the events until all answers have ended; None where `pause` seconds bring none.

        Raises:
            the error that ended an answer.
        """
        while None in self.answers:
            try:
                async with asyncio.timeout(
                    pause
                ):  # wait_for would lose a cancellation that comes with an event
                    event = await self._events.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(event, BaseException):
                raise event
            if event.answer:
                self.answers[event.index] = event.answer
            yield event

    def fail(self, error: BaseException) -> ApiError:
        """Notes the error that ends the job, as the client gets it."""
        self.error = ApiError.of(error)
        return self.error

    def cancel(self) -> None:
        """Ends every answer that has not ended by an error."""
        for future in self.futures:
            future.cancel()

    def leave(self) -> None:
        """Cancels what has not ended. Idempotent."""
        if self._left:
            return
        self._left = True
        self.cancel()
        self._on_end(self)

    async def __aenter__(self) -> Job:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.leave()


class Queue:
    """A bound on the requests that wait or run. Requests beyond it are refused, with the time of one as advice.

    A client that has none is let in beyond the bound, so that one client's requests keep no other one out. The number
    of such requests is bounded too.

    Args:
        limit: number of requests; and as many beyond them, of clients that had none.

    Attributes:
        jobs: requests that wait or run.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.jobs = limit, list[Job]()
        self._of_client = Counter[str]()
        self._seconds = deque[float](maxlen=16)

    @property
    def taken(self) -> int:
        """Number of taken places, including requests that are not submitted yet."""
        return self._of_client.total()

    def enter(self, client: str) -> None:
        """Takes a place for a client.

        Raises:
            ApiError: there is none.
        """
        if self.taken >= (self.limit if self._of_client[client] else 2 * self.limit):
            mean = sum(self._seconds) / len(self._seconds) if self._seconds else 5
            seconds = min(max(round(mean), 1), 60)
            message = (
                f"expected a free place for this request, got {self.taken} requests that run or wait, of "
                f"{self.limit} places: send it again in {seconds} s"
            )
            wait = {"retry-after": str(seconds)}
            raise ApiError(429, message, kind="rate_limit_error", code="queue_full", headers=wait)
        self._of_client[client] += 1

    def leave(self, client: str) -> None:
        """Gives a client's place back."""
        self._of_client[client] -= 1
        self._of_client += Counter()  # without clients that have none

    def add(self, job: Job) -> None:
        """Lists a job whose place was taken."""
        self.jobs.append(job)

    def remove(self, job: Job) -> None:
        """Ends a job: its place is free."""
        self._seconds.append(time.monotonic() - job.start)
        self.jobs.remove(job)
        self.leave(job.client)
