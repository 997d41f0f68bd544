"""OpenAI's /v1/responses."""

from __future__ import annotations

from edgemoe.serve.job import Job
from edgemoe.serve.openai_responses.fields import ResponsesFields
from edgemoe.serve.openai_responses.items import INPUT
from edgemoe.serve.openai_responses.reply import ResponseReply
from edgemoe.serve.protocol.base import Exchange, Protocol
from edgemoe.serve.protocol.sending import Delivery
from edgemoe.serve.request.chat import ChatRequest
from edgemoe.serve.serving import Serving


class Responses(Exchange[ResponsesFields]):
    """POST /v1/responses: a response."""

    path, fields, prompt_field = "/v1/responses", ResponsesFields, INPUT

    def request(self, fields: ResponsesFields, serving: Serving) -> ChatRequest:
        """The chat that the items mean."""
        return fields.as_chat()

    def reply(self, fields: ResponsesFields, serving: Serving, job: Job) -> ResponseReply:
        """The shapes of the response."""
        return ResponseReply(
            fields.echo(), job.readers[0], lambda text: len(serving.tokens_of(text)), fields.namespaces()
        )

    def delivery(self, fields: ResponsesFields) -> Delivery:
        """By default the response is one object."""
        return Delivery(stream=bool(fields.stream))


class ResponsesProtocol(Protocol):
    """OpenAI's responses."""

    prefix = Responses.path

    def exchanges(self) -> list[Responses]:
        """The one endpoint of responses."""
        return [Responses()]
