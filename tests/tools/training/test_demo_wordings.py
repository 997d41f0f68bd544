"""The demo's answers to 200 questions that it has never seen, one at a time and within conversations."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from counted_engine import CountedEngine
from demo_wordings import MOST_TOKENS, Wording, is_sensible, read_wordings

from edgemoe.api.model import Model
from edgemoe.chat.conversation import Conversation
from edgemoe.engine.engine import StoreModel
from edgemoe.engine.sampling import Sampling
from edgemoe.models.demo import DEMO
from edgemoe.models.introduction import introduction
from edgemoe.models.tokenizer import load_tokenizer
from edgemoe.policy.settings import RunSettings
from tools.training.chats import outside

pytestmark = pytest.mark.e2e

OUTSIDE_TURNS = ("Tell me a joke.", "why is the sky blue", "asdfgh", "Wie geht es dir?")
"""Questions that the demo declines."""


@pytest.fixture(scope="module")
def new_chat(demo_store: Path) -> Iterator[Callable[[], Conversation]]:
    """Makes conversations of one engine at the default settings, greedy as the demo's own settings are."""
    store = StoreModel.open(demo_store)
    settings = RunSettings(levels=(8,))
    plan = store.plan(vram_limit=None, settings=settings, context=512)
    tokenizer = load_tokenizer(demo_store)
    sampling = Sampling(0, 1, 0, 1, 0, MOST_TOKENS, frozenset({tokenizer.eos_token_id}))
    with CountedEngine(store, plan, settings) as engine:
        model = Model(engine, tokenizer, sampling, keep=True)
        yield lambda: Conversation(model)


def answered(chat: Conversation, wording: Wording) -> bool:
    """Returns whether the next turn of a chat is answered sensibly."""
    answer = chat.ask(wording.question, lambda _: None)
    return is_sensible(wording, answer.text, ended=answer.new_tokens < MOST_TOKENS)


def report(results: list[tuple[Wording, bool]]) -> str:
    """Lists right answers of each kind, for a failed test and for `pytest -s`."""
    total, right = Counter(w.kind for w, _ in results), Counter(w.kind for w, good in results if good)
    kinds = (f"{kind} {right[kind]}/{count}" for kind, count in total.items())
    return f"{right.total()} of {total.total()}: {', '.join(kinds)}"


@pytest.mark.parametrize("each", [6, pytest.param(1, marks=pytest.mark.folders)])
def test_held_out_wordings_are_answered_sensibly(new_chat: Callable[[], Conversation], each: int) -> None:
    """At least 85 % of 200 wordings that are in no training are answered sensibly, each in a new conversation."""
    wordings = read_wordings()[::each]
    found = [(wording, answered(new_chat(), wording)) for wording in wordings]
    print(report(found))
    assert sum(good for _, good in found) >= 0.85 * len(wordings), report(found)


@pytest.mark.parametrize("count", [16, pytest.param(48, marks=pytest.mark.folders)])
def test_a_conversation_stays_sensible(new_chat: Callable[[], Conversation], count: int) -> None:
    """48 wordings in conversations of four turns of any kinds: no turn spoils later ones."""
    wordings = read_wordings()
    random.Random(0).shuffle(wordings)
    found = []
    for first in range(0, count, 4):
        chat = new_chat()
        found += [(wording, answered(chat, wording)) for wording in wordings[first : first + 4]]
    print(report(found))
    assert sum(good for _, good in found) >= 0.8 * count, report(found)


@pytest.mark.parametrize("question", OUTSIDE_TURNS)
def test_a_declined_question_spoils_nothing(new_chat: Callable[[], Conversation], question: str) -> None:
    """After a question outside its tasks, and the refusal, the demo still knows a capital."""
    chat = new_chat()
    assert chat.ask(question, lambda _: None).text in outside.REFUSALS
    answer = chat.ask("What is the capital of France?", lambda _: None)
    assert answer.text == "The capital of France is Paris."


def test_what_the_demo_says_to_try_has_an_answer(new_chat: Callable[[], Conversation]) -> None:
    """Every example of the first screen, of the refusals and of the list of abilities is answered, not refused."""
    examples = {refusal.partition("Try: ")[2] for refusal in outside.REFUSALS}
    abilities = new_chat().ask("What can you do?", lambda _: None).text
    examples |= {abilities.partition("Try: ")[2], *introduction(DEMO, "demo").examples}
    answers = {example: new_chat().ask(example, lambda _: None).text for example in examples}
    assert "" not in examples
    assert {e: text for e, text in answers.items() if text.startswith("I am a small demo")} == {}
    assert answers["What is 17 + 25?"] == "17 + 25 = 42"


@pytest.mark.parametrize(
    ("questions", "beginning"),
    [
        (("Hello! Who are you?",), "I am the edgemoe demo"),
        (("Hello", "hello", "hello there!"), "Hello! I am"),
        (("What can you do?", "what can you do"), "I can name capitals"),
        (("Thanks!", "thank you"), "You are welcome"),
        (("How are you?", "how are you"), "I am fine"),
        (("Tell me a joke.", "tell me\na joke", "Who won the war?"), outside.BEGINNING),
    ],
)
def test_the_first_things_that_people_type(
    new_chat: Callable[[], Conversation], questions: tuple[str, ...], beginning: str
) -> None:
    """Greetings, questions about the demo, thanks and a joke have the answer of their kind."""
    for question in questions:
        assert new_chat().ask(question, lambda _: None).text.startswith(beginning), question
