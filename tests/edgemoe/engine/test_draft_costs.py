"""Time and transfers of computed guesses: the step that follows has them, whether it checks any guess or not."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from greedy import Greedy

from edgemoe.engine.drafts.drafting import Drafting
from edgemoe.engine.drafts.gate import Acceptance, DraftGate
from edgemoe.engine.drafts.ngram import NgramDrafter
from edgemoe.engine.scheduler import Scheduler
from edgemoe.experts.records import StepRecord, StepTotals
from edgemoe.prefetch.counts import TransferCounts

PROMPT = [5, 9, 200, 17, 3, 88]
NEW = 12


class Costly(NgramDrafter):
    """Computes three guesses, at a known cost."""

    computes = True

    def __init__(self) -> None:
        self.calls, self._spent = 0, StepTotals()

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        self.calls += 1
        self._spent = StepTotals(3, seconds=1e5, transfers=TransferCounts(ssd_bytes=7000))
        return [1, 2, 3]

    def take_spent(self) -> StepTotals:
        spent, self._spent = self._spent, StepTotals()
        return spent


class Always(DraftGate):
    """Allows all guesses, whatever they cost."""

    def open(self, sequences):
        return True

    def counts(self, acceptances, proposed, limit, *, computed=False):
        return list(proposed)


@pytest.mark.parametrize("allowed", [3, 0])
def test_a_step_has_the_cost_of_the_guesses_before_it(open_engine, tiny_store, allowed):
    """Seconds and transfers of a step grow by that cost, also where a grammar forbids all guesses."""
    engine, drafter = open_engine(tiny_store, drafts="ngram"), Costly()
    engine.fill()  # no step reads from the disk
    scheduler, rows = Scheduler(engine), engine.plan.decode_rows
    scheduler.loop.drafting = drafting = Drafting(lambda: 3, rows, None, lambda: drafter)
    request = Greedy(PROMPT, NEW)
    request.sampler.allowed = lambda guesses: guesses[:allowed]
    scheduler.run(request)
    spent, plain = request.trace.decode, NEW - 1
    assert drafter.calls == 1  # it has cost thousands of steps
    assert 1e5 < spent.seconds < 1.01e5
    assert spent.transfers.ssd_bytes == 7000
    assert spent.drafted == allowed
    assert drafting._gate._balance < -100
    assert drafting._gate._times[1].plain < 1e3  # the time of guesses is no plain step's
    assert drafting._requests[request][1].rate < 0.7
    assert spent.steps == plain


def test_guesses_of_a_failed_step_are_no_cost_of_another_request():
    """Their time is lost, and the next step has none of it."""
    drafter, request = Costly(), Greedy(PROMPT, NEW)
    drafting = Drafting(lambda: 3, 4, None, lambda: drafter)
    drafting.observe_step(StepRecord(True, 1, 1, seconds=1.0))
    drafting.saw(request, 0, torch.empty(1, 4))
    drafter.propose(PROMPT, 3)
    drafting.charge([request], None)
    record = StepRecord(True, 1, 1, seconds=1.0)
    drafting.charge([request], record)
    drafting.observe_step(record)
    assert (record.seconds, drafting._gate._times[1].plain) == (1.0, 1.0)
    assert drafting._gate._balance < -99


def test_guesses_that_one_request_may_not_check_are_wrong():
    """The grammar of one request forbids its guesses, and another request has guesses to check until its step fails."""
    requests = [Greedy(PROMPT, NEW), Greedy(PROMPT, NEW)]
    requests[0].sampler.allowed = lambda guesses: []
    for request in requests:
        request.sequence = SimpleNamespace(context=64, length=5)
    drafting = Drafting(lambda: 3, 8, None, Costly, Always())
    assert drafting.propose(requests) == [(), (1, 2, 3)]
    rates = [drafting._of(request)[1].rate for request in requests]
    assert rates[0] < rates[1] == Acceptance(likely=True).rate
    drafting.charge(requests, None)
    assert [drafting._of(request)[1].rate for request in requests] == [rates[0]] * 2
