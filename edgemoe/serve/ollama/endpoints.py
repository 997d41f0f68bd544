"""Ollama's endpoints: /api/chat and /api/generate, and what it says of its one model."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgemoe.serve.errors import ApiError
from edgemoe.serve.job import Job
from edgemoe.serve.ollama.fields import ChatBody, GenerateBody, ShowBody
from edgemoe.serve.ollama.models import described, listed, loaded
from edgemoe.serve.ollama.reply import ChatShape, GenerateShape, OllamaReply
from edgemoe.serve.protocol.base import Endpoint, Exchange, Protocol
from edgemoe.serve.protocol.reply import Shape
from edgemoe.serve.protocol.sending import Delivery
from edgemoe.serve.request.chat import ChatRequest
from edgemoe.serve.request.completion import CompletionRequest
from edgemoe.serve.request.fields import parse

VERSION = "0.12.11"
"""The version of ollama's interface that is spoken here: clients compare it with the one that they need."""


class Chat(Exchange[ChatBody]):
    """POST /api/chat: an answer to messages."""

    path, fields = "/api/chat", ChatBody

    def without_prompt(self, given: ChatBody) -> Shape | None:
        """A body without messages loads or unloads the model."""
        self.serving.require()
        return None if given.messages else ChatShape(given.model).loaded(given.keep_alive)

    def request(self, given: ChatBody) -> ChatRequest:
        """The chat that the messages mean."""
        return given.as_chat(self.serving.require().engine.plan.context)

    def reply(self, given: ChatBody, job: Job) -> OllamaReply:
        """The shapes of the answer."""
        return OllamaReply(ChatShape(given.model), job.readers[0], self.serving.texts)

    def delivery(self, given: ChatBody) -> Delivery:
        """By default the answer comes in lines."""
        return Delivery(stream=given.streamed)


class Generate(Exchange[GenerateBody]):
    """POST /api/generate: an answer to a text, or its continuation."""

    path, fields, prompt_field = "/api/generate", GenerateBody, "prompt"

    def without_prompt(self, given: GenerateBody) -> Shape | None:
        """A body without a prompt loads or unloads the model."""
        self.serving.require()
        given.require_supported()
        return None if given.prompt else GenerateShape(given.model).loaded(given.keep_alive)

    def request(self, given: GenerateBody) -> ChatRequest | CompletionRequest:
        """The completion of a raw text, or the chat that a text means."""
        context = self.serving.require().engine.plan.context
        return given.as_completion(context) if given.is_text else given.as_chat(context)

    def reply(self, given: GenerateBody, job: Job) -> OllamaReply:
        """The shapes of the answer."""
        return OllamaReply(GenerateShape(given.model), job.readers[0], self.serving.texts)

    def delivery(self, given: GenerateBody) -> Delivery:
        """By default the answer comes in lines."""
        return Delivery(stream=given.streamed)


class OllamaProtocol(Protocol):
    """Ollama's interface."""

    prefix = "/api/"

    def exchanges(self) -> list[Exchange[ChatBody] | Exchange[GenerateBody]]:
        """Chats and texts."""
        return [Chat(self.serving), Generate(self.serving)]

    def lookups(self) -> dict[tuple[str, str], Endpoint]:
        """The one model, and the version."""
        return {
            ("GET", "/api/tags"): self._tags,
            ("GET", "/api/ps"): self._ps,
            ("GET", "/api/version"): self._version,
            ("POST", "/api/show"): self._show,
        }

    def error_body(self, error: ApiError) -> Shape:
        """Ollama's object of an error, which is its message."""
        return {"error": str(error)}

    async def _show(self, request: Request) -> Response:
        serving = self.serving
        async with serving.bodies.reading(request, serving.limits) as body:
            fields = await serving.parsing.run(parse, ShowBody, body)
        name = fields.model or fields.name or ""
        if name.removesuffix(":latest") != serving.name:
            raise ApiError(404, f"model {name[:200]!r} not found: see GET /api/tags", param="model")
        return JSONResponse(await serving.parsing.run(described, serving))

    async def _tags(self, request: Request) -> Response:
        return JSONResponse({"models": [await self.serving.parsing.run(listed, self.serving)]})

    async def _ps(self, request: Request) -> Response:
        models = [] if self.serving.model is None else [await self.serving.parsing.run(loaded, self.serving)]
        return JSONResponse({"models": models})

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": VERSION})
