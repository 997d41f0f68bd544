"""The state of a server: the model once it is open, its name, the requests under way, and figures."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from starlette.requests import ClientDisconnect, Request

from edgemoe.errors import EdgemoeError
from edgemoe.machine.process import resident_bytes, return_free_memory
from edgemoe.serve.bodies import Bodies
from edgemoe.serve.compiling import Compiling
from edgemoe.serve.errors import UNAVAILABLE, ApiError
from edgemoe.serve.job import Job, Queue, Wanted
from edgemoe.serve.limits import Limits
from edgemoe.serve.metrics import Metrics
from edgemoe.serve.request.chat import ChatRequest, as_messages
from edgemoe.serve.request.completion import CompletionRequest
from edgemoe.serve.text_limit import TextLimit
from edgemoe.serve.workers import Workers
from edgemoe.storage.files.untrusted import foreign_code

if TYPE_CHECKING:
    from edgemoe.api.answer_reader import AnswerReader
    from edgemoe.api.chat_prompt import ChatPrompt, ChatPrompts
    from edgemoe.api.choices import Choices
    from edgemoe.api.model import Model
    from edgemoe.api.template import Message
    from edgemoe.engine.generate import Answer
    from edgemoe.serve.request.sampling import SamplingRequest

_log = logging.getLogger("edgemoe.serve")

KEPT_BYTES = 32 << 20
"""Growth of the process by a prompt's text from which freed memory goes back to the system."""

Found = TypeVar("Found")


class Serving:
    """One served model. For the event loop's thread.

    Args:
        name: the model's, as clients see it.
        limit: requests at once, waiting ones included.
        limits: times and sizes of one request; None: the defaults.

    Attributes:
        model: None before it is open.
        text_limit: bound on a prompt's characters.
        bodies: bodies that are read or used.
        parsing: threads that read bodies.
        preparing: threads that make prompts.
        answered: called after every answer.
    """

    def __init__(self, name: str, *, limit: int, limits: Limits | None = None) -> None:
        self.name, self.limits, self.queue = name, limits or Limits(), Queue(limit)
        self.created, self.metrics = int(time.time()), Metrics(name, self.queue)
        self.tokenizing, self.bodies = Queue(limit), Bodies()
        self.parsing, self.preparing = Workers(2, "bodies"), Workers(2, "prompts")
        self.compiling = Compiling()
        self.model: Model | None = None
        self.answered: Callable[[], None] = lambda: None
        self.prompt_tokens = self.new_tokens = 0
        """Tokens of all answers so far."""

    def open(self, model: Model) -> None:
        """Begins to serve."""
        model.engine.peak.bound(lambda: model.engine.memory.most_bytes)
        self.metrics.watch(model)
        from edgemoe.api.chat_prompt import ChatPrompts
        from edgemoe.engine.token_texts import TokenTexts

        self.chats: ChatPrompts = ChatPrompts(model)
        self.texts = TokenTexts(model.tokenizer)
        self.text_limit = TextLimit(model.tokenizer, model.engine.plan.context)
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

    def prompts_of(self, task: ChatRequest | CompletionRequest) -> Callable[[], list[ChatPrompt]]:
        """Checks a request; returns what makes its prompts, which takes a while.

        Raises:
            ApiError: fields contradict each other, or the model is not open yet.
            UserError, ModelRefused: as ChatPrompts.make; by what is returned.
        """
        task.require_supported()
        if isinstance(task, CompletionRequest):
            return partial(self._continued, task.prompts(), task.suffix)
        messages, form = as_messages(task.messages), task.answer_form()
        self.require()
        template, tools = task.template(self.limits.thinking_budget), task.tool_use()
        self.text_limit.require_chat(messages, template)
        return lambda: [self.chats.make(messages, template, tools, form)]

    def _continued(self, texts: Sequence[str | list[int]], suffix: str | None) -> list[ChatPrompt]:
        """Prompts that are continued as they are, or up to a suffix."""
        from edgemoe.api.chat_prompt import ChatPrompt
        from edgemoe.api.infill import infill_prompt

        model = self.require()
        for each in texts:
            self.text_limit.require(each, suffix)
            if not isinstance(each, str):
                _require_known(each, model.engine.shape.vocab, "prompt")
        if not suffix:
            return [ChatPrompt(model.encode(each)) for each in texts]
        return [ChatPrompt(infill_prompt(model.tokenizer, each, suffix)) for each in texts]

    async def start(self, request: Request, task: ChatRequest | CompletionRequest, prompt_field: str) -> Job:
        """Submits each prompt of a request with each of its choices; clients' requests begin in turn.

        Args:
            request: the client's request.
            task: the chat or completion that it contains.
            prompt_field: the field that the prompts are in, for errors of them.

        Raises:
            ApiError: the queue is full, the model is not open yet, or a field, a prompt or a form is wrong.
            ClientDisconnect: the client has left meanwhile.
        """
        try:
            prompts = await self.parsing.run(self.prompts_of, task)
        except EdgemoeError as error:
            raise _known(error, prompt_field) from error
        client, model = client_of(request), self.require()
        self.queue.enter(client)
        try:
            forms = [
                (prompt, await self._form(request, prompt, task.form_field))
                for prompt in await self.preparing.run(self._made, prompts)
            ]
            answers = await self.preparing.run(self._answers, forms, task)
            if await request.is_disconnected():
                raise ClientDisconnect
            job = Job(model, answers, task.kind, client, self._ended)
        except BaseException as error:
            self.queue.leave(client)
            raise _known(error, prompt_field) from error
        self.queue.add(job)
        try:
            await job.submit()
        except BaseException as error:
            raise _known(error, prompt_field) from error
        return job

    def _answers(self, forms: Sequence[tuple[ChatPrompt, Choices]], task: SamplingRequest) -> list[Wanted]:
        """Each choice's answer to each prompt, whose form it has."""
        choices, default = task.choices(), self.limits.thinking_budget
        return [
            self._wanted(prompt, task.with_budget(prompt.reasoning, form, choice, default))
            for prompt, form in forms
            for choice in choices
        ]

    def _wanted(self, prompt: ChatPrompt, choice: Choices) -> Wanted:
        """One answer to a prompt, all of which its reader reads."""
        reader = prompt.reader() if prompt.reader else None
        return Wanted(prompt.tokens, choice, reader, partial(self._keep, reader))

    def _keep(self, reader: AnswerReader | None, answer: Answer) -> None:
        """Keeps an answer that has ended by itself, so that later turns have its tokens."""
        if reader and answer.finish_reason == "stop" and answer.stop_string is None:
            self.chats.replays.add(answer.tokens, reader)

    async def _form(self, request: Request, prompt: ChatPrompt, field: str) -> Choices:
        """The choices that a prompt brings: its answers' form, and what is left of the context.

        Raises:
            ApiError: the form, which is in `field`, cannot be enforced.
            ClientDisconnect: the client has left meanwhile.
        """
        model = self.require()
        given: Choices = {"max_new_tokens": max(model.engine.plan.context - len(prompt.tokens), 1)}
        if prompt.reader:
            given["special_tokens"] = True
        if prompt.grammar:
            given["schema"] = await self.compiling.run(
                request, prompt.grammar, self.limits.compile_seconds, field
            )
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
        progress = [future.progress for future in job.futures]
        _log.info(
            "%s: %s: %d prompt + %d new tokens in %.2f s, %s",
            job.client or "unknown client",
            job.kind,
            sum(each.prompt_tokens for each in progress),
            sum(each.new_tokens for each in progress),
            time.monotonic() - job.start,
            end,
        )

    async def tokenized(self, request: Request, work: Callable[[bytes], Found]) -> Found:
        """Calls what makes tokens or text of a request's body, once it is the request's turn.

        Raises:
            ApiError: too many such requests wait, or by `work`.
        """
        client = client_of(request)
        async with self.bodies.reading(request, self.limits) as body:
            self.tokenizing.enter(client)
            try:
                return await self.preparing.run(self._made, partial(work, body))
            finally:
                self.tokenizing.leave(client)

    def _made(self, work: Callable[[], Found]) -> Found:
        """Calls what tokenizes a text; the memory of long texts goes back to the system."""
        before = resident_bytes()
        try:
            return work()
        finally:
            if resident_bytes() - before > KEPT_BYTES:
                return_free_memory()

    def tokens_of(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of a text alone, by default without special tokens around it.

        Raises:
            ContextExceeded: it has more characters than a prompt can have.
        """
        tokenizer = self.require().tokenizer
        self.text_limit.require(text)
        with foreign_code("a tokenizer that encodes text"):
            encoded = tokenizer(text, add_special_tokens=special, verbose=False)
        return list(encoded["input_ids"])

    def tokens_of_chat(self, messages: Sequence[Message], template: Mapping[str, object]) -> list[int]:
        """Token ids of messages in the chat template, whose further variables are `template`.

        Raises:
            ContextExceeded: they have more characters than a prompt can have.
            UserError, ModelRefused: the template refuses them, or is broken.
        """
        from edgemoe.api.prompt import encoded

        tokenizer = self.require().tokenizer
        self.text_limit.require_chat(messages, template)
        return encoded(tokenizer, messages, template)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids.

        Raises:
            ApiError: an id that the model does not have, or more ids than the context holds.
        """
        model = self.require()
        if len(tokens) > model.engine.plan.context:
            message = f"expected at most {model.engine.plan.context} token ids, got {len(tokens)}: send fewer"
            raise ApiError(400, message, param="tokens")
        _require_known(tokens, model.engine.shape.vocab, "tokens")
        with foreign_code("a tokenizer that decodes the model's tokens"):
            return str(model.tokenizer.decode(list(tokens), skip_special_tokens=False))


def _require_known(tokens: Sequence[int], vocab: int, param: str) -> None:
    """Raises ApiError, naming the field, where a token id is none of the model's."""
    wrong = next((token for token in tokens if not 0 <= token < vocab), None)
    if wrong is not None:
        message = f"expected token ids of 0 to {vocab - 1}, got {wrong}: leave it out"
        raise ApiError(400, message, param=param)


def _known(error: BaseException, param: str) -> BaseException:
    return ApiError.of(error, param) if isinstance(error, EdgemoeError) else error


def client_of(request: Request) -> str:
    """Names the client of a request by its address: all of them have the same key."""
    return request.client.host if request.client else ""
