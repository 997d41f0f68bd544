"""The contract of a protocol: its endpoints, what a body asks for, the shapes of answers, and its error object.

A protocol is a folder of the same parts: `fields` (what bodies may have, and the request that they mean), `reply`
(shapes of answers, whole and as events) and `endpoints` (its `Protocol`, with an `Exchange` for each path that
generates). A protocol imports no other one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edgemoe.serve.errors import ApiError
from edgemoe.serve.job import Job
from edgemoe.serve.protocol.reply import Reply, Shape
from edgemoe.serve.protocol.sending import Delivery, StreamResponse, WholeResponse
from edgemoe.serve.request.chat import ChatRequest
from edgemoe.serve.request.completion import CompletionRequest
from edgemoe.serve.request.fields import Fields, parse
from edgemoe.serve.serving import Serving

Endpoint = Callable[[Request], Coroutine[Any, Any, Any]]
"""Answers the requests of a path."""

Given = TypeVar("Given", bound=Fields)


class Exchange(ABC, Generic[Given]):
    """A POST endpoint whose answers the model generates. A body passes the methods in the order in which they stand.

    Args:
        serving: the model.

    Attributes:
        path: the path of the endpoint.
        fields: the fields that a body may have.
        prompt_field: the field that holds the prompt, for errors of it.
    """

    path: str
    fields: type[Given]
    prompt_field = "messages"

    def __init__(self, serving: Serving) -> None:
        self.serving = serving

    def without_prompt(self, fields: Given) -> Shape | None:
        """The answer to a body that has nothing to generate; None: it has a prompt.

        Raises:
            ApiError: a field that the server cannot obey.
        """
        return None

    @abstractmethod
    def request(self, fields: Given) -> ChatRequest | CompletionRequest:
        """The request that a body means.

        Raises:
            ApiError: a field that the request does not have, or a wrong one.
        """

    def read(self, body: bytes) -> tuple[Given, Shape | ChatRequest | CompletionRequest]:
        """A body's fields, and the request that it means, or the answer where it has nothing to generate.

        Raises:
            ApiError: it is no JSON, or a field is wrong.
        """
        given = parse(self.fields, body)
        nothing = self.without_prompt(given)
        return given, self.request(given) if nothing is None else nothing

    @abstractmethod
    def reply(self, fields: Given, job: Job) -> Reply:
        """The shapes of the answers of a submitted job."""

    @abstractmethod
    def delivery(self, fields: Given) -> Delivery:
        """How the answers go out."""


class Protocol(ABC):
    """The endpoints of a protocol, over one served model.

    Args:
        serving: the model.

    Attributes:
        prefix: paths that begin so have this protocol's error object; by default every path does.
    """

    prefix = ""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving

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

    def _answering(self, exchange: Exchange[Any]) -> Endpoint:
        """The endpoint of an exchange."""
        serving = self.serving

        async def answer(request: Request) -> Response | StreamResponse | WholeResponse:
            async with serving.bodies.reading(request, serving.limits) as body:
                given, meant = await serving.parsing.run(exchange.read, body)
                del body
                if isinstance(meant, dict):
                    return JSONResponse(meant)
                job = await serving.start(request, meant, exchange.prompt_field)
            try:
                reply, wanted = (
                    await serving.preparing.run(exchange.reply, given, job),
                    exchange.delivery(given),
                )
            except BaseException:
                job.leave()
                raise
            if wanted.stream:
                return StreamResponse(job, reply, self.error_body, serving.limits, wanted)
            return WholeResponse(job, reply, self.error_body, serving.limits)

        return answer
