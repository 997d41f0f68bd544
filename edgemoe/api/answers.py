"""Answers on their way: in the background, as a stream of pieces, or as scores of a text."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from edgemoe.api.status import Progress
from edgemoe.engine.generate import Answer, Generation
from edgemoe.engine.request import CANCELLED, Request
from edgemoe.engine.sampling import PromptScores, Sampler, Sampling, TokenLogprobs
from edgemoe.engine.scheduler import Scheduler
from edgemoe.errors import UserError


class AnswerFuture(Future[Answer]):
    """An answer that comes in the background.

    Args:
        generation: the answer under way.
    """

    def __init__(self, generation: Generation) -> None:
        super().__init__()
        self._generation = generation

    @property
    def progress(self) -> Progress:
        """How far the answer is."""
        return Progress.of(self._generation.request)

    @property
    def logprobs(self) -> Sequence[TokenLogprobs]:
        """Log probabilities of the tokens so far, with `logprobs` among the choices; grows while the answer comes."""
        return self._generation.logprobs

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprobs]:
        """Log probabilities of the prompt's tokens run so far, except the first, with `prompt_logprobs` chosen."""
        return self._generation.prompt_logprobs


class AnswerStream(Iterator[str]):
    """The pieces of an answer as they come. Each `next` computes on, alone or together with other requests.

    Attributes:
        answer: the whole answer, once the pieces have ended.
    """

    def __init__(self, scheduler: Scheduler, generation: Generation, pieces: deque[str]) -> None:
        self._scheduler, self._generation, self._pieces = scheduler, generation, pieces
        self.answer: Answer | None = None

    def __next__(self) -> str:
        """Returns the next piece of text.

        Raises:
            StopIteration: the answer has ended, or was closed.
            the error that ended the answer.
        """
        request = self._generation.request
        if not self._pieces and self.answer is None and request.reason != CANCELLED:
            self._scheduler.wait(request, lambda: bool(self._pieces))
            if request.ended and request.reason != CANCELLED:
                self.answer = self._generation.answer()  # its last piece comes with it
        if not self._pieces:
            raise StopIteration
        return self._pieces.popleft()

    def close(self) -> None:
        """Ends the answer; its memory is free at the return. Idempotent."""
        if not self._generation.request.ended:
            self._scheduler.drop(self._generation.request)

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._scheduler.cancel(self._generation.request)


class Score:
    """The score of one text on its way: a request that ends with its prompt."""

    def __init__(self, tokens: list[int], top: int, first: int) -> None:
        if len(tokens) < 2:
            found = f"one of {len(tokens)}"
            raise UserError("a text of two tokens or more to score", found, "give a longer one")
        if not 1 <= first < len(tokens):
            raise UserError(f"a first score of 1 to {len(tokens) - 1}", f"{first}", "choose one of them")
        self._scores, self._first = PromptScores(tokens, top), first
        self.request = Request(
            tokens, Sampler(_ONE_TOKEN), on_rows=self._scores.add, scored=True, rows_from=first - 1
        )

    def wanted(self) -> list[TokenLogprobs]:
        """The scores from the first one that is wanted, once the request has ended."""
        return self._scores.logprobs[self._first - 1 - self.request.cached :]


_ONE_TOKEN = Sampling(0, 1, 0, 1, 0, 1, frozenset())


def cancel_request(scheduler: Scheduler, request: Request, future: Future[Answer]) -> None:
    """Cancels the request of a future that is done, where the future was cancelled."""
    if future.cancelled():
        scheduler.cancel(request)


def resolve(future: Future[Answer], generation: Generation) -> None:
    """Gives a future the answer or the error of its request, which has ended."""
    if generation.request.reason == CANCELLED:
        future.cancel()
    if not future.set_running_or_notify_cancel():
        return
    try:
        if generation.request.error:
            raise generation.request.error
        future.set_result(generation.answer())
    except BaseException as error:
        future.set_exception(error)
