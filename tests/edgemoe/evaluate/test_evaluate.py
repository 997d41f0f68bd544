"""A whole evaluation of the tiny model: against transformers, and against what must not change its figures."""

from __future__ import annotations

import json
import logging
import math

import pytest
import torch
import typer
from conftest import a_tokenizer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from edgemoe.commands.eval import EPILOG, eval_command
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.evaluate import accuracy
from edgemoe.evaluate.arms import PHASES, Arm
from edgemoe.evaluate.run import EvalRequest, run_eval
from edgemoe.evaluate.studies import study_arms, table_arms
from edgemoe.evaluate.tasks import KINDS
from edgemoe.memory.plan import PREFILL_ROWS
from edgemoe.models.resolve import convert_checkpoint
from edgemoe.policy.levels import mean_bits
from edgemoe.policy.settings import RunSettings
from storage.errors import DoesNotFit, UserError

pytestmark = pytest.mark.e2e

FIELDS = (
    "setting",
    "phase",
    "levels",
    "retention",
    "effective_retention",
    "perplexity",
    "kl",
    "top1_agreement",
    "task_accuracy",
    "bits_per_weight_read",
)
LEVELS = ((8,), (4,), (2,), (4, 2), (4, 0))
FIGURES = ("perplexity", "kl", "top1_agreement", "effective_retention", "bits_per_weight_read")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog, while another one sleeps. " * 4, "utf-8")
    return path


@pytest.fixture(scope="module")
def evaluate(tiny_store, checkpoint, text):
    """Runs an evaluation of the tiny store; rows by (setting, phase)."""

    def run(arms: list[Arm], store=tiny_store, **changes):
        request = {
            "text": text,
            "reference": checkpoint,
            "tokens": 96,
            "window": 36,
            "task_count": 0,
            "seed": 0,
            "arms": tuple(arms),
        }
        report = run_eval(StoreModel.open(store), EvalRequest(**request | changes))
        return report, {(row.setting, row.phase): row for row in report.rows}

    return run


@pytest.fixture(scope="module")
def measured(evaluate):
    return evaluate(table_arms(LEVELS, (0.75, 1.0), reuse=False))


def figures(row) -> list[float | None]:
    return [getattr(row, name) for name in FIGURES]


def test_the_reference_comes_first(measured, checkpoint, text):
    """The first row is bf16, with transformers' own loss on every window, and no distance from itself."""
    report, _ = measured
    first = report.rows[0]
    assert (first.setting, first.levels, first.bits_per_weight_read) == ("bf16", "bf16", 16)
    assert (first.kl, first.top1_agreement) == (0, 1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    ids = a_tokenizer()(text.read_text())["input_ids"][:96]
    losses = []
    for start in range(0, 96, 36):
        window = torch.tensor([ids[start : start + 36]])
        with torch.inference_mode():
            losses.append((float(model(window, labels=window).loss), window.shape[1] - 1))
    total = sum(count for _, count in losses)
    expected = math.exp(sum(loss * count for loss, count in losses) / total)
    assert first.tokens == total == 93
    assert first.perplexity == pytest.approx(expected, rel=1e-4)


def test_rows_have_the_documented_fields(measured):
    """Every field of the JSON is there, a row for every setting and phase, and the whole is valid JSON."""
    report, rows = measured
    parsed = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert all(set(FIELDS) <= set(row) for row in parsed["rows"])
    names = ("exact 8", "exact 4", "exact 2", "4/2 r 0.75", "4/2 r 1", "4/0 r 0.75", "4/0 r 1")
    assert list(rows) == [("bf16", "prefill"), *((name, phase) for name in names for phase in PHASES)]


def test_fewer_bits_are_worse(measured):
    """KL rises from 8 to 4 to 2 bits, and 4/2 lies between 4 and 2, in both phases."""
    _, rows = measured
    for phase in PHASES:
        kls = [rows[name, phase].kl for name in ("exact 8", "exact 4", "4/2 r 0.75", "exact 2")]
        assert kls == sorted(kls)
        assert len(set(kls)) == len(kls)


def test_bits_read_are_those_of_the_planes(measured):
    """A uniform level reads its planes and parameters: 8.5, 4.5 and 2.5 bits; all of it counts as critical."""
    _, rows = measured
    for phase in PHASES:
        for name, bits in (("exact 8", 8.5), ("exact 4", 4.5), ("exact 2", 2.5)):
            row = rows[name, phase]
            assert (row.bits_per_weight_read, row.effective_retention) == (bits, 1)


def test_effective_retention_by_hand(measured):
    """Top-2 in decode: layer 0 keeps both at high, layer 2 (r = 0.5 at the end of the cosine) keeps one."""
    _, rows = measured
    for low, bits in (("2", (3 * 4.5 + 2.5) / 4), ("0", 3 * 4.5 / 4)):
        row = rows[f"4/{low} r 0.75", "decode"]
        assert row.effective_retention == pytest.approx(3 / 4)
        assert row.bits_per_weight_read == pytest.approx(bits)


def test_full_retention_is_the_high_level(measured):
    """At r = 1, 4/2 and 4/0 are uniform 4 bits, figure by figure."""
    _, rows = measured
    for phase in PHASES:
        for name in ("4/2 r 1", "4/0 r 1"):
            assert figures(rows[name, phase]) == figures(rows["exact 4", phase])


def test_a_row_does_not_depend_on_the_others(evaluate, measured):
    """Measured in the other order, each row has the same figures: tiers and counts are cleared between rows."""
    _, rows = measured
    _, again = evaluate(table_arms(LEVELS[::-1], (1.0, 0.75), reuse=False))
    assert {key: figures(row) for key, row in again.items()} == {
        key: figures(row) for key, row in rows.items()
    }


def test_limits_change_nothing(evaluate, measured, tiny_store):
    """With room for few experts the figures are the same to the last bit."""
    _, rows = measured
    settings = RunSettings(levels=(4, 2), retention=0.75, exact=True)
    store = StoreModel.open(tiny_store)
    least = store.plan(vram_limit=None, settings=RunSettings.uniform(4), context=36).minimum_vram_bytes
    _, limited = evaluate([Arm(settings, PHASES, "table")], vram_limit=least)
    for phase in PHASES:
        key = ("4/2 r 0.75", phase)
        assert figures(limited[key]) == figures(rows[key])


def test_a_limit_too_small_is_told_first(evaluate, capsys):
    """What does not fit is refused before the reference is run."""
    capsys.readouterr()
    with pytest.raises(DoesNotFit):
        evaluate(table_arms(((4,),), (1.0,), reuse=False), vram_limit=1000)
    assert "bf16" not in capsys.readouterr().err


def test_decode_rows_are_token_by_token(tiny_store, text):
    """One pass with the decode policy schedules and predicts what single-token steps do."""
    from edgemoe.kv.step import Segment, Step

    settings = RunSettings(levels=(4, 0), retention=0.75, exact=True)
    store = StoreModel.open(tiny_store)
    plan = store.plan(vram_limit=None, settings=settings, context=32)
    tokens = tuple(a_tokenizer()(text.read_text())["input_ids"][:24])
    with Engine(store, plan, settings) as engine:
        sequence = engine.new_sequence()
        together = engine.all_logits(sequence, tokens, decode=True)
        scheduled = engine.take_use().scheduled
        sequence.crop(0)
        single = torch.cat([engine.step(Step((Segment(sequence, (token,)),))) for token in tokens])
        assert engine.take_use().scheduled == scheduled
    torch.testing.assert_close(together, single, atol=0.05, rtol=0)


def test_reuse_is_a_row_of_its_own(evaluate):
    """Where 8-bit planes are resident, the reuse row computes with them; the exact row never does."""
    settings = RunSettings(levels=(8, 2), retention=0.5, depth="equal", exact=True)
    report, rows = evaluate([Arm(s, ("prefill",), "table") for s in (settings, settings.with_(exact=False))])
    assert [row.exact for row in report.rows[1:]] == [True, False]
    exact, reuse = rows["8/2 r 0.5", "prefill"], rows["8/2 r 0.5 reuse", "prefill"]
    assert reuse.kl < exact.kl
    assert reuse.bits_per_weight_read > exact.bits_per_weight_read


def test_decode_with_reuse_comes_token_by_token(evaluate, tiny_store, text):
    """What a later token asks for is not there for an earlier one; bits are those of the planes computed from."""
    from edgemoe.kv.step import Segment, Step

    settings = RunSettings(levels=(8, 2), retention=0.5, depth="equal")
    _, rows = evaluate([Arm(settings, ("decode",), "table")], tokens=24, window=24)
    row = rows["8/2 r 0.5 reuse", "decode"]
    store = StoreModel.open(tiny_store)
    plan = store.plan(vram_limit=None, settings=settings, context=32)
    tokens = a_tokenizer()(text.read_text())["input_ids"][:24]
    with Engine(store, plan, settings) as engine:
        sequence = engine.new_sequence()
        logits = torch.cat([engine.step(Step((Segment(sequence, (token,)),))) for token in tokens])
        use = engine.take_use()
    loss = torch.nn.functional.cross_entropy(logits[:-1].double(), torch.tensor(tokens[1:]))
    assert row.perplexity == pytest.approx(math.exp(loss), rel=1e-5)
    assert use.reused > 0
    assert mean_bits(use.scheduled) < row.bits_per_weight_read < 8.5
    assert row.bits_per_weight_read == pytest.approx(mean_bits(use.experts))


def test_settings_beyond_the_store_are_left_out(evaluate, checkpoint, tmp_path, caplog):
    """A store of 4 bits measures what it can, and says what it left out; if that is all, it is an error."""
    small = tmp_path / "store"
    convert_checkpoint(checkpoint, small, max_level=4, layout="auto", dense_bits=16)
    with caplog.at_level(logging.WARNING):
        report, rows = evaluate(table_arms(((8,), (4,)), (1.0,), reuse=False), store=small, reference=None)
    assert report.left_out == ["exact 8"]
    assert "exact 8" in caplog.text
    assert list(rows) == [("exact 4", phase) for phase in PHASES]
    assert rows["exact 4", "prefill"].kl is None
    with pytest.raises(UserError, match="exact 8"):
        evaluate(table_arms(((8,),), (1.0,), reuse=False), store=small, reference=None)


def app() -> typer.Typer:
    """The command alone."""
    made = typer.Typer()
    made.command(epilog=EPILOG)(eval_command)
    return made


@pytest.fixture
def command():
    """Runs the command: (exception, stdout)."""

    def run(*arguments: object):
        result = CliRunner().invoke(app(), [*map(str, arguments)])
        return result.exception, result.stdout

    return run


def test_tasks_side_by_side(command, tiny_store, checkpoint, monkeypatch):
    """--tasks alone prints a line for every kind and a column for bf16 and each setting."""
    monkeypatch.setattr(accuracy, "ANSWER_TOKENS", 6)
    error, out = command(
        *("--model", tiny_store, "--reference", checkpoint, "--tasks", "--task-count", 1, "--levels", 8)
    )
    assert error is None
    header, *lines = out.splitlines()
    assert header.split() == ["task", "bf16", "exact", "8"]
    assert [line.split()[0] for line in lines[:-1]] == list(KINDS)
    assert lines[-1].startswith("all kinds")
    # An untrained model answers nothing right.
    assert all(line.split()[-2:] == ["0.000", "0.000"] for line in lines)


def test_the_command_prints_json_or_a_table(command, tiny_store, checkpoint, text):
    """The same figures as one JSON object, and as a table with a line a row."""
    asked = ("--model", tiny_store, "--reference", checkpoint, "--text", text, "--tokens", 32, "--window", 32)
    asked += ("--task-count", 0, "--levels", "4/2", "--retention", 0.75, "--retention", 0.9)
    error, out = command(*asked, "--json")
    assert error is None
    rows = json.loads(out)["rows"]
    names = ["bf16", "4/2 r 0.75", "4/2 r 0.75", "4/2 r 0.9", "4/2 r 0.9"]
    assert [row["setting"] for row in rows] == names
    error, out = command(*asked)
    assert error is None
    table = out.split("\n\n")[0].splitlines()[1:]
    assert [line.split("  ")[0] for line in table] == names
    assert [f"{row['perplexity']:.3f}" in line for row, line in zip(rows, table, strict=True)] == [True] * 5


def test_studies_and_plot(command, tiny_store, checkpoint, text, tmp_path):
    """A study's rows follow the table's; the plot is a PNG."""
    picture = tmp_path / "kl.png"
    error, out = command(
        *("--model", tiny_store, "--reference", checkpoint, "--text", text, "--tokens", 32, "--levels", 4),
        *("--task-count", 0, "--study", "layers", "--study", "depth", "--plot", picture, "--json"),
    )
    assert error is None
    rows = json.loads(out)["rows"]
    assert [row["layer"] for row in rows if row["study"] == "layers"] == [0, 2, 0, 2]
    assert {row["depth"] for row in rows if row["study"] == "depth"} == {"cosine", "equal"}
    assert len({(row["setting"], row["phase"]) for row in rows}) == len(rows)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "neither --text nor --tasks"),
        (("--tasks", "--task-count", 0), "--task-count 0"),
        (("--tasks", "--study", "depth"), "--study depth"),
        (("--tasks", "--plot", "x.png"), "x.png"),
        (("--text", "x", "--reference", "y", "--plot", "nowhere/x.png"), "no folder nowhere"),
        (("--tasks", "--tokens", 100), "--tokens 100"),
        (("--tasks", "--window", 100), "--window 100"),
        (("--text", "x", "--levels", 4, "--reuse"), "--reuse"),
        (("--text", "x", "--study", "breadth"), "breadth"),
        (("--text", "x", "--levels", "2/4"), "2/4"),
        (("--text", "x", "--levels", 4, "--retention", 0.75), "--retention 0.75"),
        (("--text", "x", "--levels", "4/2", "--retention", 0.3), "0.3"),
    ],
)
def test_options_without_effect_are_refused(command, arguments, told):
    """Before the model is even looked for."""
    error, _ = command("--model", "there-is-none", *arguments)
    assert isinstance(error, UserError)
    assert told in str(error)


def test_the_largest_window_is_one_step(command):
    """--window goes up to the rows of one step of the engine and no further."""
    most, _ = command("--model", "there-is-none", "--window", PREFILL_ROWS)
    beyond, _ = command("--model", "there-is-none", "--window", PREFILL_ROWS + 1)
    assert isinstance(most, UserError)
    assert "neither --text nor --tasks" in str(most)
    assert isinstance(beyond, SystemExit)
    assert beyond.code == 2


def test_skipping_is_studied_both_ways():
    """The study of skipped experts has each setting with and without scaling, under names of their own."""
    arms = study_arms("skipping", (0, 1), 8)
    assert {(arm.settings.levels, arm.settings.renormalise) for arm in arms} == {
        (levels, scaled) for levels in ((4, 0), (8, 4, 2, 0)) for scaled in (False, True)
    }
    assert len({arm.name for arm in arms}) == len(arms)
