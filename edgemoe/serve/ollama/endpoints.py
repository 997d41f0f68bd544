"""Ollama's endpoints: /api/chat and /api/generate, and the descriptions of models."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgemoe.serve.errors import ApiError
from edgemoe.serve.job import Job
from edgemoe.serve.ollama.fields import ChatBody, GenerateBody, ShowBody
from edgemoe.serve.ollama.keep_alive import keep_alive_seconds
from edgemoe.serve.ollama.models import described, listed, loaded
from edgemoe.serve.ollama.reply import ChatShape, GenerateShape, OllamaReply
from edgemoe.serve.protocol.base import Endpoint, Exchange, Protocol
from edgemoe.serve.protocol.reply import Shape
from edgemoe.serve.protocol.sending import Delivery
from edgemoe.serve.request.chat import ChatRequest
from edgemoe.serve.request.completion import CompletionRequest
from edgemoe.serve.serving import Serving

VERSION = "0.12.11"
"""The version of ollama's interface that is spoken here: clients compare it with the one that they need."""


class Chat(Exchange[ChatBody]):
    """POST /api/chat: an answer to messages."""

    path, fields = "/api/chat", ChatBody

    def keep_seconds(self, fields: ChatBody) -> float | None:
        """The time of `keep_alive`."""
        return keep_alive_seconds(fields.keep_alive)

    def without_prompt(self, fields: ChatBody) -> Shape | None:
        """A body without messages loads or unloads the model."""
        unloads = self.keep_seconds(fields) == 0
        return None if fields.messages else ChatShape(fields.model).loaded(unloads=unloads)

    def request(self, fields: ChatBody, serving: Serving) -> ChatRequest:
        """The chat that the messages mean."""
        return fields.as_chat(serving.require().engine.plan.context)

    def reply(self, fields: ChatBody, serving: Serving, job: Job) -> OllamaReply:
        """The shapes of the answer."""
        return OllamaReply(ChatShape(fields.model), job.readers[0], serving.texts)

    def delivery(self, fields: ChatBody) -> Delivery:
        """By default the answer comes in lines."""
        return Delivery(stream=fields.streamed)


class Generate(Exchange[GenerateBody]):
    """POST /api/generate: an answer to a text, or its continuation."""

    path, fields, prompt_field = "/api/generate", GenerateBody, "prompt"

    def keep_seconds(self, fields: GenerateBody) -> float | None:
        """The time of `keep_alive`."""
        return keep_alive_seconds(fields.keep_alive)

    def without_prompt(self, fields: GenerateBody) -> Shape | None:
        """A body without a prompt loads or unloads the model."""
        fields.require_supported()
        unloads = self.keep_seconds(fields) == 0
        return None if fields.prompt else GenerateShape(fields.model).loaded(unloads=unloads)

    def request(self, fields: GenerateBody, serving: Serving) -> ChatRequest | CompletionRequest:
        """The completion of a raw text, or the chat that a text means."""
        context = serving.require().engine.plan.context
        return fields.as_completion(context) if fields.is_text else fields.as_chat(context)

    def reply(self, fields: GenerateBody, serving: Serving, job: Job) -> OllamaReply:
        """The shapes of the answer."""
        return OllamaReply(GenerateShape(fields.model), job.readers[0], serving.texts)

    def delivery(self, fields: GenerateBody) -> Delivery:
        """By default the answer comes in lines."""
        return Delivery(stream=fields.streamed)


class OllamaProtocol(Protocol):
    """Ollama's interface."""

    prefix = "/api/"

    def exchanges(self) -> list[Exchange[ChatBody] | Exchange[GenerateBody]]:
        """Chats and texts."""
        return [Chat(), Generate()]

    def lookups(self) -> dict[tuple[str, str], Endpoint]:
        """The models, and the version."""
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
        fields, models = await self.body_of(request, ShowBody), self.models
        slot = models.named(fields.model or fields.name or "")
        return JSONResponse(await models.intake.parsing.run(described, slot.serving))

    async def _tags(self, request: Request) -> Response:
        models = self.models
        return JSONResponse({"models": await models.intake.parsing.run(listed, models.slots)})

    async def _ps(self, request: Request) -> Response:
        models = self.models
        times = [(slot, models.remaining(slot)) for slot in models.slots if slot.state == "loaded"]
        return JSONResponse({"models": await models.intake.parsing.run(loaded, times)})

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": VERSION})
