"""What a server has: the model once it is open, its name, the requests under way, and figures."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from edgemoe.serve.errors import UNAVAILABLE, ApiError
from edgemoe.serve.job import Job, Queue
from edgemoe.serve.metrics import Metrics
from storage.errors import EdgemoeError
from storage.untrusted import foreign_code

if TYPE_CHECKING:
    from edgemoe.api.model import Choices, Model, Prompt

BODY_BYTES = 16 << 20
"""Most bytes of a request's body: some million tokens of text."""

BODY_SECONDS = 30.0
"""Time in which all of a body must have come."""

_CLOSE = {"connection": "close"}
"""Header of a response to a request whose body is not read to its end."""

_log = logging.getLogger("edgemoe.serve")


class Serving:
    """One model behind endpoints. For the event loop's thread.

    Args:
        name: of the model, as clients see it.
        most: requests at once, waiting ones included.
        limit: seconds of one request; None: no limit.

    Attributes:
        model: None before it is open.
        answered: called after every answer.
    """

    def __init__(self, name: str, *, most: int, limit: float | None = None) -> None:
        self.name, self.limit, self.queue = name, limit, Queue(most)
        self.created, self.metrics = int(time.time()), Metrics(name, self.queue)
        self.model: Model | None = None
        self.answered: Callable[[], None] = lambda: None
        self.prompt_tokens = self.new_tokens = 0
        """Of all answers so far."""

    def open(self, model: Model) -> None:
        """Begins to serve."""
        self.metrics.watch(model)
        self.text_of = lru_cache(1 << 16)(self._text_of)
        self.model = model

    def require(self) -> Model:
        """Returns the model.

        Raises:
            ApiError: it is not open yet.
        """
        if self.model is None:
            wait = {"retry-after": "5"}
            raise ApiError(503, "Loading model", kind=UNAVAILABLE, code=503, headers=wait)
        return self.model

    async def start(
        self,
        kind: str,
        client: str,
        prompts: Sequence[Prompt],
        choices: Sequence[Choices],
        param: str,
        **template: object,
    ) -> Job:
        """Submits each prompt with each of the choices; without a limit an answer may fill the context.

        Args:
            kind: of request, for the list of them.
            client: that sent it; clients' requests begin in turn.
            prompts: see Prompt.
            choices: of the answers to each prompt.
            param: the field that the prompts are in.
            template: as Model.encode.

        Raises:
            ApiError: the queue is full, or a prompt or a choice is wrong.
        """
        model = self.require()
        self.queue.enter(client)
        try:
            encoded = [await asyncio.to_thread(model.encode, each, **template) for each in prompts]
            most = model.engine.plan.context
            every = [(tokens, choice) for tokens in encoded for choice in choices]
            tokens = [list(tokens) for tokens, _ in every]
            limited: list[Choices] = [
                {"max_new_tokens": max(most - len(t), 1), **given} for t, given in every
            ]
            job = Job(model, tokens, limited, kind, client, self._ended)
        except BaseException as error:
            self.queue.leave(client)
            raise _known(error, param) from error
        self.queue.add(job)
        try:
            await job.submit()
        except BaseException as error:
            raise _known(error, param) from error
        return job

    def _ended(self, job: Job) -> None:
        self.queue.remove(job)
        answers = [answer for answer in job.answers if answer]
        for answer in answers:
            self.prompt_tokens += answer.prompt_tokens
            self.new_tokens += answer.new_tokens
            self.metrics.answered(answer)
            self.answered()
        if len(answers) < len(job.answers):
            self.metrics.failed(job.error.status if job.error else 499)  # 499: the client left
        end = (
            str(job.error) if job.error else "answered" if len(answers) == len(job.answers) else "client left"
        )
        _log.info(
            "%s: %d + %d tokens in %.2f s, %s",
            job.kind,
            sum(answer.prompt_tokens for answer in answers),
            sum(answer.new_tokens for answer in answers),
            time.monotonic() - job.start,
            end,
        )

    def _text_of(self, token: int) -> str:
        with foreign_code("a tokenizer that decodes the model's tokens"):
            return str(self.require().tokenizer.decode([token], skip_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids.

        Raises:
            ApiError: an id that the model does not have.
        """
        model = self.require()
        vocab = model.engine.shape.vocab
        wrong = next((token for token in tokens if not 0 <= token < vocab), None)
        if wrong is not None:
            raise ApiError(400, f"expected token ids of 0 to {vocab - 1}, got {wrong}", param="tokens")
        with foreign_code("a tokenizer that decodes the model's tokens"):
            return str(model.tokenizer.decode(list(tokens), skip_special_tokens=False))


def _known(error: BaseException, param: str) -> BaseException:
    return ApiError.of(error, param) if isinstance(error, EdgemoeError) else error


async def body_of(request: Request) -> bytes:
    """Reads a request's body.

    Raises:
        ApiError: it is too long, or comes too slowly.
        ClientDisconnect: the client has left.
    """
    length, body = request.headers.get("content-length", "0"), bytearray()
    too_long = ApiError(413, f"expected a body of at most {BODY_BYTES} bytes, got more", headers=_CLOSE)
    if length.isdecimal() and int(length[:20]) > BODY_BYTES:
        raise too_long
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > BODY_BYTES:
                    raise too_long
    except TimeoutError:
        message = f"expected the whole body within {BODY_SECONDS:g} s, got a part of it"
        raise ApiError(408, message, headers=_CLOSE) from None
    return bytes(body)


def model_object(serving: Serving) -> dict[str, Any]:
    """The served model, as an entry of /v1/models."""
    entry = {"id": serving.name, "object": "model", "created": serving.created, "owned_by": "edgemoe"}
    if serving.model is None:
        return entry
    engine = serving.model.engine
    meta = {"n_ctx": engine.plan.context, "n_vocab": engine.shape.vocab}
    return entry | {"max_model_len": engine.plan.context, "meta": meta}
