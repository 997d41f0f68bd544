"""What a server has: the model once it is open, its name, the requests under way, and figures."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect, Request

from edgemoe.errors import EdgemoeError, UserError
from edgemoe.serve.chat_fields import ChatFields, as_messages
from edgemoe.serve.errors import UNAVAILABLE, ApiError
from edgemoe.serve.fields import CompletionFields
from edgemoe.serve.job import Job, Queue, Wanted
from edgemoe.serve.metrics import Metrics
from edgemoe.storage.files.untrusted import foreign_code

if TYPE_CHECKING:
    from edgemoe.api.answer_reader import AnswerReader
    from edgemoe.api.chat_prompt import ChatPrompt, ChatPrompts
    from edgemoe.api.model import Choices, Model
    from edgemoe.engine.generate import Answer

BODY_BYTES = 16 << 20
"""Most bytes of a request's body: some million tokens of text."""

BODY_SECONDS = 30.0
"""Time in which all of a body must have come."""

COMPILE_SECONDS = 60.0
"""Time in which an answer's grammar must be compiled; the first one of a model waits for its vocabulary."""

_CLOSE = {"connection": "close"}
"""Header of a response to a request whose body is not read to its end."""

_log = logging.getLogger("edgemoe.serve")


class Serving:
    """One model behind endpoints. For the event loop's thread.

    Args:
        name: of the model, as clients see it.
        most: requests at once, waiting ones included.
        limit: seconds of one request; None: no limit.

    Attributes:
        model: None before it is open.
        answered: called after every answer.
    """

    def __init__(self, name: str, *, most: int, limit: float | None = None) -> None:
        self.name, self.limit, self.queue = name, limit, Queue(most)
        self.created, self.metrics = int(time.time()), Metrics(name, self.queue)
        self.model: Model | None = None
        self.answered: Callable[[], None] = lambda: None
        self.prompt_tokens = self.new_tokens = 0
        """Of all answers so far."""

    def open(self, model: Model) -> None:
        """Begins to serve."""
        self.metrics.watch(model)
        from edgemoe.api.chat_prompt import ChatPrompts

        self.chats: ChatPrompts = ChatPrompts(model)
        self.text_of = lru_cache(1 << 16)(self._text_of)
        self.model = model

    def require(self) -> Model:
        """Returns the model.

        Raises:
            ApiError: it is not open yet.
        """
        if self.model is None:
            wait = {"retry-after": "5"}
            raise ApiError(503, "Loading model", kind=UNAVAILABLE, code=503, headers=wait)
        return self.model

    def chat_prompt(self, fields: ChatFields) -> Callable[[], ChatPrompt]:
        """Checks a chat; returns what makes its prompt, which takes a while.

        Raises:
            ApiError: fields contradict each other, or the model is not open yet.
            UserError, ModelRefused: as ChatPrompts.make; by what is returned.
        """
        fields.require_supported()
        messages, schema = as_messages(fields.messages), fields.answer_schema()
        self.require()
        return partial(self.chats.make, messages, fields.template(), fields.tool_use(), schema)

    async def start_chat(self, request: Request, fields: ChatFields, param: str = "messages") -> Job:
        """Submits a chat, whatever protocol it came in; `param` is its name of the conversation.

        Raises:
            as chat_prompt and start.
        """
        prompt, form = self.chat_prompt(fields), "response_format" if fields.tool_use() is None else "tools"
        return await self.start("chat", request, lambda model: [prompt()], fields.choices(), param, form)

    async def start_completion(self, request: Request, fields: CompletionFields) -> Job:
        """Submits the continuation of texts, or what stands between two.

        Raises:
            ApiError: fields contradict each other.
            as start.
        """
        fields.require_supported()
        prompts, suffix = fields.prompts(), fields.suffix

        def encode(model: Model) -> list[ChatPrompt]:
            from edgemoe.api.chat_prompt import ChatPrompt
            from edgemoe.api.infill import infill_prompt

            if not suffix:
                return [ChatPrompt(model.encode(each)) for each in prompts]
            return [ChatPrompt(infill_prompt(model.tokenizer, each, suffix)) for each in prompts]

        return await self.start("completion", request, encode, fields.choices(), "prompt")

    async def start(
        self,
        kind: str,
        request: Request,
        encode: Callable[[Model], Sequence[ChatPrompt]],
        choices: Sequence[Choices],
        param: str,
        form_param: str = "response_format",
    ) -> Job:
        """Submits each prompt with each of the choices; without a limit an answer may fill the context.

        Args:
            kind: of request, for the list of them.
            request: of a client; clients' requests begin in turn.
            encode: makes the prompts, on another thread.
            choices: of the answers to each prompt.
            param: the field that the prompts are in.
            form_param: the field that describes the answers' form.

        Raises:
            ApiError: the queue is full, or a prompt, a choice or a form is wrong.
            ClientDisconnect: the client has left meanwhile.
        """
        model, client = self.require(), client_of(request)
        self.queue.enter(client)
        try:
            prompts = await asyncio.to_thread(encode, model)
            wanted: list[Wanted] = []
            for prompt in prompts:
                given = await self._choices(model, prompt, form_param)
                for choice in choices:
                    both: Choices = {**given, **choice}
                    reader = prompt.reader() if prompt.reader else None
                    wanted.append(Wanted(list(prompt.tokens), both, reader, partial(self._keep, reader)))
            if await request.is_disconnected():
                raise ClientDisconnect
            job = Job(model, wanted, kind, client, self._ended)
        except BaseException as error:
            self.queue.leave(client)
            raise _known(error, param) from error
        self.queue.add(job)
        try:
            await job.submit()
        except BaseException as error:
            raise _known(error, param) from error
        return job

    def _keep(self, reader: AnswerReader | None, answer: Answer) -> None:
        """Keeps an answer that has ended by itself, so that later turns have its tokens."""
        if reader and answer.finish_reason == "stop" and answer.stop_string is None:
            self.chats.replays.add(answer.tokens, reader)

    async def _choices(self, model: Model, prompt: ChatPrompt, param: str) -> Choices:
        """The choices that a prompt brings: its answers' form, and what is left of the context.

        Raises:
            ApiError: the form cannot be enforced.
        """
        given: Choices = {"max_new_tokens": max(model.engine.plan.context - len(prompt.tokens), 1)}
        if prompt.reader:
            given["special_tokens"] = True
        if prompt.grammar:
            try:
                given["schema"] = await asyncio.wait_for(asyncio.to_thread(prompt.grammar), COMPILE_SECONDS)
            except TimeoutError:
                message = f"expected a schema that compiles within {COMPILE_SECONDS:g} s, got another"
                raise ApiError(400, f"{message}: send a smaller one", param=param) from None
            except UserError as error:
                raise ApiError(400, str(error), param=param) from error
        return given

    def _ended(self, job: Job) -> None:
        self.queue.remove(job)
        answers = [answer for answer in job.answers if answer]
        for answer in answers:
            self.prompt_tokens += answer.prompt_tokens
            self.new_tokens += answer.new_tokens
            self.metrics.answered(answer)
            self.answered()
        if len(answers) < len(job.answers):
            self.metrics.failed(job.error.status if job.error else 499)  # 499: the client left
        end = (
            str(job.error) if job.error else "answered" if len(answers) == len(job.answers) else "client left"
        )
        _log.info(
            "%s: %d + %d tokens in %.2f s, %s",
            job.kind,
            sum(answer.prompt_tokens for answer in answers),
            sum(answer.new_tokens for answer in answers),
            time.monotonic() - job.start,
            end,
        )

    def _text_of(self, token: int) -> str:
        with foreign_code("a tokenizer that decodes the model's tokens"):
            return str(self.require().tokenizer.decode([token], skip_special_tokens=False))

    def tokens_of(self, text: str) -> list[int]:
        """Token ids of a text alone, without special tokens around it."""
        with foreign_code("a tokenizer that encodes text"):
            encoded = self.require().tokenizer(text, add_special_tokens=False, verbose=False)
        return list(encoded["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids.

        Raises:
            ApiError: an id that the model does not have.
        """
        model = self.require()
        vocab = model.engine.shape.vocab
        wrong = next((token for token in tokens if not 0 <= token < vocab), None)
        if wrong is not None:
            raise ApiError(400, f"expected token ids of 0 to {vocab - 1}, got {wrong}", param="tokens")
        with foreign_code("a tokenizer that decodes the model's tokens"):
            return str(model.tokenizer.decode(list(tokens), skip_special_tokens=False))


def _known(error: BaseException, param: str) -> BaseException:
    return ApiError.of(error, param) if isinstance(error, EdgemoeError) else error


def client_of(request: Request) -> str:
    """Names the client of a request by its address: all of them have the same key."""
    return request.client.host if request.client else ""


async def body_of(request: Request) -> bytes:
    """Reads a request's body.

    Raises:
        ApiError: it is too long, or comes too slowly.
        ClientDisconnect: the client has left.
    """
    length, body = request.headers.get("content-length", "0"), bytearray()
    too_long = ApiError(413, f"expected a body of at most {BODY_BYTES} bytes, got more", headers=_CLOSE)
    if length.isdecimal() and int(length[:20]) > BODY_BYTES:
        raise too_long
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > BODY_BYTES:
                    raise too_long
    except TimeoutError:
        message = f"expected the whole body within {BODY_SECONDS:g} s, got a part of it"
        raise ApiError(408, message, headers=_CLOSE) from None
    return bytes(body)


def model_object(serving: Serving) -> dict[str, Any]:
    """The served model, as an entry of /v1/models."""
    entry = {"id": serving.name, "object": "model", "created": serving.created, "owned_by": "edgemoe"}
    if serving.model is None:
        return entry
    engine = serving.model.engine
    meta = {"n_ctx": engine.plan.context, "n_vocab": engine.shape.vocab}
    return entry | {"max_model_len": engine.plan.context, "meta": meta}
