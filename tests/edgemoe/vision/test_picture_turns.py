"""Pictures are computed between the steps of other requests, and leave memory as soon as their prompt ends."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from picture_models import BEGIN, END, PICTURE, a_picture, opened, pictures_of

from edgemoe.engine.engine import Engine
from edgemoe.engine.pace import Pace
from edgemoe.engine.request import CANCELLED, Request
from edgemoe.engine.sampling import Sampler, Sampling
from edgemoe.engine.scheduler import Scheduler
from edgemoe.errors import DamagedData, UserError
from edgemoe.kv.pictures import Features, PictureTokens
from edgemoe.kv.step import Segment, Step
from edgemoe.policy.importance import PromptAttention
from edgemoe.vision.prompt import Pictures
from edgemoe.vision.tower import Tower

pytestmark = pytest.mark.filterwarnings("ignore")

TEXT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def engine(store) -> Iterator[Engine]:
    """An engine for three requests at once."""
    with opened(store, parallel=3) as made:
        yield made


@pytest.fixture(scope="module")
def pictures(engine: Engine) -> Pictures:
    """The pictures of its prompts."""
    return pictures_of(engine)


@pytest.fixture
def scheduler(engine: Engine) -> Iterator[Scheduler]:
    """A scheduler whose steps the test runs, with one decode step between two chunks of prompts."""
    made = Scheduler(engine, Pace(every=1))
    used = engine.budget.used_bytes
    yield made
    made.close()
    assert engine.budget.used_bytes == used


class Run:
    """Calls of the tower and new tokens in their order, and weak references to all features."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events, self.features = list[str](), list[weakref.ref[torch.Tensor]]()
        self.at_picture: Callable[[int], None] = lambda number: None
        own = Tower.features

        def computed(tower: Tower, pixels: dict[str, torch.Tensor]) -> Features:
            self.events.append("picture")
            self.at_picture(self.events.count("picture"))
            made = own(tower, pixels)
            self.features.append(weakref.ref(made.rows))
            return made

        monkeypatch.setattr(Tower, "features", computed)

    def request(self, name: str, tokens: list[int], new: int) -> Request:
        """A greedy request, whose new tokens are events."""

        def token(token: int, logits: torch.Tensor) -> bool:
            self.events.append(name)
            return False

        return Request(list_of(tokens), Sampler(Sampling(0, 1, 0, 1, 0, new, frozenset())), on_token=token)

    @property
    def held(self) -> int:
        """Number of pictures whose features are in memory."""
        gc.collect()
        return sum(each() is not None for each in self.features)


@pytest.fixture
def run(monkeypatch) -> Run:
    """The events of a test."""
    return Run(monkeypatch)


def list_of(tokens: list[int]) -> list[int]:
    """A copy, which grows by the answer."""
    return PictureTokens(tokens, tokens.pictures) if isinstance(tokens, PictureTokens) else list(tokens)


def prompt_of(pictures: Pictures, *seeds: int) -> PictureTokens:
    """A prompt with pictures."""
    read = [pictures.read(a_picture(seed)) for seed in seeds]
    return pictures.placed([5, *[BEGIN, PICTURE, END] * len(seeds), 9], read)


def steps(scheduler: Scheduler, until: Callable[[], bool]) -> None:
    """Runs steps until a condition holds; fails after many."""
    for _ in range(40):
        if until():
            return
        scheduler.loop.step()
    raise AssertionError("expected an end within 40 steps")


def test_answers_go_on_between_pictures(scheduler, pictures, run):
    """Before the next picture the running answer has new tokens, and a short prompt is answered."""
    answer, shown, short = (
        run.request("text", TEXT, 30),
        run.request("shown", prompt_of(pictures, 1, 2, 3), 1),
        run.request("short", [9, 8], 1),
    )
    scheduler.submit(answer)
    scheduler.loop.step()
    scheduler.submit(shown)
    scheduler.submit(short)
    steps(scheduler, lambda: shown.ended)
    others = [event for event in run.events if event != "text"]
    assert others == ["picture", "short", "picture", "picture", "shown"]
    places = [number for number, event in enumerate(run.events) if event == "picture"]
    assert all("text" in run.events[one:other] for one, other in pairwise(places))
    assert run.held == 0


def test_an_error_of_the_tower_ends_its_own_request(scheduler, pictures, run):
    """Another answer has the tokens that it has alone, and the queue goes on."""
    alone = run.request("text", TEXT, 8)
    scheduler.run(alone)
    answer, shown = run.request("text", TEXT, 8), run.request("shown", prompt_of(pictures, 1, 2), 1)
    scheduler.submit(answer)
    scheduler.loop.step()
    scheduler.submit(shown)

    def fail(number: int) -> None:
        if number == 2:
            raise DamagedData("a whole vision.safetensors", "a damaged one", "convert again")

    run.at_picture = fail
    steps(scheduler, lambda: shown.ended)
    assert isinstance(shown.error, DamagedData)
    assert (run.held, answer.ended) == (0, False)
    steps(scheduler, lambda: answer.ended)
    assert answer.tokens == alone.tokens
    again = run.request("shown", prompt_of(pictures, 1), 1)
    scheduler.run(again)
    assert again.reason == "length"


def test_a_cancelled_prompt_computes_no_further_picture(scheduler, pictures, run):
    """It ends before its next picture, and the features that it had are freed."""
    shown = run.request("shown", prompt_of(pictures, 1, 2, 3), 1)
    run.at_picture = lambda number: scheduler.cancel(shown)
    scheduler.submit(shown)
    steps(scheduler, lambda: shown.ended)
    assert (shown.reason, run.events, run.held) == (CANCELLED, ["picture"], 0)


def test_features_leave_with_the_end_of_the_prompt(scheduler, pictures, run):
    """An answer that goes on has none; one of a closed scheduler neither; a refused prompt computes none."""
    shown, waiting = (
        run.request("shown", prompt_of(pictures, 1), 9),
        run.request("later", prompt_of(pictures, 2, 3), 9),
    )
    for each in (shown, waiting):
        scheduler.submit(each)
    steps(scheduler, lambda: run.events.count("picture") == 2)
    assert (shown.ended, waiting.ended, run.held) == (False, False, 1)
    scheduler.close()
    assert run.held == 0
    assert isinstance(waiting.error, UserError)
    with pytest.raises(UserError):
        scheduler.submit(run.request("refused", prompt_of(pictures, 4), 1))
    assert run.events.count("picture") == 2


def test_prompts_of_equal_tokens_have_features_of_their_own(scheduler, pictures, run):
    """The end of one of two answers to one prompt takes nothing from the other."""
    tokens = prompt_of(pictures, 1, 2)
    one, other = (run.request(name, tokens, 2) for name in ("one", "other"))
    scheduler.submit(one)
    scheduler.submit(other)
    steps(scheduler, lambda: "picture" in run.events)
    scheduler.cancel(one)
    steps(scheduler, lambda: other.ended)
    assert (one.reason, other.reason, run.events.count("picture")) == (CANCELLED, "length", 3)


def test_a_step_computes_no_picture(engine, pictures, run):
    """A caller that has forgotten it gets an error, and no sequence changes."""
    tokens, sequence = prompt_of(pictures, 1), engine.sequences.new()
    segment = Segment(sequence, tuple(tokens), PromptAttention(), pictures=tokens.pictures)
    with pytest.raises(ValueError, match="features of the picture at token 2"):
        engine.step(Step((segment,)))
    assert (sequence.length, run.events) == (0, [])
    own = engine.prefill(sequence, tokens)
    assert (sequence.length, len(run.events), run.held) == (len(tokens), 1, 0)
    assert own.isfinite().all()
    engine.sequences.end(sequence)


def test_neighbouring_pictures_have_positions_of_their_own(pictures):
    """A picture begins after the longer side of the one before it, also without a token between them."""
    read = [pictures.read(a_picture(seed, *size)) for seed, size in ((1, (96, 64)), (2, (64, 64)))]
    assert [each.grid for each in read] == [(1, 4, 6), (1, 4, 4)]
    positions = pictures.placed([5, PICTURE, PICTURE, 9], read).pictures.positions
    first = [(1, 1 + y, 1 + x) for y in range(2) for x in range(3)]
    second = [(4, 4 + y, 4 + x) for y in range(2) for x in range(2)]
    assert positions.T.tolist() == [list(each) for each in [(0, 0, 0), *first, *second, (6, 6, 6)]]
