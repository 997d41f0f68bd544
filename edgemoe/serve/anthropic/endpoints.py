"""Anthropic's endpoints: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse

from edgemoe.serve.anthropic.fields import CountFields, MessagesFields
from edgemoe.serve.anthropic.reply import MessageReply
from edgemoe.serve.errors import INVALID, ApiError
from edgemoe.serve.job import Job
from edgemoe.serve.protocol.base import Endpoint, Exchange, Protocol
from edgemoe.serve.protocol.reply import Shape
from edgemoe.serve.protocol.sending import Delivery
from edgemoe.serve.request.chat import ChatRequest
from edgemoe.serve.serving import Serving

MESSAGES = "/v1/messages"

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Status -> Anthropic's type of an error, where it is neither of the request nor of the server in general."""


class Messages(Exchange[MessagesFields]):
    """POST /v1/messages: a message."""

    path, fields = MESSAGES, MessagesFields

    def request(self, fields: MessagesFields, serving: Serving) -> ChatRequest:
        """The chat that the conversation means."""
        return fields.as_chat()

    def reply(self, fields: MessagesFields, serving: Serving, job: Job) -> MessageReply:
        """The shapes of the message."""
        return MessageReply(fields.model, len(job.prompts[0]), job.readers[0])

    def delivery(self, fields: MessagesFields) -> Delivery:
        """By default the message is one object."""
        return Delivery(stream=bool(fields.stream))


class AnthropicProtocol(Protocol):
    """Anthropic's messages."""

    prefix = MESSAGES

    def exchanges(self) -> list[Messages]:
        """The one endpoint of messages."""
        return [Messages()]

    def lookups(self) -> dict[tuple[str, str], Endpoint]:
        """The tokens of a prompt."""
        return {("POST", f"{MESSAGES}/count_tokens"): self._count}

    def error_body(self, error: ApiError) -> Shape:
        """Anthropic's object of an error, whose type is the status's."""
        kind = _KINDS.get(error.status, INVALID if error.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(error)}}

    async def _count(self, request: Request) -> JSONResponse:
        def count(fields: CountFields, serving: Serving) -> int:
            (prompt,) = serving.prompts_of(fields.as_chat())()
            return len(prompt.tokens)

        return JSONResponse({"input_tokens": await self.tokenized(request, CountFields, count)})
