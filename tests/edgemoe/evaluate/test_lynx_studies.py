"""Studies of remapped experts on the tiny model: the changes of each row, and the parts that stay as they were."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from small_tokenizer import a_tokenizer

from edgemoe.engine.engine import StoreModel
from edgemoe.errors import UserError
from edgemoe.evaluate import accuracy
from edgemoe.evaluate.accuracy import ChatTasks, engine_conversations
from edgemoe.evaluate.arm import Arm, Variation
from edgemoe.evaluate.lynx import chats
from edgemoe.evaluate.lynx.arms import parts_of
from edgemoe.evaluate.lynx.cached import cached_plan
from edgemoe.evaluate.lynx.chats import TogetherTasks, accuracy_by_kind, shuffled
from edgemoe.evaluate.lynx.rules import agreeing, quarters, resident_first
from edgemoe.evaluate.plans import possible_arms
from edgemoe.evaluate.request import EvalRequest
from edgemoe.evaluate.rows import EvalRow, gain, setting_row, with_pairs
from edgemoe.evaluate.run import run_eval
from edgemoe.evaluate.studies import study_arms
from edgemoe.evaluate.table import quality_lines, together_lines
from edgemoe.evaluate.tasks import Task, Turn, held_out_tasks
from edgemoe.experts.use import ExpertUse
from edgemoe.policy.remapping import Movable, Remapping
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.base import ExpertKey

FOUR = RunSettings.uniform(4)
FINE = Remapping(8, 4)
"""Bins that are fine enough for a model with random weights, whose logits differ little."""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words = ("a", "quick", "fox", "jumps", "over", "lazy", "dogs", "while", "another", "sleeps")
    path.write_text(" ".join(random.Random(3).choices(words, k=400)), "utf-8")
    return path


@pytest.fixture(scope="module")
def evaluate(tiny_store, checkpoint, text):
    """Returns a function that evaluates arms on windows of 12 tokens: rows by variation."""

    def run(arms: list[Arm], **changes: object) -> dict[str | None, EvalRow]:
        request = {
            "text": text,
            "reference": checkpoint,
            "tokens": 96,
            "window": 12,
            "task_count": 0,
            "seed": 0,
        }
        report = run_eval(StoreModel.open(tiny_store), EvalRequest(**request | changes, arms=tuple(arms)))
        return {row.variation: row for row in report.rows[1:]}

    return run


def sensitivity(*variations: Variation) -> list[Arm]:
    """Arms of four windows together."""
    made = [replace(each, remapping=FINE) for each in variations]
    return [Arm(FOUR, ("decode",), "lynx-sensitivity", 4, each) for each in made]


@pytest.mark.e2e
def test_parts_of_the_freedom_change_less_than_all_of_it(evaluate):
    """Nothing keeps every choice; all has the counts of --lynx; a rank, layers or tokens change fewer pairs."""
    rows = evaluate(
        [
            Arm(FOUR, ("decode",), "lynx", 4),
            *sensitivity(
                Variation("nothing", only=Movable(bins=())),
                Variation("all"),
                Variation("rank 2", only=Movable(ranks=(1,))),
                Variation("sixth 1 of the layers", part=0),
                Variation("sixth 4 of the layers", part=3),
                *(Variation(f"quarter {i + 1} of the tokens", quarter=i) for i in range(4)),
            ),
        ]
    )
    own, nothing, everything = rows[None], rows["nothing"], rows["all"]
    assert (nothing.remapped, nothing.active) == (0, 1)
    assert nothing.kl == pytest.approx(own.kl, rel=0.1)
    assert everything.remapped > 0
    assert everything.active < 1
    assert 0 < rows["rank 2"].remapped <= everything.remapped
    # The tiny model has experts in two layers, which are the first and the fourth of six parts.
    first, second = (rows[f"sixth {i} of the layers"] for i in (1, 4))
    assert first.remapped > 0
    assert second.remapped > 0
    assert first.active > everything.active
    assert all(0 < rows[f"quarter {i + 1} of the tokens"].remapped < everything.remapped for i in range(4))
    lines = quality_lines(list(rows.values()))
    assert any("rank 2" in line for line in lines)


@pytest.mark.e2e
def test_the_rule_all_is_the_option(evaluate):
    """Through modules as many pairs change as with --lynx in the kernel, but for what rounding moves."""
    rows = evaluate([Arm(FOUR.with_(remapping=FINE), ("decode",), "lynx", 4), *sensitivity(Variation("all"))])
    kernel, modules = rows[None], rows["all"]
    assert modules.remapped == pytest.approx(kernel.remapped, rel=0.05)
    assert modules.active == pytest.approx(kernel.active, rel=0.05)


@pytest.mark.e2e
def test_phases_agree_alone(evaluate):
    """Steps of the other phase are not counted, and neither phase has the figures of the halves alone."""
    rows = evaluate(sensitivity(*(Variation(name, phases=of) for name, of in PHASED.items())))
    assert rows["neither phase"].active is None
    assert rows["prefill alone"].remapped > 0
    assert rows["decode alone"].remapped > 0
    # Of each window of 12 tokens the last 5 are predicted after a prompt of 6 and a first new token.
    assert {row.tokens for row in rows.values()} == {8 * 5}
    assert len({row.kl for row in rows.values()}) == 3


PHASED = {"neither phase": (), "prefill alone": ("prefill",), "decode alone": ("decode",)}


def test_a_sixth_of_the_layers_agrees():
    """Six layers, one per part; one row keeps its own order, and so do layers of other parts."""
    logits = torch.tensor([[5.0, 2.1, 2.0], [0.0, 1.0, 5.0]])
    agreed, own = [[0, 2], [2, 0]], [[0, 1], [2, 1]]
    for part, free in ((0, (2,)), (1, (3,)), (4, (8,)), (None, (2, 3, 5, 7, 8, 9))):
        choose = agreeing(Variation("", part=part), (2, 3, 5, 7, 8, 9))
        for layer in (2, 3, 5, 7, 8, 9):
            assert choose(layer, logits, 2).tolist() == (agreed if layer in free else own)
            assert choose(layer, logits[:1], 2).tolist() == own[:1]


def test_a_quarter_of_the_tokens_agrees():
    """Tokens by the variance of their probabilities: the flattest is the least sure, and only its experts change."""
    sure = torch.tensor([3.0, 1.0, 9.0, 6.0])
    logits = sure.unsqueeze(1) * torch.tensor([[1.0, 0.52, 0.5, 0.0]])
    assert quarters(logits).tolist() == [1, 0, 3, 2]
    assert quarters(torch.zeros(8, 5)).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    logits[3] = torch.tensor([0.0, 0.0, 9.0, 0.0])  # its votes are for expert 2
    own = logits.argsort(dim=1, descending=True, stable=True)[:, :2].tolist()
    agreed = agreeing(Variation(""), (0,))(0, logits, 2).tolist()
    assert agreed != own
    for quarter, token in enumerate(quarters(logits).argsort().tolist()):
        got = agreeing(Variation("", quarter=quarter), (0,))(0, logits, 2).tolist()
        assert got == [agreed[i] if i == token else own[i] for i in range(4)]


def test_resident_experts_come_first(open_engine, tiny_store):
    """Among the layer's own experts, the ones in the tier come first."""
    engine = open_engine(tiny_store, level=4)
    engine.vram.resident = lambda: {ExpertKey(0, 2): 4, ExpertKey(2, 1): 4}
    logits = torch.tensor([[5.0, 2.1, 2.0, 1.9]])
    assert resident_first(engine, 0.5)(0, logits, 2).tolist() == [[0, 2]]
    assert resident_first(engine, 0.5)(2, logits, 2).tolist() == [[0, 1]]
    assert resident_first(engine, 100)(0, logits, 2).tolist() == [[0, 1]]


@pytest.mark.e2e
def test_residency_reads_less(evaluate, tiny_store):
    """At a cache of half of the experts, wide bins read fewer bytes than the tokens' own choice, and cost KL."""
    arms = [
        Arm(
            FOUR,
            ("decode",),
            "residency",
            cache=0.5,
            variation=Variation(f"{alpha}", alpha=alpha) if alpha else None,
        )
        for alpha in (0.0, 0.2)
    ]
    rows = evaluate([Arm(FOUR, ("decode",), "table"), *arms])
    own, resident = rows[None], rows["0.2"]
    assert own.cache == resident.cache == 0.5
    assert 0 < resident.bytes_per_token < own.bytes_per_token
    assert resident.kl > own.kl
    store = StoreModel.open(tiny_store)
    plan = cached_plan(store, FOUR, 0.5, 12)
    assert plan.plane_bytes == 8 * store.form.bytes_at(4)  # two layers of eight experts


QUESTIONS = [
    Task("capitals", (Turn("What is the capital of France?", "x"),)),
    Task("conversation", (Turn("fox", "x"), Turn("and again", "x"), Turn("over", "x"))),
    Task("spelling", (Turn("Spell dog.", "x"),)),
    Task("sorting", (Turn("Sort 3, 1.", "x"), Turn("over the lazy", "x"))),
]


def test_tasks_together_are_answered_as_alone(open_engine, tiny_store, monkeypatch):
    """Three at once have the answers of one after another; the fourth begins when one has ended."""
    monkeypatch.setattr(chats, "ANSWER_TOKENS", 6)
    monkeypatch.setattr(accuracy, "ANSWER_TOKENS", 6)
    engine, tokenizer, answered = open_engine(tiny_store, level=4, context=256, parallel=3), a_tokenizer(), []

    def judge(turn: Turn, text: str) -> bool:
        answered.append((turn.question, text))
        return "e" in text

    monkeypatch.setattr(chats, "is_right", judge)
    done: list[None] = []
    together = TogetherTasks(engine, tokenizer, frozenset(), lambda: done.append(None))
    right, use = together.run(QUESTIONS, Arm(engine.settings, ("decode",), "lynx-tasks", 3))
    with engine_conversations(engine, ChatTasks({}, tokenizer, frozenset())) as start:
        want = [[answer(turn.question) for turn in task.turns] for task in QUESTIONS for answer in [start()]]
    assert right == [["e" in text for text in texts] for texts in want]
    pairs = [(turn.question, text) for task, texts in zip(QUESTIONS, want, strict=True)
             for turn, text in zip(task.turns, texts, strict=True)]  # fmt: skip
    assert sorted(answered) == sorted(pairs)
    assert len(done) == len(QUESTIONS)
    assert sum(use.scheduled.values()) > 0
    assert engine.memory.kv_bytes == 0


def test_a_request_that_fails_ends_the_tasks(open_engine, tiny_store, monkeypatch):
    """The error of a step reaches the caller, and no sequence is left."""
    engine = open_engine(tiny_store, level=4, context=256, parallel=3)
    monkeypatch.setattr(type(engine), "begin", lambda *step, **how: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        TogetherTasks(engine, a_tokenizer(), frozenset(), lambda: None).run(
            QUESTIONS, Arm(engine.settings, ("decode",), "lynx-tasks", 3)
        )
    assert engine.memory.kv_bytes == 0


def test_turns_are_compared_pair_by_pair():
    """By hand: two won, one lost of eight turns, a mean of 1/8 and its standard error."""
    row = setting_row(Arm(FOUR, ("decode",), "lynx-tasks", 8), "decode", None, ExpertUse())
    compared = with_pairs(row, [True] * 5 + [False] * 3, [False, False, True, True, True, True, False, False])
    assert (compared.turns, compared.won, compared.lost) == (8, 2, 1)
    values = torch.tensor([1, 1, 0, 0, 0, -1, 0, 0], dtype=torch.float64)
    mean, error = gain(compared)
    assert mean == pytest.approx(float(values.mean()))
    assert error == pytest.approx(float(values.std(correction=0)) / 8**0.5)
    assert any("12.50" in line for line in together_lines([compared]))
    assert together_lines([row]) == []


def test_tasks_in_random_order_and_by_kind():
    tasks = {kind: held_out_tasks(kind, 5) for kind in ("capitals", "spelling")}
    mixed = shuffled(tasks, 1)
    assert sorted(map(repr, mixed)) == sorted(repr(task) for of in tasks.values() for task in of)
    assert [task.kind for task in mixed[:5]] != ["capitals"] * 5
    right = [[task.kind == "spelling"] for task in mixed]
    assert accuracy_by_kind(mixed, right) == {"capitals": 0, "spelling": 1}


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        (Arm(FOUR, ("decode",), "lynx", 9), "9 windows of the text for --study lynx, got 8"),
        (Arm(FOUR, ("decode",), "lynx-tasks", 8), "8 chat tasks for --study lynx-tasks, got 0"),
        (
            Arm(FOUR, ("decode",), "residency", cache=0.5),
            "2 windows of the text for --study residency, got 1",
        ),
    ],
)
def test_fewer_than_a_study_needs_are_refused(evaluate, arm, message):
    """Windows and tasks at once, and a window after the one that fills a cache."""
    with pytest.raises(UserError, match=message):
        evaluate([arm], **({"window": 96} if arm.cache else {}))


def test_arms_of_the_studies():
    """Names are distinct; tasks begin with each token's own choice, residency with exact 4; ranks are numbered."""
    for study in ("lynx", "lynx-sensitivity", "lynx-tasks", "residency"):
        arms = study_arms(study)
        assert len({arm.name for arm in arms}) == len(arms)
        assert {arm.study for arm in arms} == {study}
    plain, *agreeing = study_arms("lynx-tasks")
    assert plain.settings.remapping is None
    assert {arm.batch for arm in agreeing} == {8, 16, 32, 64}
    bins = {
        (arm.settings.remapping.alpha, arm.settings.remapping.bins) for arm in agreeing if arm.batch == 16
    }
    assert bins == {(1, 1), (1, 2), (2, 4), (4, 8), (2, 6)}
    assert {arm.batch for arm in study_arms("lynx", (1, 2, 4))} == {2, 4}
    with pytest.raises(UserError, match=r"--batch above 1 for --study lynx, got 1"):
        study_arms("lynx", (1,))
    assert study_arms("residency")[0].settings == FOUR
    ranks = [arm.variation.ranks_needed for arm in study_arms("lynx-sensitivity")]
    assert [rank for rank in ranks if rank] == list(range(1, 9))


@pytest.mark.e2e
def test_ranks_beyond_the_models_are_left_out(evaluate):
    """A token of the tiny model has two experts."""
    ranks = [Variation(f"rank {i + 1}", only=Movable(ranks=(i,))) for i in range(4)]
    assert set(evaluate(sensitivity(*ranks))) == {"rank 1", "rank 2"}


def test_parts_of_the_depth_without_a_layer_are_left_out(tiny_store):
    """The tiny model has fewer layers with experts than the study has parts."""
    store = StoreModel.open(tiny_store)
    parts = parts_of(len(store.manifest.layers))
    arms = tuple(
        arm for arm in study_arms("lynx-sensitivity") if arm.variation and arm.variation.part is not None
    )
    assert [arm.variation.part for arm in possible_arms(arms, store)[0]] == sorted({*parts}) != list(range(6))
    assert parts_of(6) == list(range(6))
    assert parts_of(3) == [0, 2, 4]
