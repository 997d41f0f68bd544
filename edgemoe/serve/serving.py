"""One model of a server: its name, the open model, the requests under way, and figures."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from starlette.requests import ClientDisconnect, Request

from edgemoe.errors import EdgemoeError
from edgemoe.serve.errors import ApiError, not_loaded
from edgemoe.serve.intake import Intake, client_of
from edgemoe.serve.job import Job, Queue, Wanted
from edgemoe.serve.metrics import Metrics
from edgemoe.serve.request.chat import ChatRequest, as_messages
from edgemoe.serve.request.completion import CompletionRequest
from edgemoe.serve.text_limit import TextLimit, require_known
from edgemoe.storage.files.untrusted import foreign_code

if TYPE_CHECKING:
    from edgemoe.api.answer_reader import AnswerReader
    from edgemoe.api.chat_prompt import ChatPrompt, ChatPrompts
    from edgemoe.api.choices import Choices
    from edgemoe.api.model import Model
    from edgemoe.api.replay import Replays
    from edgemoe.api.template import Message
    from edgemoe.engine.generate import Answer
    from edgemoe.models.store_model import StoreModel
    from edgemoe.serve.request.sampling import SamplingRequest

_log = logging.getLogger("edgemoe.serve")

Result = TypeVar("Result")


class About(NamedTuple):
    """The files of a model, and its context in tokens, which are known without its weights."""

    store: StoreModel
    context: int


class Serving:
    """One served model. For the event loop's thread.

    Args:
        name: the name that clients see.
        limit: requests at once, waiting ones included.
        intake: state that all models of the server share; None: one for this model alone.
        metrics: figures of all models of the server; None: figures of this model alone.
        answered: called after every answer.

    Attributes:
        model: None while it is not open.
        about: known once the model was opened or checked; None before.
        queue: requests that wait for an answer, or get one.
        tokenizing: requests that wait for tokens or text.
        text_limit: bound on a prompt's characters.
    """

    def __init__(
        self,
        name: str,
        *,
        limit: int,
        intake: Intake | None = None,
        metrics: Metrics | None = None,
        answered: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.intake, self.metrics = name, intake or Intake(), metrics or Metrics()
        self.queue, self.tokenizing, self._answered = Queue(limit), Queue(limit), answered
        self.created = int(time.time())
        self.model: Model | None = None
        self.about: About | None = None
        self._replays: Replays | None = None
        self.prompt_tokens = self.new_tokens = 0  # of all answers

    def open(self, model: Model) -> None:
        """Begins to serve; answers with calls that an earlier opening gave are remembered."""
        model.engine.peak.bound(lambda: model.engine.memory.most_bytes)
        from edgemoe.api.chat_prompt import ChatPrompts
        from edgemoe.engine.token_texts import TokenTexts

        self.chats: ChatPrompts = ChatPrompts(model, self._replays)
        self._replays = self.chats.replays
        self.texts = TokenTexts(model.tokenizer)
        self.about = About(model.engine.store, model.engine.plan.context)
        self.text_limit = TextLimit(model.tokenizer, self.about.context)
        self.model = model
        self.metrics.watch(self.name, model)

    def close(self) -> Model | None:
        """Ends serving until the model is opened again, and returns it; no request may be under way."""
        model, self.model = self.model, None
        if model:
            self.metrics.watch(self.name, None)
            del self.chats, self.texts
        return model

    def require(self) -> Model:
        """Returns the model.

        Raises:
            ApiError: it is not open yet.
        """
        if self.model is None:
            raise not_loaded()
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
        template, tools = task.template(self.intake.limits.thinking_budget), task.tool_use()
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
                require_known(each, model.engine.shape.vocab, "prompt")
        if not suffix:
            return [ChatPrompt(model.encode(each)) for each in texts]
        return [ChatPrompt(infill_prompt(model.tokenizer, each, suffix)) for each in texts]

    async def start(
        self, request: Request, task: ChatRequest | CompletionRequest, field: str, on_end: Callable[[], None]
    ) -> Job:
        """Submits each prompt of a request with each of its choices; clients' requests begin in turn.

        Args:
            request: the client's request, which contains `task`.
            field: the field that the prompts are in, for errors of them.
            on_end: called when the job is left.

        Raises:
            ApiError: the queue is full, pictures have too many bytes, or a field, a prompt or a form is wrong.
            ClientDisconnect: the client has left meanwhile.
        """
        try:
            prompts = await self.intake.parsing.run(self.prompts_of, task)
        except EdgemoeError as error:
            raise _known(error, field) from error
        client, model, pictures, counted = client_of(request), self.require(), self.intake.pictures, 0
        self.queue.enter(client)
        try:
            forms = [
                (prompt, await self._form(request, prompt, task.form_field))
                for prompt in await self.intake.prepared(prompts)
            ]
            counted = pictures.add(sum(each.picture_bytes for each, _ in forms), self.intake.limits)
            answers = await self.intake.preparing.run(self._answers, forms, task)
            if await request.is_disconnected():
                raise ClientDisconnect
            job = Job(model, answers, task.kind, client, partial(self._ended, on_end, counted))
        except BaseException as error:
            pictures.remove(counted)
            self.queue.leave(client)
            raise _known(error, field) from error
        self.queue.add(job)
        try:
            await job.submit()
        except BaseException as error:
            raise _known(error, field) from error
        return job

    def _answers(self, forms: Sequence[tuple[ChatPrompt, Choices]], task: SamplingRequest) -> list[Wanted]:
        """Each choice's answer to each prompt, whose form it has."""
        choices, default = task.choices(), self.intake.limits.thinking_budget
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
            seconds = self.intake.limits.compile_seconds
            given["schema"] = await self.intake.compiling.run(request, prompt.grammar, seconds, field)
        return given

    def _ended(self, on_end: Callable[[], None], picture_bytes: int, job: Job) -> None:
        self.queue.remove(job)
        self.intake.pictures.remove(picture_bytes)
        on_end()
        answers = [answer for answer in job.answers if answer]
        for answer in answers:
            self.prompt_tokens += answer.prompt_tokens
            self.new_tokens += answer.new_tokens
            self.metrics.answered(self.name, answer)
            self._answered()
        if len(answers) < len(job.answers):
            self.metrics.failed(self.name, job.error.status if job.error else 499)  # 499: the client left
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

    async def tokenized(self, request: Request, work: Callable[[], Result]) -> Result:
        """Calls what makes tokens or text, once it is the request's turn.

        Raises:
            ApiError: too many such requests wait, or by `work`.
        """
        client = client_of(request)
        self.tokenizing.enter(client)
        try:
            return await self.intake.prepared(work)
        finally:
            self.tokenizing.leave(client)

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
        model = self.require()
        self.text_limit.require_chat(messages, template)
        return model.prompts.encode(messages, template)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids.

        Raises:
            ApiError: an id that the model does not have, or more ids than the context holds.
        """
        model = self.require()
        if len(tokens) > model.engine.plan.context:
            message = f"expected at most {model.engine.plan.context} token ids, got {len(tokens)}: send fewer"
            raise ApiError(400, message, param="tokens")
        require_known(tokens, model.engine.shape.vocab, "tokens")
        with foreign_code("a tokenizer that decodes the model's tokens"):
            return str(model.tokenizer.decode(list(tokens), skip_special_tokens=False))


def _known(error: BaseException, param: str) -> BaseException:
    return ApiError.of(error, param) if isinstance(error, EdgemoeError) else error
