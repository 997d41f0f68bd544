"""The endpoints of the server."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from edgemoe.serve.chat_fields import ChatFields, TokenizeFields, as_messages
from edgemoe.serve.errors import HANDLERS, ApiError
from edgemoe.serve.fields import CompletionFields, DetokenizeFields, parse
from edgemoe.serve.guard import Access, Guard
from edgemoe.serve.job import Job
from edgemoe.serve.metrics import CONTENT_TYPE
from edgemoe.serve.page import page, state
from edgemoe.serve.protocols.base import Reply
from edgemoe.serve.protocols.messages import message_endpoints
from edgemoe.serve.protocols.ollama import ollama_endpoints
from edgemoe.serve.protocols.openai_responses import response_endpoints
from edgemoe.serve.protocols.refused import METHODS, refused_endpoints
from edgemoe.serve.replies import ChatReply, CompletionReply, Shown
from edgemoe.serve.responses import StreamResponse, WholeResponse
from edgemoe.serve.serving import Serving, body_of, model_object

_TOKENIZER = ("eos_token", "bos_token", "pad_token", "unk_token", "chat_template", "model_max_length")
"""What clients read of a tokenizer."""


def make_app(serving: Serving, access: Access) -> ASGIApp:
    """Makes the ASGI application of a server.

    Args:
        serving: what it serves; the model may come later.
        access: who may send requests.
    """
    ours = Endpoints(serving)
    get = {
        "/": ours.page,
        "/status": ours.status,
        "/health": ours.health,
        "/metrics": ours.metrics,
        "/v1/models": ours.models,
        "/v1/models/{name:path}": ours.one_model,
        "/tokenizer_info": ours.tokenizer_info,
    }
    post = {
        "/v1/chat/completions": ours.chat,
        "/v1/completions": ours.complete,
        "/tokenize": ours.tokenize,
        "/detokenize": ours.detokenize,
    }
    ollama_get, ollama_post = ollama_endpoints(serving)
    post |= message_endpoints(serving) | response_endpoints(serving) | ollama_post
    routes = [Route(path, endpoint, methods=["GET"]) for path, endpoint in (get | ollama_get).items()]
    routes += [Route(path, endpoint, methods=["POST"]) for path, endpoint in post.items()]
    routes += [Route(path, endpoint, methods=METHODS) for path, endpoint in refused_endpoints().items()]
    left = {ClientDisconnect: lambda request, error: Response(status_code=400)}
    return Guard(Starlette(routes=routes, exception_handlers=HANDLERS | left), access)


class Endpoints:
    """The endpoints of one served model."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def page(self, request: Request) -> Response:
        """GET /: the status page."""
        raw, headers = page()
        return Response(raw, media_type="text/html", headers=headers)

    async def status(self, request: Request) -> Response:
        """GET /status: what the page shows."""
        return JSONResponse(state(self._serving))

    async def health(self, request: Request) -> Response:
        """GET /health: 200 once the model is open."""
        self._serving.require()
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics: figures for Prometheus."""
        return Response(self._serving.metrics.text(), media_type=CONTENT_TYPE)

    async def models(self, request: Request) -> Response:
        """GET /v1/models: the one model."""
        return JSONResponse({"object": "list", "data": [model_object(self._serving)]})

    async def one_model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        name, ours = request.path_params["name"], self._serving.name
        if name != ours:
            message = f"expected the model {ours!r}, got {name[:200]!r}: see GET /v1/models"
            raise ApiError(404, message, param="model", code="model_not_found")
        return JSONResponse(model_object(self._serving))

    async def chat(self, request: Request) -> Response | StreamResponse | WholeResponse:
        """POST /v1/chat/completions."""
        fields, serving = parse(ChatFields, await body_of(request)), self._serving
        job = await serving.start_chat(request, fields)
        return self._respond(job, ChatReply(serving.name, job.prompts, serving.text_of, job.readers), fields)

    async def complete(self, request: Request) -> Response | StreamResponse | WholeResponse:
        """POST /v1/completions."""
        fields = parse(CompletionFields, await body_of(request))
        serving = self._serving
        job = await serving.start_completion(request, fields)
        echo = None
        if fields.echo:
            texts = [each if isinstance(each, str) else serving.decode(each) for each in fields.prompts()]
            echo = [text for text in texts for _ in range(fields.candidates)]
        shown = Shown(
            tokens=0 if fields.max_tokens == 0 else None,
            best=(fields.count, fields.candidates),
            logprobs=fields.logprobs is not None,
        )
        reply = CompletionReply(serving.name, job.prompts, serving.text_of, shown, echo=echo)
        return self._respond(job, reply, fields)

    def _respond(
        self, job: Job, reply: Reply, fields: ChatFields | CompletionFields
    ) -> StreamResponse | WholeResponse:
        limit = self._serving.limit
        if not fields.stream:
            return WholeResponse(job, reply, limit)
        progress = bool(fields.return_progress)
        return StreamResponse(job, reply, limit, usage=fields.usage_wanted, progress=progress)

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: a text's token ids, or those of messages in the chat template."""
        fields, model = parse(TokenizeFields, await body_of(request)), self._serving.require()
        if fields.messages is not None:
            messages, template = as_messages(fields.messages), fields.chat_template_kwargs or {}
            template |= {"tools": [tool.as_tool() for tool in fields.tools]} if fields.tools else {}
            tokens = await asyncio.to_thread(model.encode, messages, **template)
        else:
            text = fields.content if fields.prompt is None else fields.prompt
            if text is None:
                raise ApiError(400, "expected a text in prompt or content, got none", param="prompt")
            special = fields.add_special_tokens is not False
            tokens = await asyncio.to_thread(model.encode if special else self._serving.tokens_of, text)
        found: dict[str, Any] = {"tokens": tokens, "count": len(tokens)}
        return JSONResponse(found | {"max_model_len": model.engine.plan.context})

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: the text of token ids."""
        fields = parse(DetokenizeFields, await body_of(request))
        text = await asyncio.to_thread(self._serving.decode, fields.tokens)
        return JSONResponse({"prompt": text, "content": text})

    async def tokenizer_info(self, request: Request) -> Response:
        """GET /tokenizer_info: special tokens and the chat template."""
        tokenizer = self._serving.require().tokenizer
        known = {name: getattr(tokenizer, name, None) for name in _TOKENIZER}
        return JSONResponse({"tokenizer_class": type(tokenizer).__name__} | known)
