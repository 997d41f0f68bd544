"""Small chat tasks with one right answer: questions of `eval` and benchmarks, and training data of the demo model.

Training and held-out questions are disjoint; the split depends on the kind:
  - tasks that follow a rule (arithmetic, word problems with + and -, sorting, comparing) are split by their numbers: a
    tenth of all tuples of numbers is in no training question, in any wording or order;
  - finite tables (times tables, capitals, spelling, reversing, Python) have unseen rows that follow from no other row,
    so they are split by row and wording: exactly one wording of every row is held out.
Training has further wordings and other chats (tools/training/tasks.py). None of these is held out here.
The generator needs no model and no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random

import xxhash

from edgemoe.errors import UserError
from edgemoe.evaluate.task_words import CAPITALS, FUNCTIONS, NAMES, STEPS, THINGS, WORDS

HELD_OUT_SHARE = 10
"""One in HELD_OUT_SHARE tuples of numbers of a rule is held out."""


@dataclass(frozen=True)
class Turn:
    """A question and the exact text of its answer."""

    question: str
    answer: str


@dataclass(frozen=True)
class Task:
    """One to four turns of a chat, all of them held out or none. `kind` is one of KINDS, or of training."""

    kind: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Draft:
    """One fact in all its wordings.

    Args:
        fact: key that the split hashes.
        questions: every wording of the question that may be held out.
        answer: the same for every wording.
        table: name of further wordings for training, never held out.
        slots: the words that fill their braces.
        rule: the fact follows from other facts, so all of its wordings lie on one side of the split.
    """

    fact: str
    questions: tuple[str, ...]
    answer: str
    table: str
    slots: Mapping[str, object]
    rule: bool = False


def _sum(a: int, b: int) -> str:
    return f"{max(a, b)} + {min(a, b)}"


def arithmetic(random: Random, below: int = 100) -> Draft:
    """Draws a sum or a difference of two numbers below a limit."""
    a, b = random.randrange(below), random.randrange(below)
    if random.random() < 0.5:
        term, fact, words, command = f"{a} + {b}", _sum(a, b), f"{a} plus {b}", f"Add {a} and {b}."
        answer, sign, name = a + b, "+", "plus"
    else:
        a, b = max(a, b), min(a, b)
        term = fact = f"{a} - {b}"
        words, command, answer = f"{a} minus {b}", f"Subtract {b} from {a}.", a - b
        sign, name = "-", "minus"
    questions = (f"What is {term}?", f"{term} = ?", f"Calculate {term}.", f"How much is {words}?", command)
    return Draft(
        fact, questions, f"{term} = {answer}", sign, {"a": a, "b": b, "sign": sign, "name": name}, rule=True
    )


def _times_table(random: Random) -> Draft:
    a, b = random.randint(1, 12), random.randint(1, 12)
    term = f"{a} x {b}"
    questions = (f"What is {term}?", f"{term} = ?", f"How much is {a} times {b}?", f"Multiply {a} by {b}.")
    return Draft(term, questions, f"{term} = {a * b}", "times-tables", {"a": a, "b": b})


def _capital(random: Random) -> Draft:
    country, city = random.choice(CAPITALS)
    if random.random() < 0.5:
        questions = (
            f"What is the capital of {country}?",
            f"Name the capital of {country}.",
            f"Which city is the capital of {country}?",
            f"Tell me the capital city of {country}.",
        )
        slots = {"country": country, "city": city, "other": _other_capital(city)}
        answer = f"The capital of {country} is {city}."
        return Draft(f"capital of {country}", questions, answer, "capital", slots)
    questions = (
        f"{city} is the capital of which country?",
        f"Which country has {city} as its capital?",
        f"Of which country is {city} the capital?",
        f"Name the country whose capital is {city}.",
    )
    answer = f"{city} is the capital of {country}."
    return Draft(f"country of {city}", questions, answer, "country", {"city": city})


def _other_capital(city: str) -> str:
    """Returns a capital of another country, always the same."""
    cities = [each for _, each in CAPITALS]
    return cities[(7 * cities.index(city) + 1) % len(cities)]


def _spelling(random: Random) -> Draft:
    word = random.choice(WORDS)
    questions = (
        f"Spell the word {word}.",
        f"How do you spell {word}?",
        f"Spell {word} for me.",
        f"Which letters are in {word}, in order?",
    )
    return Draft(f"spell {word}", questions, "-".join(word), "spelling", {"word": word})


def _reversing(random: Random) -> Draft:
    word = random.choice(WORDS)
    questions = (
        f"Reverse the word {word}.",
        f"What is {word} backwards?",
        f"Write {word} backwards.",
        f"Turn the word {word} around.",
    )
    return Draft(f"reverse {word}", questions, word[::-1], "reversing", {"word": word})


def sorting(random: Random, below: int = 100) -> Draft:
    """Draws three to five numbers below a limit to sort."""
    numbers = random.sample(range(below), random.randint(3, 5))
    listed = ", ".join(map(str, numbers))
    rising = (f"Sort {listed}.", f"Sort {listed} from low to high.", f"Put {listed} in rising order.")
    falling = (f"Sort {listed} from high to low.", f"Put {listed} in falling order.")
    reverse = random.random() < 0.3
    answer = ", ".join(map(str, sorted(numbers, reverse=reverse)))
    joined = f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
    slots = {"listed": listed, "spaced": listed.replace(",", ""), "joined": joined}
    table, questions = ("falling", falling) if reverse else ("rising", rising)
    return Draft(f"sort {sorted(numbers)}", questions, answer, table, slots, rule=True)


def _comparing(random: Random) -> Draft:
    a, b = random.sample(range(random.choice((100, 1000))), 2)
    low, high = min(a, b), max(a, b)
    if random.random() < 0.5:
        questions = (f"Which is larger, {a} or {b}?", f"Which number is bigger: {a} or {b}?")
        answer, table = f"{high} is larger than {low}.", "larger"
    else:
        questions = (f"Which is smaller, {a} or {b}?", f"Which number is less: {a} or {b}?")
        answer, table = f"{low} is smaller than {high}.", "smaller"
    return Draft(f"compare {low} {high}", questions, answer, table, {"a": a, "b": b}, rule=True)


def _word_problem(random: Random) -> Draft:
    name, thing = random.choice(NAMES), random.choice(THINGS)
    a, b = random.randint(2, 50), random.randint(2, 50)
    operation = random.choice("+-x")
    if operation == "+":
        questions = (
            f"{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have now?",
            f"There are {a} {thing} in a box and {b} in a bag. How many {thing} are there in all?",
        )
        slots = {"name": name, "thing": thing, "a": a, "b": b}
        return Draft(_sum(a, b), questions, f"{a} + {b} = {a + b} {thing}", "gain", slots, rule=True)
    if operation == "-":
        a, b = max(a, b), min(a, b)
        questions = (
            f"{name} has {a} {thing} and gives away {b}. How many {thing} are left?",
            f"Of {a} {thing}, {name} loses {b}. How many {thing} does {name} still have?",
        )
        slots = {"name": name, "thing": thing, "a": a, "b": b}
        return Draft(f"{a} - {b}", questions, f"{a} - {b} = {a - b} {thing}", "loss", slots, rule=True)
    a, b = random.randint(2, 12), random.randint(2, 12)
    questions = (
        f"{name} has {a} boxes with {b} {thing} each. How many {thing} is that?",
        f"There are {a} bags, each with {b} {thing}. How many {thing} does {name} count?",
    )
    slots = {"name": name, "thing": thing, "a": a, "b": b}
    return Draft(f"{name} {a} x {b} {thing}", questions, f"{a} x {b} = {a * b} {thing}", "boxes", slots)


def _python(random: Random) -> Draft:
    name, signature, wish, expression = random.choice((*FUNCTIONS, *STEPS))
    questions = (
        f"Write a Python function {name} that {wish}.",
        f"In Python, write {name}, a function that {wish}.",
        f"Define a Python function called {name}. It {wish}.",
        f"Show me a Python function {name} that {wish}.",
    )
    answer = f"def {name}({signature}):\n    return {expression}"
    return Draft(f"def {name}", questions, answer, "python", {"name": name, "wish": wish})


DRAWS: dict[str, tuple[Callable[[Random], Draft], int]] = {
    "arithmetic": (arithmetic, 28),
    "times-tables": (_times_table, 7),
    "capitals": (_capital, 9),
    "spelling": (_spelling, 9),
    "reversing": (_reversing, 12),
    "sorting": (sorting, 9),
    "comparing": (_comparing, 5),
    "word-problems": (_word_problem, 14),
    "python": (_python, 7),
}
"""Kind -> the function that draws a task, and its weight in a held-out conversation."""

CONVERSATION = "conversation"
"""A task of several turns of any kinds."""

KINDS: tuple[str, ...] = (*DRAWS, CONVERSATION)
"""Tasks with one right answer, which are held out and scored."""


def wordings(draft: Draft, *, held_out: bool) -> tuple[str, ...]:
    """Returns the draft's questions on one side of the split; may be empty."""
    digest = xxhash.xxh3_64_intdigest(draft.fact.encode())
    if draft.rule:
        return draft.questions if (digest % HELD_OUT_SHARE == 0) == held_out else ()
    chosen = digest % len(draft.questions)
    return tuple(question for i, question in enumerate(draft.questions) if (i == chosen) == held_out)


def _turn(kind: str, random: Random) -> Turn:
    """Draws a held-out turn of one of DRAWS."""
    draw, _ = DRAWS[kind]
    while True:
        draft = draw(random)
        if questions := wordings(draft, held_out=True):
            return Turn(random.choice(questions), draft.answer)


def _held_out(kind: str, random: Random) -> Task:
    if kind != CONVERSATION:
        return Task(kind, (_turn(kind, random),))
    weights = [weight for _, weight in DRAWS.values()]
    kinds = random.choices(tuple(DRAWS), weights, k=random.randint(2, 3))
    return Task(kind, tuple(_turn(each, random) for each in kinds))


def conversations(seed: int) -> Iterator[Task]:
    """Yields held-out conversations without end, the same for the same seed; they repeat in the long run."""
    random = Random(f"conversations/{seed}")
    while True:
        yield _held_out(CONVERSATION, random)


def held_out_tasks(kind: str, count: int, seed: int = 0) -> list[Task]:
    """Returns distinct tasks whose questions are not in training.

    Args:
        kind: one of KINDS.
        count: number of tasks; every kind has at least 100.
        seed: the seed of the choice.

    Raises:
        UserError: the kind is unknown, or has fewer distinct tasks (tables are finite).
    """
    if kind not in KINDS:
        raise UserError("a kind of task", repr(kind), f"choose one of {', '.join(KINDS)}")
    random, found = Random(f"held-out/{kind}/{seed}"), dict[Task, None]()
    for _ in range(100 * count):
        if len(found) == count:
            break
        found[_held_out(kind, random)] = None
    if len(found) < count:
        raise UserError(
            f"{count} held-out tasks of kind {kind}", str(len(found)), "use a smaller --task-count"
        )
    return list(found)


def is_right(turn: Turn, text: str) -> bool:
    """Returns whether a text is the answer, up to white space around it."""
    return text.strip() == turn.answer
