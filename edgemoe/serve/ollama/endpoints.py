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

    def without_prompt(self, fields: ChatBody) -> Shape | None:
        """A body without messages loads or unloads the model."""
        self.serving.require()
        return None if fields.messages else ChatShape(fields.model).loaded(fields.keep_alive)

    def request(self, fields: ChatBody) -> ChatRequest:
        """The chat that the messages mean."""
        return fields.as_chat(self.serving.require().engine.plan.context)

    def reply(self, fields: ChatBody, job: Job) -> OllamaReply:
        """The shapes of the answer."""
        return OllamaReply(ChatShape(fields.model), job.readers[0], self.serving.texts)

    def delivery(self, fields: ChatBody) -> Delivery:
        """By default the answer comes in lines."""
        return Delivery(stream=fields.streamed)


class Generate(Exchange[GenerateBody]):
    """POST /api/generate: an answer to a text, or its continuation."""

    path, fields, prompt_field = "/api/generate", GenerateBody, "prompt"

    def without_prompt(self, fields: GenerateBody) -> Shape | None:
        """A body without a prompt loads or unloads the model."""
        self.serving.require()
        fields.require_supported()
        return None if fields.prompt else GenerateShape(fields.model).loaded(fields.keep_alive)

    def request(self, fields: GenerateBody) -> ChatRequest | CompletionRequest:
        """The completion of a raw text, or the chat that a text means."""
        context = self.serving.require().engine.plan.context
        return fields.as_completion(context) if fields.is_text else fields.as_chat(context)

    def reply(self, fields: GenerateBody, job: Job) -> OllamaReply:
        """The shapes of the answer."""
        return OllamaReply(GenerateShape(fields.model), job.readers[0], self.serving.texts)

    def delivery(self, fields: GenerateBody) -> Delivery:
        """By default the answer comes in lines."""
        return Delivery(stream=fields.streamed)


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
