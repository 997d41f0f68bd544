"""Guesses at the next tokens: the bits, answer and state of a run without them, and a bound on what they cost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from greedy import GREEDY, Greedy, assert_right, run
from scripted import chatml_tokenizer

from edgemoe.engine.drafts.drafting import Drafting
from edgemoe.engine.drafts.gate import Acceptance, DraftGate
from edgemoe.engine.drafts.ngram import LEAST_MATCH, NgramDrafter
from edgemoe.engine.engine import Engine
from edgemoe.engine.request import Request
from edgemoe.engine.sampling import Sampler
from edgemoe.engine.scheduler import Scheduler
from edgemoe.engine.thinking import Thinking
from edgemoe.errors import UserError
from edgemoe.grammar.lark import Reasoning
from edgemoe.kv.rotary_lengths import RotaryLengths
from edgemoe.kv.step import Segment, Step
from edgemoe.models.options.run_settings import run_settings

PROMPT = [5, 9, 200, 17, 3, 88]
NEW = 24


class Known(NgramDrafter):
    """Guesses the tokens of known answers, of which each fourth is wrong."""

    def __init__(self, *answers: list[int]) -> None:
        self.answers = answers

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        at = len(tokens)
        answer = next(each for each in self.answers if each[:4] == tokens[:4] or len(self.answers) == 1)
        return [
            token + 1 if token != 30 and (at + i) % 4 == 0 else token
            for i, token in enumerate(answer[at : at + limit])
        ]


class OpenGate(DraftGate):
    """Lets every guess pass, whatever it costs."""

    def open(self, sequences: int) -> bool:
        return True

    def counts(self, acceptances: Sequence[Acceptance], proposed: Sequence[int], limit: int) -> list[int]:
        return [min(count, limit // len(proposed)) for count in proposed]

    def observe(self, sequences: int, drafted: int, accepted: int, seconds: float) -> None:
        """Has no use for times."""


def guessing(*answers: list[int], limit: int = 7, rows: int = 32) -> Drafting:
    """Guesses of known answers, as long as there are any."""
    return Drafting(lambda: limit, rows, drafter=lambda: Known(*answers), gate=OpenGate())


def drafted(engine: Engine, drafting: Drafting, request: Request) -> Scheduler:
    """Runs a request whose guesses come from `drafting`."""
    scheduler = Scheduler(engine)
    scheduler.loop.drafting = drafting
    scheduler.run(request)
    return scheduler


@pytest.mark.parametrize(
    "how",
    [
        {"level": 4, "experts": 5},
        {"levels": (4, 2), "retention": 0.5, "experts": 5, "dram_experts": 3, "speculate": "full"},
        {"level": 8, "kv": "q8_0"},
        {"level": 2, "kv": "q4_0"},
    ],
)
def test_rows_of_one_sequence_have_the_bits_of_single_tokens(open_engine, tiny_store, how):
    """A step of 1 to 8 rows has the logits of as many steps; guesses that are not accepted leave nothing."""
    engine = open_engine(tiny_store, drafts="ngram", **how)
    tokens = [11, 250, 42, 99, 7, 180, 64, 12]
    sequence = engine.sequences.new()
    engine.prefill(sequence, PROMPT)
    want = torch.cat([engine.step(Step((Segment(sequence, (token,)),))) for token in tokens])
    for rows in range(1, 9):
        sequence.crop(0)
        engine.prefill(sequence, PROMPT)
        wrong = Segment(sequence, (tokens[0], *([77] * 7)), drafts=7)
        assert torch.equal(engine.step(Step((wrong,)), all_rows=True)[0], want[0])
        assert sequence.length == len(PROMPT) + 1
        checked = Segment(sequence, tuple(tokens[1 : 1 + rows]), drafts=len(tokens[1 : 1 + rows]) - 1)
        got = engine.step(Step((checked,)), all_rows=True)
        assert torch.equal(got, want[1 : 1 + rows])
        assert sequence.length == len(PROMPT) + 2


@pytest.mark.parametrize("how", [{"level": 4}, {"level": 4, "kv": "q8_0", "experts": 5}])
def test_an_answer_and_its_kept_keys_are_those_without_guesses(open_engine, tiny_store, how):
    """Tokens and logits are equal in fewer steps, right or wrong guesses; a prompt that goes on has the same bits."""
    engine = open_engine(tiny_store, drafts="ngram", **how)
    simple = run(Scheduler(engine), PROMPT, NEW)
    request = Greedy(PROMPT, NEW)
    scheduler = Scheduler(engine, keep=True)
    scheduler.loop.drafting = guessing(simple.tokens)
    scheduler.run(request)
    assert request.tokens == simple.tokens
    assert torch.equal(torch.stack(request.rows), torch.stack(simple.rows))
    totals = request.trace.decode
    assert (totals.tokens, totals.steps) == (NEW - 1, totals.tokens - totals.accepted)
    assert 0 < totals.accepted < totals.drafted
    assert scheduler.loop.decode.accepted == totals.accepted
    following = run(scheduler, [*request.tokens, 4, 19], 4)
    assert following.cached >= len(PROMPT)
    scheduler.close()
    assert_right(engine, following)


def test_an_answer_ends_where_it_ends_without_guesses(open_engine, tiny_store):
    """A token that ends the answer, the number of tokens and the context cut it at the same token."""
    engine = open_engine(tiny_store, level=4, context=40, drafts="ngram")
    whole = run(Scheduler(engine), PROMPT, 60)
    assert whole.reason == "context"
    answer = whole.tokens[len(PROMPT) :]
    for stop, new in ((frozenset({answer[6]}), 30), (frozenset(), 9), (frozenset(), 60)):
        sampling = replace(GREEDY, max_new_tokens=new, stop=stop)
        plainly, guessed = (Request(list(PROMPT), Sampler(sampling)) for _ in range(2))
        Scheduler(engine).run(plainly)
        drafted(engine, guessing(whole.tokens, limit=3), guessed)
        assert (guessed.tokens, guessed.reason) == (plainly.tokens, plainly.reason)
        assert guessed.trace.decode.accepted


def test_a_budget_of_reasoning_holds_with_guesses_and_in_a_batch(open_engine, tiny_store):
    """The closing tokens come after the budget, and the answer is the one of a request alone without guesses."""
    engine = open_engine(tiny_store, level=4, context=80, parallel=2, drafts="ngram")
    tokenizer = chatml_tokenizer()
    tags = Reasoning("<think>", "</think>", begun=True, closing="\n</think>\n\n")

    def request(budget: int = 5) -> Request:
        sampler = Sampler(replace(GREEDY, max_new_tokens=NEW))
        return Request(list(PROMPT), sampler, thinking=Thinking(tokenizer, tags, PROMPT, budget))

    alone, guessed, longer = request(), request(), request(9)
    Scheduler(engine).run(alone)
    Scheduler(engine).run(longer)
    begin, closing = len(PROMPT) + 5, tokenizer(tags.closing, add_special_tokens=False)["input_ids"]
    assert alone.tokens[begin : begin + len(closing)] == closing
    assert (alone.thinking.tokens, longer.thinking.tokens) == (5, 9)
    assert alone.tokens != longer.tokens
    drafted(engine, guessing(alone.tokens), guessed)
    assert guessed.trace.decode.accepted
    scheduler, batch = Scheduler(engine), [request(), request(9)]
    for each in batch:
        scheduler.submit(each)
    for each in batch:
        scheduler.wait(each)
    assert [each.tokens for each in (guessed, *batch)] == [alone.tokens, alone.tokens, longer.tokens]


def test_a_step_that_guesses_fail_runs_again_without_them(open_engine, tiny_store):
    """A guess that no token is fails its step alone, and the answer is as without."""
    engine = open_engine(tiny_store, level=4, drafts="ngram")
    simple = run(Scheduler(engine), PROMPT, 6)
    request = Greedy(PROMPT, 6)
    drafted(engine, guessing([10**6] * 40), request)
    assert request.tokens == simple.tokens
    assert request.trace.decode.drafted == 0


def test_sampling_with_guesses_has_the_distribution_of_the_logits(open_engine, tiny_store):
    """Over an answer of 600 tokens each of three allowed tokens comes as often as its probabilities add up to.

    One of them is always guessed: a sampler that favours guesses, or avoids them, is many deviations away.
    """
    engine = open_engine(tiny_store, level=4, drafts="ngram", context=640)
    allowed, temperature, new = (30, 31, 32), 1.5, 600
    bias = tuple((token, 1000.0) for token in allowed)
    sampling = replace(GREEDY, temperature=temperature, logit_bias=bias, max_new_tokens=new)
    rows = list[torch.Tensor]()
    request = Request(
        list(PROMPT), Sampler(sampling), on_token=lambda token, logits: rows.append(logits[list(allowed)])
    )
    drafted(engine, guessing([30] * 640, limit=2), request)
    wanted = (torch.stack(rows) / temperature).softmax(-1).double()
    answer = torch.tensor(request.tokens[len(PROMPT) :])
    for token, chance in zip(allowed, wanted.T, strict=True):
        deviation = (chance * (1 - chance)).sum().sqrt()
        assert abs(int((answer == token).sum()) - chance.sum()) < 3.3 * deviation
    assert 50 < request.trace.decode.accepted < new - 50


def test_requests_of_one_step_guess_each_for_itself(open_engine, tiny_store):
    """Three requests have the tokens and logits of each alone, in fewer steps; answers count their own guesses."""
    engine = open_engine(tiny_store, level=4, parallel=3, drafts="ngram")
    prompts = PROMPT, PROMPT[::-1], [*PROMPT[2:], 4]
    alone = [run(Scheduler(engine), prompt, new) for prompt, new in zip(prompts, (NEW, 9, NEW), strict=True)]
    scheduler, requests = (
        Scheduler(engine, keep=True),
        [Greedy(r.tokens[: r.prompt], len(r.rows)) for r in alone],
    )
    scheduler.loop.drafting = guessing(*(each.tokens for each in alone))
    for request in requests:
        scheduler.submit(request)
    for request, one in zip(requests, alone, strict=True):
        scheduler.wait(request)
        assert request.tokens == one.tokens
        assert torch.equal(torch.stack(request.rows), torch.stack(one.rows))
        assert 0 < request.trace.accepted < request.trace.drafted
    traces, totals = [request.trace for request in requests], scheduler.loop.decode
    assert totals.drafted == sum(each.drafted for each in traces)
    assert totals.accepted == sum(each.accepted for each in traces)
    assert totals.tokens == sum(len(each.rows) - 1 for each in requests)
    assert max(each.decode.steps for each in traces) < NEW - 1


def test_a_wrong_guess_in_a_step_of_several_leaves_the_others_right(open_engine, tiny_store):
    """A guess that no token is fails the step; all run again without guesses, as alone."""
    engine = open_engine(tiny_store, level=4, parallel=2, drafts="ngram")
    requests = [Greedy(PROMPT, 8), Greedy(PROMPT[::-1], 8)]
    scheduler = Scheduler(engine)
    scheduler.loop.drafting = guessing(
        run(Scheduler(engine), PROMPT, 8).tokens, [*PROMPT[::-1], *[10**6] * 9]
    )
    for request in requests:
        scheduler.submit(request)
    for request in requests:
        scheduler.wait(request)
        assert_right(engine, request)


def test_settings_of_an_engine_keep_or_have_no_guesses(open_engine, tiny_store):
    """An engine without guesses gets none, and one with guesses keeps them; a step has as many rows as planned."""
    assert open_engine(tiny_store, level=4).most_drafts == 0
    engine = open_engine(tiny_store, level=4, drafts="ngram")
    with pytest.raises(UserError, match="drafts"):
        engine.configure(engine.settings.with_(drafts="off"))
    sequence = engine.sequences.new()
    engine.prefill(sequence, PROMPT)
    with pytest.raises(ValueError, match="at most 8 rows in a step, got 9"):
        engine.begin(Step((Segment(sequence, tuple(range(9)), drafts=7),)))


@pytest.mark.parametrize(("lengths", "count"), [((10,), 3), ((6,), 7), ((), 0)])
def test_guesses_end_before_tokens_with_other_rotary_factors(open_engine, tiny_store, lengths, count):
    """Before the long factors of longrope, after them, and where each further token has factors of its own."""
    engine = open_engine(tiny_store, level=4, drafts="ngram")
    request = Request(
        [*PROMPT, 30], Sampler(replace(GREEDY, max_new_tokens=NEW)), sequence=engine.sequences.new()
    )
    engine.prefill(request.sequence, PROMPT)
    changes = RotaryLengths(lengths, None if lengths else 6)
    drafting = Drafting(lambda: 7, 8, changes, drafter=lambda: Known([30] * 40), gate=OpenGate())
    assert [len(guesses) for guesses in drafting.propose([request])] == [count]


def test_settings_that_allow_no_guesses_are_refused():
    """Settings that look at all tokens of a step, and an unknown drafter."""
    for options in ({"lynx": True}, {"tpot_target": "50ms"}):
        with pytest.raises(UserError, match="one by one, for --draft ngram"):
            run_settings(8, draft="ngram", **options)
    with pytest.raises(UserError, match="--draft off or ngram or mtp"):
        run_settings(8, draft="self")


def test_ngrams_are_found_at_their_latest_place():
    """Guesses agree with a search of all places, at most as many as tokens match, in a list that grows."""
    generator, tokens = random.Random(5), list[int]()
    drafter = NgramDrafter()
    for _ in range(400):
        tokens.append(generator.randrange(3))
        end = next(
            (e for e in range(len(tokens) - 1, LEAST_MATCH - 1, -1) if tokens[e - 3 : e] == tokens[-3:]),
            None,
        )
        guesses = drafter.propose(tokens, 7)
        if end is None or len(tokens) < LEAST_MATCH:
            assert guesses == []
            continue
        match = max(
            n for n in range(3, 17) if n <= end and tokens[end - n : end] == tokens[len(tokens) - n :]
        )
        assert guesses == tokens[end : end + min(7, match)]


@pytest.mark.parametrize(
    ("sequences", "slope", "right", "lowest", "highest"),
    [(1, 0.7, 0.0, 0.98, 1.0), (1, 0.3, 0.95, 1.8, 3.0), (4, 0.2, 0.0, 0.98, 1.0), (4, 0.1, 0.95, 1.6, 3.5)],
)
def test_guesses_cost_two_percent_at_most_and_gain_where_they_are_right(
    sequences, slope, right, lowest, highest
):
    """2,000 simulated steps' tokens: always wrong guesses lose at most 2 %; mostly right ones gain."""
    generator, gate = random.Random(3), DraftGate()
    acceptances = [Acceptance() for _ in range(sequences)]
    seconds, tokens = 0.0, 0
    while tokens < 2000 * sequences:
        counts = gate.counts(acceptances, [7] * sequences, 20)
        accepted = [next((i for i in range(count) if generator.random() >= right), count) for count in counts]
        took = (1 + slope * sum(counts)) * generator.uniform(0.9, 1.1)
        gate.observe(sequences, sum(counts), sum(accepted), took)
        for acceptance, count, some in zip(acceptances, counts, accepted, strict=True):
            if count:
                acceptance.observe(count, some)
        seconds, tokens = seconds + took, tokens + sequences + sum(accepted)
    assert lowest <= tokens / seconds / sequences <= highest


def test_the_likeliest_guesses_of_a_step_come_first():
    """Of two requests the one whose guesses were right has more of them, and none is more than the step holds."""
    gate, sure, poor = DraftGate(), Acceptance(), Acceptance()
    for _ in range(8):
        gate.observe(2, drafted=0, accepted=0, seconds=0.1)
        sure.observe(drafted=4, accepted=4)
        poor.observe(drafted=4, accepted=0)
    assert gate.counts([poor, sure], [7, 7], 5) == [0, 5]
    assert gate.counts([poor, sure], [7, 0], 5) == [3, 0]  # a trial
    assert gate.counts([sure], [7], 7) == [0]  # no step of one sequence was measured
