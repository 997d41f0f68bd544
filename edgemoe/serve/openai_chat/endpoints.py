"""OpenAI's endpoints: chats, completions and models; and the tokenizer's, as vLLM and llama.cpp have them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgemoe.serve.errors import ApiError
from edgemoe.serve.job import Job
from edgemoe.serve.model_object import model_list, model_object
from edgemoe.serve.openai_chat.chat_reply import ChatReply
from edgemoe.serve.openai_chat.completion_reply import CompletionReply, Shown
from edgemoe.serve.openai_chat.fields import ChatFields, CompletionFields, DetokenizeFields, TokenizeFields
from edgemoe.serve.protocol.base import Endpoint, Exchange, Protocol
from edgemoe.serve.protocol.reply import Shape
from edgemoe.serve.protocol.sending import Delivery
from edgemoe.serve.request.chat import as_messages
from edgemoe.serve.serving import Serving

_TOKENIZER = ("eos_token", "bos_token", "pad_token", "unk_token", "chat_template", "model_max_length")
"""Attributes of a tokenizer that clients read."""


class Chats(Exchange[ChatFields]):
    """POST /v1/chat/completions: an answer to messages."""

    path, fields = "/v1/chat/completions", ChatFields

    def request(self, fields: ChatFields, serving: Serving) -> ChatFields:
        """The body is the request."""
        return fields

    def reply(self, fields: ChatFields, serving: Serving, job: Job) -> ChatReply:
        """The shapes of the answers."""
        return ChatReply(serving.name, job.prompts, serving.texts, job.readers)

    def delivery(self, fields: ChatFields) -> Delivery:
        """By default the answers are one object."""
        return fields.delivery()


class Completions(Exchange[CompletionFields]):
    """POST /v1/completions: the continuation of texts."""

    path, fields, prompt_field = "/v1/completions", CompletionFields, "prompt"

    def request(self, fields: CompletionFields, serving: Serving) -> CompletionFields:
        """The body is the request."""
        return fields

    def reply(self, fields: CompletionFields, serving: Serving, job: Job) -> CompletionReply:
        """The shapes of the answers, with the texts of their prompts where these are echoed."""
        echo = None
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
        return [Chats(), Completions()]

    def lookups(self) -> dict[tuple[str, str], Endpoint]:
        """The models, and their tokenizers."""
        return {
            ("GET", "/v1/models"): self._models,
            ("GET", "/v1/models/{name:path}"): self._one_model,
            ("GET", "/tokenizer_info"): self._tokenizer_info,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
        }

    async def _models(self, request: Request) -> Response:
        return JSONResponse(model_list(self.models.slots))

    async def _one_model(self, request: Request) -> Response:
        return JSONResponse(model_object(self.models.named(request.path_params["name"])))

    async def _tokenize(self, request: Request) -> Response:
        """The token ids of a text, or of messages in the chat template."""
        return JSONResponse(await self.tokenized(request, TokenizeFields, _tokenized))

    async def _detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        text = await self.tokenized(
            request, DetokenizeFields, lambda fields, serving: serving.decode(fields.tokens)
        )
        return JSONResponse({"prompt": text, "content": text})

    async def _tokenizer_info(self, request: Request) -> Response:
        """Special tokens and the chat template, of the model that the query names."""
        models = self.models
        hold = await models.hold(request, models.of_request(request.query_params.get("model")))
        try:
            tokenizer = hold.serving.require().tokenizer
            known = {name: getattr(tokenizer, name, None) for name in _TOKENIZER}
        finally:
            hold.release()
        return JSONResponse({"tokenizer_class": type(tokenizer).__name__} | known)


def _tokenized(fields: TokenizeFields, serving: Serving) -> Shape:
    """The tokens of a body, with their number and the context of the model."""
    if fields.messages is not None:
        messages, template = as_messages(fields.messages), fields.chat_template_kwargs or {}
        template |= {"tools": [tool.as_tool() for tool in fields.tools]} if fields.tools else {}
        tokens = serving.tokens_of_chat(messages, template)
    else:
        text = fields.content if fields.prompt is None else fields.prompt
        if text is None:
            raise ApiError(400, "expected a text in prompt or content, got none", param="prompt")
        tokens = serving.tokens_of(text, special=fields.add_special_tokens is not False)
    context = serving.require().engine.plan.context
    return {"tokens": tokens, "count": len(tokens), "max_model_len": context}
