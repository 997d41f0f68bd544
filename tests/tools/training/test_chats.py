"""Lessons of the demo next to its tasks: small talk, refusals, and questions as people type them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice
from random import Random

import pytest
from demo_wordings import BEGINNINGS, MOST_TOKENS, Wording, is_sensible, read_wordings

from edgemoe.evaluate.task_words import CAPITALS, FUNCTIONS, STEPS, WORDS
from edgemoe.evaluate.tasks import KINDS, Turn, held_out_tasks
from edgemoe.models.demo import DEMO
from edgemoe.models.tokenizer import load_tokenizer
from tools.training.chats import outside, small_talk, subjects
from tools.training.chats.phrasing import AFTER, BEFORE, TALK_AFTER, TALK_BEFORE, normalised, rephrase
from tools.training.chats.wordings import WORDINGS, pick_form
from tools.training.tasks import CHAT_KINDS, OUTSIDE, training_tasks

HELD_OUT = read_wordings()


@pytest.fixture(scope="module")
def trained() -> list[Turn]:
    return [turn for task in islice(training_tasks(11), 30_000) for turn in task.turns]


def test_200_wordings_are_held_out() -> None:
    """The table has 200 different questions, at least five of every kind of task and of chat."""
    kinds = Counter(wording.kind for wording in HELD_OUT)
    assert len({normalised(wording.question) for wording in HELD_OUT}) == 200
    assert set(kinds) == {*KINDS, *CHAT_KINDS} - {"conversation"}
    assert min(kinds.values()) >= 5
    assert set(BEGINNINGS) == set(CHAT_KINDS)


@pytest.mark.e2e
@pytest.mark.folders
def test_no_held_out_wording_is_drawn(trained: list[Turn]) -> None:
    """None of the 200 wordings is among the training questions, whatever their case, signs and spaces."""
    questions = {normalised(turn.question) for turn in trained}
    assert len(questions) > 15_000
    assert questions & {normalised(wording.question) for wording in HELD_OUT} == set()
    scored = {
        normalised(t.question) for kind in KINDS for task in held_out_tasks(kind, 100) for t in task.turns
    }
    # Short conversations of a held-out kind repeat single questions; none of them is trained on in any form.
    assert questions & scored == set()


SLOTS = {
    **outside._FILLED,
    "country": tuple(country for country, _ in CAPITALS),
    "other": tuple(city for _, city in CAPITALS),
    "wish": tuple(wish for _, _, wish, _ in (*FUNCTIONS, *STEPS)),
    "thing": (*outside._FILLED["thing"], *outside._FILLED["things"]),
    "name": (*outside._FILLED["name"], *(name for name, *_ in (*FUNCTIONS, *STEPS)), "plus", "minus"),
}
NUMBERS = dict.fromkeys(("a", "b", "n", "listed", "spaced", "joined"), r"[0-9 ]+") | {"sign": "[-+]"}


def pattern(template: str, before: Iterable[str], after: Iterable[str]) -> re.Pattern[str]:
    """Everything that a template can be filled to, after `normalised`, with words that may stand around it."""

    def values(part: str) -> str:
        if part in "[|]":
            return {"[": "(?:", "|": "|", "]": ")"}[part]
        if not (slot := re.fullmatch(r"\{(\w+)\}", part)):
            return r"\s*".join(map(re.escape, normalised(part).split()))
        name = slot[1]
        return NUMBERS.get(name) or f"(?:{'|'.join(re.escape(normalised(v)) for v in SLOTS[name])})"

    parts = [part for part in re.split(r"(\{\w+\}|[][|])", template) if part]
    left, right = ("|".join(re.escape(normalised(text)) for text in texts) for texts in (before, after))
    filled = "".join(rf"\s*{values(part)}\s*" for part in parts)
    return re.compile(rf"(?:{left})?\s*(?:{filled})\s*(?:{right})?".replace(r"\s*\s*", r"\s*"))


def patterns() -> Iterator[tuple[str, re.Pattern[str]]]:
    talk = (wording for intent in small_talk.INTENTS for wording in intent.wordings)
    tasks = (wording for table in WORDINGS.values() for wording in table)
    yield from ((wording, pattern(wording, TALK_BEFORE, TALK_AFTER)) for wording in talk)
    yield from (
        (wording, pattern(wording, BEFORE, AFTER))
        for wording in (*outside.QUESTIONS, *outside.REMARKS, *tasks)
    )


@pytest.mark.e2e
@pytest.mark.folders
def test_no_template_can_be_filled_to_a_held_out_wording() -> None:
    """No template yields one of the 200 wordings, with any subject and any polite words: a sample may miss it."""
    spell = pattern("[Spell|Write] {word}.", BEFORE, AFTER)
    assert spell.fullmatch(normalised("Please spell  Garden, thanks"))
    assert not spell.fullmatch(normalised("spell xylophone"))
    questions = [(wording.question, normalised(wording.question)) for wording in HELD_OUT]
    found = {
        question: template
        for template, filled in patterns()
        for question, text in questions
        if filled.fullmatch(text)
    }
    assert found == {}


def test_a_question_has_one_answer() -> None:
    """No wording stands under two intents, or under an intent and the refusals."""
    answers: dict[str, set[str]] = defaultdict(set)
    for intent in small_talk.INTENTS:
        for wording in intent.wordings:
            answers[normalised(wording)].add(intent.answer)
    for wording in (*outside.REMARKS, *subjects.FOREIGN, *outside.QUESTIONS):
        answers[normalised(wording)].add(outside.REFUSAL)
    assert {question: found for question, found in answers.items() if len(found) > 1} == {}


def test_unknown_subjects_are_unknown() -> None:
    """Subjects that the demo must decline are not among its lessons."""
    assert not set(subjects.UNKNOWN_COUNTRIES) & {country for country, _ in CAPITALS}
    assert not set(subjects.UNKNOWN_CITIES) & {city for _, city in CAPITALS}
    random = Random(0)
    assert not {outside._word(random) for _ in range(5_000)} & set(WORDS)


def test_questions_outside_are_refused_with_an_example() -> None:
    """Every refusal names itself a small demo and ends with a task that the demo has an answer to."""
    random = Random(1)
    drawn = {outside.draw(random)[1] for _ in range(2_000)}
    assert drawn == set(outside.REFUSALS)
    assert all(re.fullmatch(r"I am a small demo and do not know .*\. Try: .*[.?]", text) for text in drawn)


def test_every_answer_is_short() -> None:
    """No answer of small talk and no refusal has more than 48 tokens: a limit of 64 ends none of them early."""
    tokenizer = load_tokenizer(DEMO)
    answers = (*outside.REFUSALS, *(intent.answer for intent in small_talk.INTENTS))
    assert max(len(tokenizer(answer).input_ids) for answer in answers) <= 48 < MOST_TOKENS


def test_rephrasing_keeps_the_words() -> None:
    """A rephrased question is the question but for case, signs, spaces and polite words; many forms are drawn."""
    random, question = Random(2), "What is the capital of France?"
    forms = {rephrase(question, random) for _ in range(3_000)}
    assert all(normalised(question) in normalised(form) for form in forms)
    assert {"what is the capital of france", "What is the capital of France", question} <= forms
    assert any("\n" in form for form in forms)
    talk = {normalised(rephrase("How are you?", random, talk=True)) for _ in range(3_000)}
    assert {"how are you", "hey how are you", "how are you today"} <= talk


def test_choices_of_a_wording_are_all_made() -> None:
    """Each choice in brackets is drawn, also one inside another, and no bracket or double space is left."""
    random = Random(4)
    drawn = {pick_form("[say|[please|] spell] the [word |]{x}[| now]", random) for _ in range(500)}
    words = {"Say", "Please spell", "Spell"}
    assert drawn == {f"{a} the {b}{{x}}{c}" for a in words for b in ("word ", "") for c in ("", " now")}


def test_one_word_gets_no_polite_words() -> None:
    """ "Hello, hi" would be another question."""
    random = Random(3)
    assert {normalised(rephrase("Hi!", random)) for _ in range(2_000)} == {"hi"}


@pytest.mark.e2e
def test_chat_kinds_have_their_own_answers(trained: list[Turn]) -> None:
    """Questions of each chat kind are drawn in many forms, and tasks are the larger part of all turns."""
    answers = {intent.answer for intent in small_talk.INTENTS} | set(outside.REFUSALS)
    forms: dict[str, set[str]] = defaultdict(set)
    for turn in trained:
        forms[turn.answer].add(turn.question)
    assert min(len(forms[answer]) for answer in answers) > 50
    assert sum(turn.answer in answers for turn in trained) < 0.55 * len(trained)


@pytest.mark.parametrize(
    ("kind", "expected", "text", "ended", "sensible"),
    [
        ("arithmetic", "2 + 2 = 4", " 2 + 2 = 4\n", True, True),
        ("arithmetic", "2 + 2 = 4", "2 + 2 = 42", True, False),
        ("arithmetic", "2 + 2 = 4", "2 + 2 = 4", False, False),
        ("greeting", "Hello", "Hello! I am the edgemoe demo.", True, True),
        ("greeting", "Hello", "H", True, False),
        (OUTSIDE, "I am a small demo and", outside.REFUSAL, True, True),
        (OUTSIDE, "I am a small demo and", "I am a small demo and do not know that.", True, False),
        (OUTSIDE, "I am a small demo and", "The capital of Malta is Rome.", True, False),
    ],
)
def test_the_rule_of_a_sensible_answer(
    kind: str, expected: str, text: str, ended: bool, sensible: bool
) -> None:
    """A task needs its exact answer, small talk its beginning, a refusal its example; all must end."""
    assert is_sensible(Wording(kind, "?", expected), text, ended=ended) == sensible
