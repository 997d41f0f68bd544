"""An open model: prompts to answers, alone, streamed or several at once, and scores of texts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypedDict, Unpack

from edgemoe.api.status import Progress, Status
from edgemoe.api.template import Message, encode_chat
from edgemoe.engine.engine import Engine
from edgemoe.engine.generate import Answer, Generation
from edgemoe.engine.pace import Pace
from edgemoe.engine.request import CANCELLED, Request
from edgemoe.engine.sampling import PromptScores, Sampler, Sampling, TokenLogprobs
from edgemoe.engine.scheduler import Scheduler
from edgemoe.errors import UserError
from edgemoe.grammar.lark import json_answer
from edgemoe.grammar.matcher import Grammar, Matcher, Vocabulary
from edgemoe.kv.prefix_cache import PrefixCache
from edgemoe.storage.files.untrusted import foreign_code

Prompt = str | Sequence[Message] | Sequence[int]
"""Text that is continued as it is; messages {"role": ..., "content": ...}, put into the chat template; or token ids."""


class Choices(TypedDict, total=False):
    """How an answer's tokens are chosen and when it ends. What is left out is the model's own setting."""

    max_new_tokens: int
    stop: str | Sequence[str]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    logprobs: int
    prompt_logprobs: int
    special_tokens: bool
    schema: Mapping[str, object] | Grammar


class AnswerFuture(Future[Answer]):
    """An answer that comes in the background.

    Args:
        generation: on its way.
    """

    def __init__(self, generation: Generation) -> None:
        super().__init__()
        self._generation = generation

    @property
    def progress(self) -> Progress:
        """How far the answer is."""
        return Progress.of(self._generation.request)

    @property
    def logprobs(self) -> Sequence[TokenLogprobs]:
        """Of the tokens so far, with `logprobs` among the choices; grows while the answer comes."""
        return self._generation.logprobs

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprobs]:
        """Of the prompt's tokens but the first, as far as it has run, with `prompt_logprobs` among the choices."""
        return self._generation.prompt_logprobs


class AnswerStream(Iterator[str]):
    """The pieces of an answer as they come. Each `next` computes on, alone or together with other requests.

    Attributes:
        answer: the whole answer, once the pieces have ended.
    """

    def __init__(self, scheduler: Scheduler, generation: Generation, pieces: deque[str]) -> None:
        self._scheduler, self._generation, self._pieces = scheduler, generation, pieces
        self.answer: Answer | None = None

    def __next__(self) -> str:
        """Returns the next piece of text.

        Raises:
            StopIteration: the answer has ended, or was closed.
            the error that ended the answer.
        """
        request = self._generation.request
        if not self._pieces and self.answer is None and request.reason != CANCELLED:
            self._scheduler.wait(request, lambda: bool(self._pieces))
            if request.ended and request.reason != CANCELLED:
                self.answer = self._generation.answer()  # its last piece comes with it
        if not self._pieces:
            raise StopIteration
        return self._pieces.popleft()

    def close(self) -> None:
        """Ends the answer; its memory is free at the return. Idempotent."""
        if not self._generation.request.ended:
            self._scheduler.drop(self._generation.request)

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._scheduler.cancel(self._generation.request)


class Model:
    """A model under limits. Thread-safe, except `engine`; `close` it, or use it as a context manager.

    Requests of several threads, streams and futures run together, `engine.plan.parallel` of them at once. Threads that
    wait for an answer compute for all; a thread of the model's own does while futures are under way.

    Args:
        engine: runs it; closed with the model.
        tokenizer: a fast tokenizer of transformers.
        sampling: the model's own.
        pace: how prompts and answers share the steps.
        keep: the KV of ended requests stays as long as there is memory (Scheduler).
        disk: keeps it for later processes too; closed with the model. None: memory alone.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        sampling: Sampling,
        pace: Pace | None = None,
        *,
        keep: bool = False,
        disk: PrefixCache | None = None,
    ) -> None:
        self.engine, self.tokenizer, self.sampling = engine, tokenizer, sampling
        self._scheduler = Scheduler(engine, pace, keep=keep, disk=disk)
        self._vocabulary: Vocabulary | None = None
        self._reading = threading.Lock()

    def generate(self, prompt: Prompt, **choices: Unpack[Choices]) -> Answer:
        """Answers a prompt.

        Args:
            prompt: see Prompt.
            choices: see Choices.

        Raises:
            ContextExceeded: the context does not hold the prompt.
            UserError: a choice out of its range, an empty prompt, or the model is closed.
            DamagedData, DoesNotFit: the store cannot be read, or memory has run out.
        """
        start = time.perf_counter()
        return self.run(self.begin(self._tokens(prompt), self._sampler(choices), start))

    def begin(
        self,
        tokens: list[int],
        sampler: Sampler,
        start: float,
        on_text: Callable[[str], bool | None] = lambda piece: None,
        *,
        client: str = "",
    ) -> Generation:
        """Returns an answer that has not begun, for `run`; arguments as of Generation."""
        return Generation(self.engine, self.tokenizer, tokens, sampler, start, on_text, client=client)

    def run(self, generation: Generation) -> Answer:
        """Answers, computing until the end.

        Raises:
            as generate; KeyboardInterrupt: the answer is cancelled.
        """
        self._scheduler.run(generation.request)
        return generation.answer()

    def stream(self, prompt: Prompt, **choices: Unpack[Choices]) -> AnswerStream:
        """Answers a prompt piece by piece; nothing is computed between two pieces, unless others compute.

        Raises:
            as generate, here or at a piece.
        """
        start, pieces = time.perf_counter(), deque[str]()
        sampler = self._sampler(choices)
        generation = self.begin(self._tokens(prompt), sampler, start, pieces.append)
        self._scheduler.submit(generation.request)
        return AnswerStream(self._scheduler, generation, pieces)

    def submit(
        self,
        prompt: Prompt,
        on_text: Callable[[str], bool | None] = lambda piece: None,
        *,
        client: str = "",
        **choices: Unpack[Choices],
    ) -> AnswerFuture:
        """Answers a prompt in the background. The future's `cancel` frees the request's memory at the next step.

        Args:
            prompt: see Prompt.
            on_text: called with each piece of text, in the thread that computes; True ends the answer, and so does an
                error in it.
            client: requests of several clients that wait begin in turn.
            choices: see Choices.

        Raises:
            as generate, here or in the future.
        """
        start, sampler = time.perf_counter(), self._sampler(choices)
        generation = self.begin(self._tokens(prompt), sampler, start, on_text, client=client)
        future, request = AnswerFuture(generation), generation.request
        request.on_end = partial(_resolve, future, generation)
        self._scheduler.submit(request)
        future.add_done_callback(partial(self._cancel, request))
        self._scheduler.start()
        return future

    def _cancel(self, request: Request, future: Future[Answer]) -> None:
        if future.cancelled():
            self._scheduler.cancel(request)

    async def agenerate(self, prompt: Prompt, **choices: Unpack[Choices]) -> Answer:
        """Answers a prompt in the background of an event loop. A cancelled task cancels the request.

        Raises:
            as generate.
        """
        return await asyncio.wrap_future(await asyncio.to_thread(partial(self.submit, prompt, **choices)))

    async def astream(self, prompt: Prompt, **choices: Unpack[Choices]) -> AsyncIterator[str]:
        """Yields an answer's pieces in an event loop; leaving the loop over it cancels the request.

        Raises:
            as generate.
        """
        pieces = asyncio.Queue[str | None]()
        loop = asyncio.get_running_loop()

        def put(piece: str | None) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        future = await asyncio.to_thread(partial(self.submit, prompt, put, **choices))
        future.add_done_callback(lambda done: put(None))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            future.result()
        finally:
            future.cancel()

    def logprobs(
        self, texts: Sequence[str | Sequence[int]], top: int = 0, first: Sequence[int] | None = None
    ) -> list[list[TokenLogprobs]]:
        """Scores texts, or token ids: the model's log probabilities of every token but the first of each.

        Args:
            texts: each of two tokens or more, within the context.
            top: likeliest tokens of each place to return beside.
            first: of each text, the token whose score is the first that is wanted, 1 or more; the KV of tokens before
                it may come from an earlier request. None: 1 for all.

        Raises:
            as generate.
        """
        scores = [
            _Score(self._tokens(text), top, at)
            for text, at in zip(texts, first or [1] * len(texts), strict=True)
        ]
        for score in scores:
            self._scheduler.submit(score.request)
        try:
            for score in scores:
                self._scheduler.wait(score.request)
        finally:
            for score in scores:
                self._scheduler.cancel(score.request)
        return [score.wanted() for score in scores]

    def encode(self, prompt: Prompt, **template: object) -> list[int]:
        """Returns a prompt's token ids.

        Args:
            prompt: see Prompt.
            template: JSON values for the chat template of messages, such as enable_thinking=False.
        """
        return self._tokens(prompt, template)

    def grammar(self, schema: Mapping[str, object]) -> Grammar:
        """Compiles a JSON schema, for the `schema` of any number of answers.

        Raises:
            UserError: a part of it cannot be enforced, or llguidance is missing.
            ModelRefused: the model's tokenizer cannot be used for it.
        """
        vocabulary = self.vocabulary()
        return Grammar(vocabulary, json_answer(vocabulary, schema))

    def vocabulary(self) -> Vocabulary:
        """Returns the model's tokens as grammars read them, made at the first call; it is no part of the limit.

        No step runs while it is made. Not to be called by a callback of an answer.

        Raises:
            UserError, ModelRefused: as Vocabulary.
        """
        with self._reading:
            if self._vocabulary is None:
                with self._scheduler.paused(), self.engine.peak.excluded():
                    self._vocabulary = Vocabulary(self.tokenizer, self.engine.shape.vocab, self.sampling.stop)
            return self._vocabulary

    def keep_warm(self) -> None:
        """From now on reads experts into free blocks while no request is under way, on the thread of futures."""
        self._scheduler.start(fill=True)

    def save(self, tokens: Sequence[int]) -> None:
        """Writes the KV of these tokens to disk, as far as it is kept; from now on that of all requests too."""
        self._scheduler.save(tokens)

    def saved_kv(self, tokens: Sequence[int] = ()) -> tuple[str, int] | None:
        """Returns a hash of all that KV depends on beside tokens, and how many of the tokens have theirs on disk.

        None: no KV is kept on disk.
        """
        return self._scheduler.saved(tokens)

    def forget(self) -> None:
        """Frees the KV that is kept of ended requests."""
        self._scheduler.forget()

    def status(self) -> Status:
        """Returns what the model does now, and what it has done since it was loaded. For any thread."""
        return Status.of(self.engine, self._scheduler)

    def close(self) -> None:
        """Ends every request with an error, and frees all memory. Idempotent; not to be called by a callback."""
        self._scheduler.close()
        self.engine.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _tokens(self, prompt: Prompt, template: Mapping[str, object] | None = None) -> list[int]:
        if isinstance(prompt, str):
            with foreign_code("a tokenizer and a tokenizer_config.json that encode text"):
                return list(self.tokenizer(prompt, verbose=False)["input_ids"])
        tokens = [part for part in prompt if isinstance(part, int)]
        if tokens or not prompt:
            return tokens
        messages = [part for part in prompt if not isinstance(part, int)]
        return encode_chat(self.tokenizer, messages, template or {})

    def _sampler(self, choices: Choices) -> Sampler:
        """A sampler of the model's settings, changed by the choices given."""
        given: dict[str, Any] = dict(choices)
        unknown = given.keys() - Choices.__annotations__.keys()
        if unknown:
            known = ", ".join(Choices.__annotations__)
            raise UserError(f"choices out of {known}", f"{min(unknown)!r}", "leave it out")
        schema = given.pop("schema", None)
        if "stop" in given:
            stop = given.pop("stop")
            given["stop_strings"] = (stop,) if isinstance(stop, str) else tuple(stop)
        if "logprobs" in given:
            given["top_logprobs"] = given.pop("logprobs")
        if "logit_bias" in given:
            given["logit_bias"] = tuple(given["logit_bias"].items())
            self._require_tokens([token for token, _ in given["logit_bias"]])
        sampling = replace(self.sampling, **given)
        if schema is None:
            return Sampler(sampling)
        grammar = schema if isinstance(schema, Grammar) else self.grammar(schema)
        return Sampler(sampling, Matcher(grammar))

    def _require_tokens(self, tokens: Sequence[int]) -> None:
        vocab = self.engine.shape.vocab
        wrong = [token for token in tokens if not 0 <= token < vocab]
        if wrong:
            raise UserError(f"token ids of 0 to {vocab - 1} in logit_bias", f"{wrong[0]}", "leave it out")


class _Score:
    """The score of one text on its way: a request that ends with its prompt."""

    def __init__(self, tokens: list[int], top: int, first: int) -> None:
        if len(tokens) < 2:
            found = f"one of {len(tokens)}"
            raise UserError("a text of two tokens or more to score", found, "give a longer one")
        if not 1 <= first < len(tokens):
            raise UserError(f"a first score of 1 to {len(tokens) - 1}", f"{first}", "choose one of them")
        self._scores, self._first = PromptScores(tokens, top), first
        self.request = Request(
            tokens, Sampler(_ONE_TOKEN), on_rows=self._scores.add, scored=True, rows_from=first - 1
        )

    def wanted(self) -> list[TokenLogprobs]:
        """The scores from the first one that is wanted, once the request has ended."""
        return self._scores.logprobs[self._first - 1 - self.request.cached :]


_ONE_TOKEN = Sampling(0, 1, 0, 1, 0, 1, frozenset())


def _resolve(future: Future[Answer], generation: Generation) -> None:
    """Gives a future the answer or the error of its request, which has ended."""
    if generation.request.reason == CANCELLED:
        future.cancel()
    if not future.set_running_or_notify_cancel():
        return
    try:
        if generation.request.error:
            raise generation.request.error
        future.set_result(generation.answer())
    except BaseException as error:
        future.set_exception(error)
