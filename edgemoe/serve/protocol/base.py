"""The contract of a protocol: its endpoints, what a body asks for, the shapes of answers, and its error object.

A protocol is a folder of the same parts: `fields` (what bodies may have, and the request that they mean), `reply`
(shapes of answers, whole and as events) and `endpoints` (its `Protocol`, with an `Exchange` for each path that
generates). A protocol imports no other one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edgemoe.serve.errors import ApiError
from edgemoe.serve.job import Job
from edgemoe.serve.models import Models
from edgemoe.serve.protocol.reply import Reply, Shape
from edgemoe.serve.protocol.sending import Delivery, StreamResponse, WholeResponse
from edgemoe.serve.request.chat import ChatRequest
from edgemoe.serve.request.completion import CompletionRequest
from edgemoe.serve.request.fields import Fields, parse
from edgemoe.serve.serving import Serving

Endpoint = Callable[[Request], Coroutine[Any, Any, Any]]
"""Answers the requests of a path."""

Given = TypeVar("Given", bound=Fields)
Found = TypeVar("Found")


class Exchange(ABC, Generic[Given]):
    """A POST endpoint whose answers a model generates. A body passes the methods in the order in which they stand.

    Attributes:
        path: the path of the endpoint.
        fields: the fields that a body may have.
        prompt_field: the field that holds the prompt, for errors of it.
    """

    path: str
    fields: type[Given]
    prompt_field = "messages"

    def model_name(self, fields: Given) -> str | None:
        """The name of the model; None: the body names none."""
        name: str | None = getattr(fields, "model", None)
        return name

    def keep_seconds(self, fields: Given) -> float | None:
        """Seconds for which the model stays after the answer, infinite for ever; None: the server decides.

        Raises:
            ApiError: a field that is no time.
        """
        return None

    def without_prompt(self, fields: Given) -> Shape | None:
        """The answer to a body that has nothing to generate; None: it has a prompt.

        Raises:
            ApiError: a field that the server cannot obey.
        """
        return None

    @abstractmethod
    def request(self, fields: Given, serving: Serving) -> ChatRequest | CompletionRequest:
        """The request that a body means for a model.

        Raises:
            ApiError: a field that the request does not have, or a wrong one.
        """

    @abstractmethod
    def reply(self, fields: Given, serving: Serving, job: Job) -> Reply:
        """The shapes of the answers of a job that was submitted to a model."""

    @abstractmethod
    def delivery(self, fields: Given) -> Delivery:
        """How the answers go out."""


class Protocol(ABC):
    """The endpoints of a protocol, over the models of a server.

    Args:
        models: the models.

    Attributes:
        prefix: paths that begin so have this protocol's error object; by default every path does.
    """

    prefix = ""

    def __init__(self, models: Models) -> None:
        self.models = models

    @abstractmethod
    def exchanges(self) -> Sequence[Exchange[Any]]:
        """The endpoints whose answers the model generates."""

    def lookups(self) -> Mapping[tuple[str, str], Endpoint]:
        """The other endpoints: (method, path) -> what answers it."""
        return {}

    def error_body(self, error: ApiError) -> Shape:
        """The JSON object of an error; by default OpenAI's, which the server's own endpoints have too."""
        fields = {"message": str(error), "type": error.kind, "param": error.param, "code": error.code}
        return {"error": fields}

    def routes(self) -> list[Route]:
        """All endpoints."""
        generating = {("POST", each.path): self._answering(each) for each in self.exchanges()}
        every = {**generating, **self.lookups()}
        return [Route(path, endpoint, methods=[method]) for (method, path), endpoint in every.items()]

    async def body_of(self, request: Request, kind: type[Given]) -> Given:
        """Reads and validates the body of a request that generates nothing.

        Raises:
            ApiError: it is no JSON, or a field is wrong.
            ClientDisconnect: the client has left.
        """
        intake = self.models.intake
        async with intake.bodies.reading(request, intake.limits) as body:
            return await intake.parsing.run(parse, kind, body)

    async def tokenized(
        self, request: Request, kind: type[Given], work: Callable[[Given, Serving], Found]
    ) -> Found:
        """Calls what makes tokens or text of a body, once its model is loaded and it is the request's turn.

        Args:
            request: the client's request.
            kind: the fields of its body; `model` names the model.
            work: is called on a thread.

        Raises:
            ApiError: too many such requests wait, the body is wrong, or by `work`.
            ClientDisconnect: the client has left.
        """
        models, intake = self.models, self.models.intake
        async with intake.bodies.reading(request, intake.limits) as body:
            given = await intake.parsing.run(parse, kind, body)
            del body
            hold = await models.hold(request, models.of_request(getattr(given, "model", None)))
            try:
                return await hold.serving.tokenized(request, partial(work, given, hold.serving))
            finally:
                hold.release()

    def _answering(self, exchange: Exchange[Any]) -> Endpoint:
        """The endpoint of an exchange."""
        models, intake = self.models, self.models.intake

        async def answer(request: Request) -> Response | StreamResponse | WholeResponse:
            async with intake.bodies.reading(request, intake.limits) as body:
                given = await intake.parsing.run(parse, exchange.fields, body)
                del body
                slot, keep = models.of_request(exchange.model_name(given)), exchange.keep_seconds(given)
                nothing = exchange.without_prompt(given)
                if nothing is not None and keep == 0:
                    models.unload(slot)
                    return JSONResponse(nothing)
                hold = await models.hold(request, slot, keep)
                try:
                    if nothing is not None:
                        hold.release()
                        return JSONResponse(nothing)
                    meant = await intake.parsing.run(exchange.request, given, hold.serving)
                    job = await hold.serving.start(request, meant, exchange.prompt_field, hold.release)
                    job.deadline = hold.deadline
                except BaseException:
                    hold.release()
                    raise
            try:
                reply = await intake.preparing.run(exchange.reply, given, hold.serving, job)
                wanted = exchange.delivery(given)
            except BaseException:
                job.leave()
                raise
            if wanted.stream:
                return StreamResponse(job, reply, self.error_body, intake.limits, wanted)
            return WholeResponse(job, reply, self.error_body, intake.limits)

        return answer
