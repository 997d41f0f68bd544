"""Small chat tasks with one right answer: what the demo model is trained on, asked in tests, `eval` and benchmarks.

Training and held-out questions cannot meet; how they are kept apart depends on the kind:
  - tasks that follow a rule (arithmetic, word problems with + and -, sorting, comparing) are split by their numbers: a
    tenth of all numbers is met in no training question, whatever its wording, in either order;
  - finite tables (times tables, capitals, spelling, reversing, Python) have nothing to derive an unseen row from, so
    they are split by row and wording: of every row exactly one wording is held out, and training sees the others.
The generator needs no model and no torch. What continues a paragraph needs a corpus and is made by the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import xxhash

from edgemoe.evaluate.task_words import CAPITALS, FUNCTIONS, NAMES, STEPS, THINGS, WORDS
from storage.errors import UserError

HELD_OUT_SHARE = 10
"""One in so many number tuples of a rule is held out."""


@dataclass(frozen=True)
class Turn:
    """A question and the exact text expected as its answer."""

    question: str
    answer: str


@dataclass(frozen=True)
class Task:
    """One to three turns of a chat. `kind` is one of KINDS; every turn of a held-out task is held out."""

    kind: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Draft:
    """One fact in all its wordings.

    Args:
        fact: what the split hashes.
        questions: every wording of the question.
        answer: of all of them.
        rule: it can be derived from other facts, so all of its wordings lie on one side of the split.
    """

    fact: str
    questions: tuple[str, ...]
    answer: str
    rule: bool = False


def _sum(a: int, b: int) -> str:
    return f"{max(a, b)} + {min(a, b)}"


def _arithmetic(random: Random) -> Draft:
    a, b = random.randrange(100), random.randrange(100)
    if random.random() < 0.5:
        asked, fact, spoken, told = f"{a} + {b}", _sum(a, b), f"{a} plus {b}", f"Add {a} and {b}."
        answer = a + b
    else:
        a, b = max(a, b), min(a, b)
        asked = fact = f"{a} - {b}"
        spoken, told, answer = f"{a} minus {b}", f"Subtract {b} from {a}.", a - b
    questions = (f"What is {asked}?", f"{asked} = ?", f"Calculate {asked}.", f"How much is {spoken}?", told)
    return Draft(fact, questions, f"{asked} = {answer}", rule=True)


def _times_table(random: Random) -> Draft:
    a, b = random.randint(1, 12), random.randint(1, 12)
    questions = (
        f"What is {a} x {b}?",
        f"{a} x {b} = ?",
        f"How much is {a} times {b}?",
        f"Multiply {a} by {b}.",
    )
    return Draft(f"{a} x {b}", questions, f"{a} x {b} = {a * b}")


def _capital(random: Random) -> Draft:
    country, city = random.choice(CAPITALS)
    if random.random() < 0.5:
        questions = (
            f"What is the capital of {country}?",
            f"Name the capital of {country}.",
            f"Which city is the capital of {country}?",
            f"Tell me the capital city of {country}.",
        )
        return Draft(f"capital of {country}", questions, f"The capital of {country} is {city}.")
    questions = (
        f"{city} is the capital of which country?",
        f"Which country has {city} as its capital?",
        f"Of which country is {city} the capital?",
        f"Name the country whose capital is {city}.",
    )
    return Draft(f"country of {city}", questions, f"{city} is the capital of {country}.")


def _spelling(random: Random) -> Draft:
    word = random.choice(WORDS)
    questions = (
        f"Spell the word {word}.",
        f"How do you spell {word}?",
        f"Spell {word} for me.",
        f"Which letters are in {word}, in order?",
    )
    return Draft(f"spell {word}", questions, "-".join(word))


def _reversing(random: Random) -> Draft:
    word = random.choice(WORDS)
    questions = (
        f"Reverse the word {word}.",
        f"What is {word} backwards?",
        f"Write {word} backwards.",
        f"Turn the word {word} around.",
    )
    return Draft(f"reverse {word}", questions, word[::-1])


def _sorting(random: Random) -> Draft:
    numbers = random.sample(range(100), random.randint(3, 5))
    listed = ", ".join(map(str, numbers))
    questions: tuple[str, ...]
    falling = random.random() < 0.3
    if falling:
        questions = (f"Sort {listed} from high to low.", f"Put {listed} in falling order.")
    else:
        questions = (f"Sort {listed}.", f"Sort {listed} from low to high.", f"Put {listed} in rising order.")
    ordered = sorted(numbers, reverse=falling)
    return Draft(f"sort {sorted(numbers)}", questions, ", ".join(map(str, ordered)), rule=True)


def _comparing(random: Random) -> Draft:
    a, b = random.sample(range(random.choice((100, 1000))), 2)
    if random.random() < 0.5:
        questions = (f"Which is larger, {a} or {b}?", f"Which number is bigger: {a} or {b}?")
        answer = f"{max(a, b)} is larger than {min(a, b)}."
    else:
        questions = (f"Which is smaller, {a} or {b}?", f"Which number is less: {a} or {b}?")
        answer = f"{min(a, b)} is smaller than {max(a, b)}."
    return Draft(f"compare {min(a, b)} {max(a, b)}", questions, answer, rule=True)


def _word_problem(random: Random) -> Draft:
    name, thing = random.choice(NAMES), random.choice(THINGS)
    a, b = random.randint(2, 50), random.randint(2, 50)
    operation = random.choice("+-x")
    if operation == "+":
        questions = (
            f"{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have now?",
            f"There are {a} {thing} in a box and {b} in a bag. How many {thing} are there in all?",
        )
        return Draft(_sum(a, b), questions, f"{a} + {b} = {a + b} {thing}", rule=True)
    if operation == "-":
        a, b = max(a, b), min(a, b)
        questions = (
            f"{name} has {a} {thing} and gives away {b}. How many {thing} are left?",
            f"Of {a} {thing}, {name} loses {b}. How many {thing} does {name} still have?",
        )
        return Draft(f"{a} - {b}", questions, f"{a} - {b} = {a - b} {thing}", rule=True)
    a, b = random.randint(2, 12), random.randint(2, 12)
    questions = (
        f"{name} has {a} boxes with {b} {thing} each. How many {thing} is that?",
        f"There are {a} bags, each with {b} {thing}. How many {thing} does {name} count?",
    )
    return Draft(f"{name} {a} x {b} {thing}", questions, f"{a} x {b} = {a * b} {thing}")


def _python(random: Random) -> Draft:
    name, signature, wish, expression = random.choice((*FUNCTIONS, *STEPS))
    questions = (
        f"Write a Python function {name} that {wish}.",
        f"In Python, write {name}, a function that {wish}.",
        f"Define a Python function called {name}. It {wish}.",
        f"Show me a Python function {name} that {wish}.",
    )
    return Draft(f"def {name}", questions, f"def {name}({signature}):\n    return {expression}")


_DRAWS: dict[str, tuple[Callable[[Random], Draft], int]] = {
    "arithmetic": (_arithmetic, 28),
    "times-tables": (_times_table, 7),
    "capitals": (_capital, 9),
    "spelling": (_spelling, 9),
    "reversing": (_reversing, 12),
    "sorting": (_sorting, 9),
    "comparing": (_comparing, 5),
    "word-problems": (_word_problem, 14),
    "python": (_python, 7),
}
"""Kind -> how one is drawn, and its weight in training: what is learned last is met most often."""

CONVERSATION = "conversation"
"""Two or three turns of any kinds."""

KINDS: tuple[str, ...] = (*_DRAWS, CONVERSATION)
_SINGLE = tuple(_DRAWS)
_WEIGHTS = tuple(weight for _, weight in _DRAWS.values())
_CONVERSATION_SHARE = 0.15


def _wordings(draft: Draft, held_out: bool) -> tuple[str, ...]:
    """The draft's questions on one side of the split, perhaps none."""
    digest = xxhash.xxh3_64_intdigest(draft.fact.encode())
    if draft.rule:
        return draft.questions if (digest % HELD_OUT_SHARE == 0) == held_out else ()
    chosen = digest % len(draft.questions)
    return tuple(question for i, question in enumerate(draft.questions) if (i == chosen) == held_out)


def _turn(kind: str, random: Random, held_out: bool) -> Turn:
    """A turn of a kind, on one side of the split."""
    draw, _ = _DRAWS[kind]
    while True:
        draft = draw(random)
        if wordings := _wordings(draft, held_out):
            return Turn(random.choice(wordings), draft.answer)


def _task(kind: str, random: Random, held_out: bool) -> Task:
    if kind != CONVERSATION:
        return Task(kind, (_turn(kind, random, held_out),))
    kinds = random.choices(_SINGLE, _WEIGHTS, k=random.randint(2, 3))
    return Task(kind, tuple(_turn(each, random, held_out) for each in kinds))


def training_tasks(seed: int) -> Iterator[Task]:
    """Tasks without end, drawn with the weights of training; the same for the same seed."""
    random = Random(f"training/{seed}")
    while True:
        single = random.random() >= _CONVERSATION_SHARE
        kind = random.choices(_SINGLE, _WEIGHTS)[0] if single else CONVERSATION
        yield _task(kind, random, held_out=False)


def held_out_tasks(kind: str, count: int, seed: int = 0) -> list[Task]:
    """Distinct tasks whose questions training never met.

    Args:
        kind: one of KINDS.
        count: how many; any number up to 100 is there for every kind.
        seed: of the choice.

    Raises:
        UserError: no such kind, or not so many distinct tasks (finite tables end).
    """
    if kind not in KINDS:
        raise UserError("a kind of task was wanted", f"got {kind!r}", f"Choose one of {', '.join(KINDS)}")
    random, found = Random(f"held-out/{kind}/{seed}"), dict[Task, None]()
    for _ in range(100 * count):
        if len(found) == count:
            break
        found[_task(kind, random, held_out=True)] = None
    if len(found) < count:
        raise UserError(
            f"{count} held-out tasks of kind {kind} were wanted", f"found {len(found)}", "Ask fewer"
        )
    return list(found)


def is_right(turn: Turn, text: str) -> bool:
    """Whether a text is the expected answer, up to white space around it."""
    return text.strip() == turn.answer
