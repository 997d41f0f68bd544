"""OpenAI's endpoints: chats, completions and models; and the tokenizer's, as vLLM and llama.cpp have them."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgemoe.serve.errors import ApiError
from edgemoe.serve.job import Job
from edgemoe.serve.openai_chat.chat_reply import ChatReply
from edgemoe.serve.openai_chat.completion_reply import CompletionReply, Shown
from edgemoe.serve.openai_chat.fields import ChatFields, CompletionFields, DetokenizeFields, TokenizeFields
from edgemoe.serve.protocol.base import Endpoint, Exchange, Protocol
from edgemoe.serve.protocol.reply import Shape
from edgemoe.serve.protocol.sending import Delivery
from edgemoe.serve.request.chat import as_messages
from edgemoe.serve.request.fields import parse
from edgemoe.serve.serving import Serving

_TOKENIZER = ("eos_token", "bos_token", "pad_token", "unk_token", "chat_template", "model_max_length")
"""Attributes of a tokenizer that clients read."""


class Chats(Exchange[ChatFields]):
    """POST /v1/chat/completions: an answer to messages."""

    path, fields = "/v1/chat/completions", ChatFields

    def request(self, fields: ChatFields) -> ChatFields:
        """The body is the request."""
        return fields

    def reply(self, fields: ChatFields, job: Job) -> ChatReply:
        """The shapes of the answers."""
        return ChatReply(self.serving.name, job.prompts, self.serving.texts, job.readers)

    def delivery(self, fields: ChatFields) -> Delivery:
        """By default the answers are one object."""
        return fields.delivery()


class Completions(Exchange[CompletionFields]):
    """POST /v1/completions: the continuation of texts."""

    path, fields, prompt_field = "/v1/completions", CompletionFields, "prompt"

    def request(self, fields: CompletionFields) -> CompletionFields:
        """The body is the request."""
        return fields

    def reply(self, fields: CompletionFields, job: Job) -> CompletionReply:
        """The shapes of the answers, with the texts of their prompts where these are echoed."""
        serving, echo = self.serving, None
        if fields.echo:
            texts = [each if isinstance(each, str) else serving.decode(each) for each in fields.prompts()]
            echo = [text for text in texts for _ in range(fields.candidates)]
        shown = Shown(
            tokens=0 if fields.max_tokens == 0 else None,
            best=(fields.count, fields.candidates),
            logprobs=fields.logprobs is not None,
        )
        return CompletionReply(serving.name, job.prompts, serving.texts, shown, echo=echo)

    def delivery(self, fields: CompletionFields) -> Delivery:
        """By default the answers are one object."""
        return fields.delivery()


class OpenAIProtocol(Protocol):
    """OpenAI's chats and completions. Every path that no other protocol has gets its error object."""

    def exchanges(self) -> list[Exchange[ChatFields] | Exchange[CompletionFields]]:
        """Chats and completions."""
        return [Chats(self.serving), Completions(self.serving)]

    def lookups(self) -> dict[tuple[str, str], Endpoint]:
        """The one model, and its tokenizer."""
        return {
            ("GET", "/v1/models"): self._models,
            ("GET", "/v1/models/{name:path}"): self._one_model,
            ("GET", "/tokenizer_info"): self._tokenizer_info,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
        }

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model_object(self.serving)]})

    async def _one_model(self, request: Request) -> Response:
        name, ours = request.path_params["name"], self.serving.name
        if name != ours:
            message = f"expected the model {ours!r}, got {name[:200]!r}: see GET /v1/models"
            raise ApiError(404, message, param="model", code="model_not_found")
        return JSONResponse(_model_object(self.serving))

    async def _tokenize(self, request: Request) -> Response:
        """The token ids of a text, or of messages in the chat template."""
        tokens = await self.serving.tokenized(request, self._tokens)
        found: dict[str, Any] = {"tokens": tokens, "count": len(tokens)}
        return JSONResponse(found | {"max_model_len": self.serving.require().engine.plan.context})

    def _tokens(self, body: bytes) -> list[int]:
        fields, serving = parse(TokenizeFields, body), self.serving
        if fields.messages is not None:
            messages, template = as_messages(fields.messages), fields.chat_template_kwargs or {}
            template |= {"tools": [tool.as_tool() for tool in fields.tools]} if fields.tools else {}
            return serving.tokens_of_chat(messages, template)
        text = fields.content if fields.prompt is None else fields.prompt
        if text is None:
            raise ApiError(400, "expected a text in prompt or content, got none", param="prompt")
        return serving.tokens_of(text, special=fields.add_special_tokens is not False)

    async def _detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        text = await self.serving.tokenized(
            request, lambda body: self.serving.decode(parse(DetokenizeFields, body).tokens)
        )
        return JSONResponse({"prompt": text, "content": text})

    async def _tokenizer_info(self, request: Request) -> Response:
        """Special tokens and the chat template."""
        tokenizer = self.serving.require().tokenizer
        known = {name: getattr(tokenizer, name, None) for name in _TOKENIZER}
        return JSONResponse({"tokenizer_class": type(tokenizer).__name__} | known)


def _model_object(serving: Serving) -> Shape:
    """The served model, as an entry of /v1/models."""
    entry = {"id": serving.name, "object": "model", "created": serving.created, "owned_by": "edgemoe"}
    if serving.model is None:
        return entry
    engine = serving.model.engine
    meta = {"n_ctx": engine.plan.context, "n_vocab": engine.shape.vocab}
    return entry | {"max_model_len": engine.plan.context, "meta": meta}
