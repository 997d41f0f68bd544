"""Chat tasks: answers are right, training and held-out questions are disjoint, draws repeat."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from itertools import islice, pairwise

import pytest

from edgemoe.errors import UserError
from edgemoe.evaluate.task_words import CAPITALS, FUNCTIONS, STEPS, WORDS
from edgemoe.evaluate.tasks import CONVERSATION, KINDS, Task, Turn, held_out_tasks, is_right
from tools.training.tasks import CHAT_KINDS, OUTSIDE, training_tasks

SINGLE = [kind for kind in KINDS if kind != CONVERSATION]


@pytest.fixture(scope="module")
def training() -> list[Task]:
    return list(islice(training_tasks(seed=3), 60_000))


def numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def check_calculation(question: str, answer: str) -> None:
    sides = re.fullmatch(r"(\d+) ([-+x]) (\d+) = (\d+)( [a-z]+)?", answer)
    assert sides, answer
    a, b = int(sides[1]), int(sides[3])
    assert Counter(numbers(question)) == Counter((a, b))
    assert int(sides[4]) == {"+": a + b, "-": a - b, "x": a * b}[sides[2]]
    assert not sides[5] or sides[5].strip() in question


def check_sorting(question: str, answer: str) -> None:
    falling = bool(re.search("high to low|highest to the lowest|falling", question))
    assert Counter(numbers(question)) == Counter(numbers(answer))
    assert all((a > b) == falling for a, b in pairwise(numbers(answer)))


def check_comparing(question: str, answer: str) -> None:
    first, second = numbers(answer)
    assert Counter(numbers(question)) == Counter((first, second))
    assert (first > second) == bool(re.search("larger|bigger|greater", question))


def check_capital(question: str, answer: str) -> None:
    forward = re.fullmatch(r"The capital of (.*) is (.*)\.", answer)
    backward = re.fullmatch(r"(.*) is the capital of (.*)\.", answer)
    found = forward or backward
    assert found, answer
    country, city = (found[1], found[2]) if forward else (found[2], found[1])
    assert dict(CAPITALS)[country] == city
    assert (country if forward else city).lower() in question
    assert forward or country in city or country.lower() not in question


def check_spelling(question: str, answer: str) -> None:
    letters = answer.split("-")
    assert all(len(letter) == 1 for letter in letters)
    assert "".join(letters) in words(question)


def check_reversing(question: str, answer: str) -> None:
    assert "".join(reversed(answer)) in words(question)


def check_python(question: str, answer: str) -> None:
    scope: dict[str, object] = {}
    exec(answer, scope)
    [name] = [name for name in scope if name != "__builtins__"]
    assert name in words(question)
    assert re.fullmatch(r"def .*:\n    return .*", answer)


CHECKS = {
    "arithmetic": check_calculation,
    "times-tables": check_calculation,
    "word-problems": check_calculation,
    "sorting": check_sorting,
    "comparing": check_comparing,
    "capitals": check_capital,
    "spelling": check_spelling,
    "reversing": check_reversing,
    "python": check_python,
}


@pytest.mark.e2e
@pytest.mark.parametrize("kind", SINGLE)
def test_answers_are_right(kind: str, training: list[Task]) -> None:
    """Every answer is right by a check that is independent of the generator."""
    drawn = [task for task in training if task.kind == kind] + held_out_tasks(kind, 100)
    assert len(drawn) > 1000
    for task in drawn:
        [turn] = task.turns
        CHECKS[kind](" ".join(turn.question.split()).lower(), turn.answer)


def test_functions_do_what_they_say() -> None:
    """Functions of the table, run, return what their names and descriptions say."""
    expected = {
        "cube": ((3,), 27),
        "half": ((7,), 3.5),
        "is_odd": ((7,), True),
        "last": (([1, 2, 5],), 5),
        "mean": (([1, 2, 6],), 3),
        "backwards": (("abc",), "cba"),
        "smaller": ((4, 9), 4),
        "distance": ((4, 9), 5),
        "times_7": ((6,), 42),
        "minus_20": ((25,), 5),
        "above_3": ((3,), False),
    }
    scope: dict[str, object] = {}
    for name, parameters, _, expression in (*FUNCTIONS, *STEPS):
        scope[name] = eval(f"lambda {parameters}: {expression}")
    for name, (arguments, value) in expected.items():
        assert scope[name](*arguments) == value, name  # type: ignore[operator]


@pytest.mark.e2e
@pytest.mark.parametrize("kind", KINDS)
def test_held_out_questions_are_never_trained_on(kind: str, training: list[Task]) -> None:
    """100 distinct held-out tasks exist, and none of their questions is in training."""
    trained = {turn.question for task in training for turn in task.turns}
    held = held_out_tasks(kind, 100)
    assert len(set(held)) == 100
    assert {task.kind for task in held} == {kind}
    assert not trained & {turn.question for task in held for turn in task.turns}


@pytest.mark.e2e
def test_held_out_numbers_are_never_trained_on(training: list[Task]) -> None:
    """A held-out sum's operands are added in no training question, in any order or wording."""

    def added(task: Task) -> set[frozenset[int]]:
        found = (re.match(r"(\d+) \+ (\d+) =", turn.answer) for turn in task.turns)
        return {frozenset((int(m[1]), int(m[2]))) for m in found if m}

    trained = set().union(*map(added, training))
    held = set().union(*(added(t) for k in ("arithmetic", "word-problems") for t in held_out_tasks(k, 100)))
    assert len(trained) > 3000
    assert len(held) > 40
    assert not trained & held


@pytest.mark.e2e
def test_every_row_of_a_finite_table_is_trained_on(training: list[Task]) -> None:
    """Each row of a finite table is in training, in at least two wordings."""
    wordings: dict[str, set[str]] = defaultdict(set)
    for task in training:
        for turn in task.turns:
            wordings[turn.answer].add(turn.question)
    answers = [f"The capital of {country} is {city}." for country, city in CAPITALS]
    answers += [f"{city} is the capital of {country}." for country, city in CAPITALS]
    answers += ["-".join(word) for word in WORDS]
    answers += [f"{a} x {b} = {a * b}" for a in range(1, 13) for b in range(1, 13)]
    assert min(len(wordings[answer]) for answer in answers) >= 2


def test_tables_have_no_ambiguous_rows() -> None:
    """No country, capital, word or function appears twice: a question would have two right answers."""
    for column in (*zip(*CAPITALS, strict=True), WORDS, [name for name, *_ in (*FUNCTIONS, *STEPS)]):
        assert len(set(column)) == len(column)


@pytest.mark.e2e
def test_training_has_every_kind_and_up_to_four_turns(training: list[Task]) -> None:
    """Training draws every kind, and chats of one to four turns, of all tasks arithmetic and capitals most often."""
    kinds = Counter(task.kind for task in training)
    assert set(kinds) == {*KINDS, *CHAT_KINDS}
    tasks = [kind for kind, _ in kinds.most_common() if kind in SINGLE]
    assert set(tasks[:2]) == {"arithmetic", "capitals"}
    assert kinds.most_common(2)[1][0] == OUTSIDE
    assert {len(task.turns) for task in training} == {1, 2, 3, 4}
    assert all((len(task.turns) > 1) == (task.kind == CONVERSATION) for task in training)


@pytest.mark.e2e
def test_draws_repeat() -> None:
    """An equal seed gives equal tasks in another process; another seed gives others."""
    first = [turn.question for task in islice(training_tasks(1), 50) for turn in task.turns]
    script = (
        "from itertools import islice; from tools.training.tasks import training_tasks\n"
        "print([t.question for k in islice(training_tasks(1), 50) for t in k.turns])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ast.literal_eval(run.stdout) == first
    assert held_out_tasks("python", 20) == held_out_tasks("python", 20)
    assert held_out_tasks("python", 20) != held_out_tasks("python", 20, seed=1)
    assert first != [turn.question for task in islice(training_tasks(2), 50) for turn in task.turns]


@pytest.mark.e2e
def test_needs_no_torch() -> None:
    """The generator is imported without torch, so that a chat client can use it."""
    script = "import sys, edgemoe.evaluate.tasks; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.e2e
def test_tasks_that_do_not_exist_are_refused() -> None:
    """An unknown kind and a number of tasks above the distinct ones are user errors."""
    with pytest.raises(UserError, match="poetry"):
        held_out_tasks("poetry", 1)
    with pytest.raises(UserError, match="1000 held-out tasks of kind times-tables"):
        held_out_tasks("times-tables", 1000)


def test_is_right_compares_the_exact_text() -> None:
    """White space around an answer does not matter; anything else does."""
    turn = Turn("What is 2 + 2?", "2 + 2 = 4")
    assert is_right(turn, " 2 + 2 = 4\n")
    assert not is_right(turn, "2 + 2 = 5")
    assert not is_right(turn, "4")
    assert not is_right(turn, "2 + 2 = 42")
