"""An open model: prompts to answers, alone, streamed or several at once, and scores of texts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Unpack

from edgemoe.api.answers import AnswerFuture, AnswerStream, Score, cancel_request, resolve
from edgemoe.api.choices import Choices, sampler_of
from edgemoe.api.prompt import Prompt, Prompts
from edgemoe.api.status import Status
from edgemoe.api.thinking import ReasoningTags, template_of
from edgemoe.engine.engine import Engine
from edgemoe.engine.generate import Answer, Generation
from edgemoe.engine.pace import Pace
from edgemoe.engine.sampling import Sampler, Sampling, TokenLogprobs
from edgemoe.engine.scheduler import Scheduler
from edgemoe.grammar.grammars import Grammars
from edgemoe.grammar.matcher import Grammar, Vocabulary

if TYPE_CHECKING:
    from edgemoe.grammar.lark import Reasoning
    from edgemoe.kv.prefix_cache import PrefixCache


class Model:
    """A model under limits. Thread-safe, except `engine`; `close` it, or use it as a context manager.

    Requests of several threads, streams and futures run together, `engine.plan.parallel` of them at once. Threads that
    wait for an answer compute for all; a thread of the model's own does while futures are under way.

    Args:
        engine: the engine that runs the model; `close` closes it too.
        tokenizer: a fast tokenizer of transformers.
        sampling: the model's own settings of answers.
        pace: how prompts and answers share the steps.
        keep: whether the KV of ended requests stays, as long as there is memory (Scheduler).
        disk: the cache that keeps KV on disk for later processes; `close` closes it too. None: memory alone.

    Attributes:
        prompts: makes token ids of prompts.
        tags: returns the tags of the model's reasoning, which are looked for at the first call.
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
        self.prompts = Prompts(tokenizer, engine)
        self._scheduler = Scheduler(engine, pace, keep=keep, disk=disk)
        engine.peak.pause(engine.shape.experts, engine.plan.context)
        self.tags = cache(partial(ReasoningTags.of, tokenizer))
        self._grammars: Grammars | None = None
        self._reading = threading.Lock()

    def generate(self, prompt: Prompt, **choices: Unpack[Choices]) -> Answer:
        """Answers a prompt.

        Args:
            prompt: a text, a list of messages, or token ids.
            choices: how tokens are chosen and when the answer ends, by the names of Choices.

        Returns:
            the answer: its text and token ids, times in seconds, bytes and counts.

        Raises:
            ContextExceeded: the context does not hold the prompt.
            UserError: a choice out of its range, an empty prompt, or the model is closed.
            DamagedData, DoesNotFit: the store cannot be read, or memory has run out.
        """
        start = time.perf_counter()
        tokens, sampler = self.prompts.encode(prompt, template_of(choices)), sampler_of(self, choices)
        return self.run(self.begin(tokens, sampler, start, reasoning=choices.get("reasoning")))

    def begin(
        self,
        tokens: list[int],
        sampler: Sampler,
        start: float,
        on_text: Callable[[str], bool | None] = lambda piece: None,
        *,
        client: str = "",
        reasoning: Reasoning | None = None,
    ) -> Generation:
        """Returns an answer that has not begun, for `run`. Arguments: see Generation.

        Raises:
            UserError: a budget of reasoning, and a model whose tags of reasoning are not known.
        """
        if reasoning is None and sampler.sampling.thinking_budget is not None:
            self.tags().require()
            reasoning = self.tags().after_tokens(tokens)
        return Generation(
            self.engine, self.tokenizer, tokens, sampler, start, on_text, client=client, reasoning=reasoning
        )

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
        tokens, sampler = self.prompts.encode(prompt, template_of(choices)), sampler_of(self, choices)
        generation = self.begin(tokens, sampler, start, pieces.append, reasoning=choices.get("reasoning"))
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
            prompt: a text, a list of messages, or token ids.
            on_text: called with each piece of text, in the thread that computes; True ends the answer, and so does an
                error in it.
            client: requests of several clients that wait begin in turn.
            choices: how tokens are chosen and when the answer ends, by the names of Choices.

        Raises:
            as generate, here or in the future.
        """
        start, sampler = time.perf_counter(), sampler_of(self, choices)
        tokens, reasoning = self.prompts.encode(prompt, template_of(choices)), choices.get("reasoning")
        generation = self.begin(tokens, sampler, start, on_text, client=client, reasoning=reasoning)
        future, request = AnswerFuture(generation), generation.request
        request.on_end = partial(resolve, future, generation)
        self._scheduler.submit(request)
        future.add_done_callback(partial(cancel_request, self._scheduler, request))
        self._scheduler.start()
        return future

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
        """Scores texts, or token ids, by the model's log probabilities.

        Args:
            texts: each of two tokens or more, within the context.
            top: number of the likeliest tokens that are returned for each place as well.
            first: index of the first scored token of each text, 1 or more; the KV of earlier tokens may come from an
                earlier request. None: 1 for all.

        Returns:
            for each text an entry for each token from its first scored one, with natural logarithms.

        Raises:
            as generate.
        """
        scores = [
            Score(self.prompts.encode(text), top, at)
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
            prompt: a text, a list of messages, or token ids.
            template: JSON values for the chat template of messages, such as enable_thinking=False.
        """
        return self.prompts.encode(prompt, template)

    def grammar(self, schema: Mapping[str, object]) -> Grammar:
        """Compiles a JSON schema, for the `schema` of any number of answers.

        Raises:
            UserError: a part of it cannot be enforced, or llguidance is missing.
            ModelRefused: the model's tokenizer cannot be used for it.
        """
        return self.grammars().formed(schema)

    def grammars(self) -> Grammars:
        """Returns the compiler of grammars for the model's tokens, made at the first call; the limit does not count it.

        No step runs while the tokens are read. Not to be called by a callback of an answer.

        Raises:
            UserError, ModelRefused: as Vocabulary.
        """
        with self._reading:
            if self._grammars is None:
                with self._scheduler.paused():
                    vocabulary = Vocabulary(self.tokenizer, self.engine.shape.vocab, self.sampling.stop)
                self._grammars = Grammars(vocabulary)
            return self._grammars

    def keep_warm(self) -> None:
        """Starts reading experts into free blocks while no request is under way, on the thread of futures."""
        self._scheduler.start(fill=True)

    def save(self, tokens: Sequence[int] = (), into: PrefixCache | None = None) -> None:
        """Writes the KV of these tokens to disk, as far as it is kept; from now on all requests' KV too.

        Args:
            tokens: token ids.
            into: a cache other than the model's own, which gets all KV that is kept.
        """
        self._scheduler.save(tokens, into)

    def saved_kv(self, tokens: Sequence[int] = ()) -> tuple[str, int] | None:
        """Returns a hash of all that KV depends on except tokens, and how many of the tokens have KV on disk.

        None: no KV is kept on disk.
        """
        return self._scheduler.saved(tokens)

    def forget(self) -> None:
        """Frees the KV that is kept of ended requests."""
        self._scheduler.forget()

    def status(self) -> Status:
        """Returns the model's present state, and its counts since it was loaded. For any thread."""
        return Status.of(self.engine, self._scheduler)

    def close(self) -> None:
        """Ends every request with an error, and frees all memory. Idempotent; not to be called by a callback."""
        self._scheduler.close()
        self.engine.close()
        if self._grammars:
            self._grammars.vocabulary.process.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
