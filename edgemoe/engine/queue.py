"""The requests of one engine from their arrival to their end, and the keys and values that they get."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from edgemoe.engine.arrivals import Arrivals
from edgemoe.engine.engine import Engine
from edgemoe.engine.kept_sequences import LEAST_TOKENS, KeptSequences
from edgemoe.engine.request import Request
from edgemoe.errors import DoesNotFit, NotFinite
from edgemoe.kv.pictures import PlacedPicture
from edgemoe.kv.rotary_lengths import RotaryLengths
from edgemoe.kv.sequence import SequenceKV
from edgemoe.policy.importance import needs_attention


class RequestQueue:
    """Waiting requests, requests whose prompts run, and requests that decode. For the thread that drives.

    Args:
        engine: runs their steps.
        sequences: the KV of ended requests; None: none is kept.

    Attributes:
        arrived: requests that wait for their KV. Thread-safe.
        prompts: requests whose prompts run, the first to be admitted first.
        running: requests that decode.
    """

    def __init__(self, engine: Engine, sequences: KeptSequences | None) -> None:
        self._engine, self._kept = engine, sequences
        self._lengths = RotaryLengths.of(engine.store.config)
        self.arrived = Arrivals[Request]()
        self.prompts: list[Request] = []
        self.running: list[Request] = []

    def __iter__(self) -> Iterator[Request]:
        return iter([*self.arrived, *self.prompts, *self.running])

    @property
    def admitted(self) -> int:
        """Requests that have their KV."""
        return len(self.prompts) + len(self.running)

    def admit(self) -> tuple[Request, Exception] | None:
        """Gives KV to the requests whose turn it is, as far as there are places and the budget has bytes.

        Returns:
            a request that cannot get its KV, even alone, and the error; None: there is none.
        """
        while (request := self.arrived.first()) is not None:
            if self.admitted >= self._engine.plan.parallel or self._shares_a_prompt(request):
                return None
            if request.sequence is None:
                wanted = request.prompt + request.sampler.sampling.max_new_tokens
                try:
                    self._give_sequence(request, min(wanted, self._engine.plan.context))
                except Exception as error:
                    waits = self.admitted and isinstance(error, DoesNotFit)
                    return None if waits else (request, error)
            elif self._lengths and request.length and not self._continues(request, request.sequence):
                request.length = request.cached = request.sequence.crop(0)
            assert request.sequence
            request.sequence.whole = request.prompt
            request.trace.admitted = time.perf_counter()
            self.prompts.append(self.arrived.take())
        return None

    def _continues(self, request: Request, sequence: SequenceKV) -> bool:
        """Whether the keys in a caller's sequence have the rotary factors of the prompt's length."""
        assert self._lengths
        had = max(sequence.whole, sequence.length)
        return self._lengths.factors(had) == self._lengths.factors(request.prompt)

    def compute_again(self, request: Request) -> None:
        """Makes all tokens of a request that decodes its prompt: their keys and values are of no use any more."""
        self.running.remove(request)
        self.prompts.append(request)
        request.prompt_tokens, request.length, request.on_rows = len(request.tokens), 0, None
        sequence = request.sequence
        assert sequence
        if self._kept:
            self._kept.begin_again(sequence, request.prompt_tokens)
        sequence.crop(0)
        sequence.mark(None, request.prompt_tokens)
        sequence.whole = request.prompt_tokens

    def _shares_a_prompt(self, request: Request) -> bool:
        """Whether a prompt that runs has at least half of a request's tokens: the request waits, and copies them."""
        if self._kept is None or not self.prompts:
            return False
        shared = [_shared(request.tokens, other.tokens) for other in self.prompts]
        most, sequence = max(shared), self.prompts[shared.index(max(shared))].sequence
        waits = most >= max(LEAST_TOKENS, request.prompt // 2)
        if waits and sequence:
            sequence.mark(most, sequence.whole)
        return waits

    def _give_sequence(self, request: Request, context: int) -> None:
        """Gives a request its KV, with the kept KV of the prompt's first tokens; at most all but one."""
        if self._kept is None:
            request.sequence = self._engine.sequences.new(context)
            return
        most = min(request.prompt - 1, request.prompt if request.on_rows is None else request.rows_from)
        running = [(other.tokens, other.sequence) for other in self.running if other.sequence]
        request.sequence, request.cached = self._kept.sequence_for(
            request.tokens[:most], running, request.prompt
        )
        request.length = request.cached

    def read_blocks(self, request: Request) -> bool:
        """Reads the next blocks of a prompt that are on disk. Returns False where there are none.

        Raises:
            DoesNotFit, DamagedData: as KeptSequences.read_blocks.
        """
        assert request.sequence
        read = self._kept.read_blocks(request.sequence) if self._kept else None
        if read is not None:
            request.length = request.cached = read
        return read is not None

    def prepare_picture(self, request: Request, rows: int) -> float:
        """Computes a picture of a prompt's next tokens, and frees the pictures before them.

        Only the first prompt has features: the plan has memory for the pictures of one context.

        Args:
            request: the first prompt.
            rows: most tokens in a step.

        Returns:
            The seconds that it took.

        Raises:
            DamagedData, DoesNotFit, UserError: as PlacedPicture.prepare.
        """
        started = time.perf_counter()
        if request.pictures:
            tokens = self._next_tokens(request, rows)
            request.pictures.require(range(tokens))
            request.pictures.release(request.length)
            if missing := self._missing_picture(request, tokens):
                missing.prepare()
        return time.perf_counter() - started

    def _missing_picture(self, request: Request, tokens: int) -> PlacedPicture | None:
        """The first picture without features among so many next tokens of a prompt; None: there is none."""
        numbers = range(request.length, request.length + tokens)
        return request.pictures.missing(numbers) if request.pictures else None

    def next_prompts(self, rows: int) -> list[tuple[Request, int]]:
        """Chooses the prompts of the next step, the first to be admitted first, and the number of tokens of each.

        A prompt's tokens are divided in the same way whatever runs with it. One whose rows are wanted runs alone. While
        the first prompt waits for its pictures, the prompts after it run that end in this step.

        Args:
            rows: most tokens in a step.
        """
        plan, chosen, left, sums = self._engine.plan, list[tuple[Request, int]](), rows, 0
        ranked = needs_attention(self._engine.settings.importance)
        for request in self.prompts:
            tokens = self._next_tokens(request, rows)
            alone = request.on_rows or (chosen and chosen[0][0].on_rows)
            # The plan has the sums of attention of one context.
            sums += request.prompt_tokens
            after = chosen or request is not self.prompts[0]
            if (chosen and (alone or tokens > left)) or (after and ranked and sums > plan.context):
                break
            ends = request.length + tokens == _next_end(request)
            if not tokens or self._missing_picture(request, tokens) or (after and not ends):
                continue
            chosen.append((request, tokens))
            left -= tokens
        return chosen

    def _next_tokens(self, request: Request, rows: int) -> int:
        """Number of a prompt's tokens in its next step of at most `rows` tokens."""
        most = min(rows, self._engine.plan.scored_rows) if request.on_rows else rows
        end = min(request.length + most, _next_end(request))
        tokens = range(request.length, end)
        return len(request.pictures.whole(tokens) if request.pictures else tokens)

    def reserve(self, request: Request, tokens: int) -> None:
        """Reserves the memory of a request's next tokens.

        Raises:
            DoesNotFit: the budget has too little left.
        """
        if self._kept and request.sequence:
            self._kept.reserve(request.sequence, tokens)

    def prompt_done(self, request: Request) -> None:
        """Lets a request decode: its prompt has run."""
        self.prompts.remove(request)
        self.running.append(request)
        if request.pictures:
            request.pictures.release()
        if self._kept and request.sequence:
            self._kept.has_prompt(request.sequence, request.tokens)

    def remove(self, request: Request, error: BaseException | None) -> None:
        """Takes a request out. Its KV is kept, or freed; after a value that is not finite, all that may have it.

        The features of its pictures are freed.
        """
        self.arrived.remove(request)
        self.prompts = [other for other in self.prompts if other is not request]
        self.running = [other for other in self.running if other is not request]
        if request.pictures:
            request.pictures.release()
        sequence = request.sequence
        if sequence and not request.keeps_kv:
            self._free(sequence, request.tokens, error)
            request.sequence = None

    def _free(self, sequence: SequenceKV, tokens: Sequence[int], error: BaseException | None) -> None:
        if self._kept is None:
            self._engine.sequences.end(sequence)
        elif isinstance(error, NotFinite):
            self._kept.discard(sequence, tokens)
        else:
            self._kept.keep(sequence, tokens)


def _next_end(request: Request) -> int:
    """The most tokens that a prompt has after its next step: up to a checkpoint of a state, or all."""
    whole = request.pictures and request.pictures.both_ways  # a mark may be within a picture
    states = request.sequence.states if request.sequence and not whole else None
    mark = states.checkpoints.following(request.length) if states else None
    return min(mark or request.prompt_tokens, request.prompt_tokens)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens two prompts share."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
