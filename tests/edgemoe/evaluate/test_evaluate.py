"""A whole evaluation of the tiny model: against transformers, and under changes that must not alter its figures."""

from __future__ import annotations

import json
import logging
import math
import shutil
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
import typer
from counted_engine import CountedEngine
from small_tokenizer import a_tokenizer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from edgemoe.commands import eval as evaluation
from edgemoe.commands.eval import EXAMPLES, eval_command
from edgemoe.engine.engine import StoreModel
from edgemoe.errors import DoesNotFit, UserError
from edgemoe.evaluate import accuracy
from edgemoe.evaluate import run as run_module
from edgemoe.evaluate.arm import PHASES, Arm
from edgemoe.evaluate.plans import eval_plans
from edgemoe.evaluate.request import EvalReport, EvalRequest
from edgemoe.evaluate.run import run_eval
from edgemoe.evaluate.studies import study_arms, table_arms
from edgemoe.evaluate.tasks import KINDS
from edgemoe.experts.use import mean_bits
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.policy.remapping import Remapping
from edgemoe.policy.settings import RunSettings

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
    """Returns a function that evaluates the tiny store: (report, rows by (setting, phase))."""

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


def test_the_reference_comes_first(measured, checkpoint, tiny_store, text):
    """The first row is bf16, with the perplexity of transformers' own loss, and KL 0 to itself."""
    report, _ = measured
    assert report.environment["store"] == StoreModel.open(tiny_store).manifest.fingerprint
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
    parsed = json.loads(json.dumps(asdict(report), allow_nan=False))
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


def test_windows_decoded_together_are_those_alone(measured, evaluate):
    """In steps of one token of each of two windows every figure stays; with remapping fewer experts are counted."""
    _, rows = measured
    four = RunSettings.uniform(4)
    arms = [
        Arm(four.with_(remapping=each), ("decode",), "lynx", 2) for each in (None, Remapping(alpha=8, bins=4))
    ]
    _, found = evaluate(arms)
    plain, agreed = (found[arm.name, "decode"] for arm in arms)
    assert figures(plain) == pytest.approx(figures(rows["exact 4", "decode"]), rel=1e-6)
    assert (plain.batch, plain.active, plain.remapped) == (2, None, None)
    assert (agreed.active < 1, agreed.remapped > 0, agreed.kl > 0) == (True, True, True)


def test_retention_is_that_of_the_layers_with_experts(evaluate):
    """The tiny model's middle layer has no experts: two experts per token, 1 and 2 of them critical, are 0.75."""
    settings = RunSettings(levels=(4, 2), retention=0.75, depth="equal", exact=True)
    report, _ = evaluate([Arm(settings, ("decode",), "depth")], reference=None)
    assert [row.effective_retention for row in report.rows] == [0.75]


def test_a_window_in_several_steps(measured, evaluate):
    """Its experts are ranked for each step's tokens; levels that no rank decides have the same figures."""
    _, rows = measured
    arms = table_arms(((4,), (4, 2)), (0.75,), reuse=False)
    report, found = evaluate(arms, prefill_rows=12)
    assert report.environment["prefill_rows"] == 12
    for phase in PHASES:
        want = figures(rows["exact 4", phase])
        assert figures(found["exact 4", phase]) == pytest.approx(want, rel=1e-4)
    whole, several = (each["4/2 r 0.75", "prefill"] for each in (rows, found))
    assert several.kl != whole.kl
    one_by_one = "4/2 r 0.75", "decode"
    assert figures(found[one_by_one]) == pytest.approx(figures(rows[one_by_one]), rel=1e-6)


@pytest.fixture(scope="module")
def long_checkpoint(checkpoint, tmp_path_factory):
    """The tiny model with 1,024 positions, and its store."""
    directory = tmp_path_factory.mktemp("long") / "model"
    shutil.copytree(checkpoint, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    store = directory.parent / "store"
    convert_checkpoint(directory, store, max_level=4, layout="auto", dense_bits=16)
    return directory, store


def test_a_long_window_is_one_step_without_a_limit(evaluate, long_checkpoint, tmp_path):
    """Its figures are as from several steps where no rank decides levels."""
    reference, store = long_checkpoint
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, while another one sleeps. " * 20, "utf-8")
    arms = table_arms(((4,),), (1.0,), reuse=False)
    request = {"store": store, "reference": reference, "text": text, "tokens": 600, "window": 600}
    whole, rows = evaluate(arms, **request)
    several, others = evaluate(arms, prefill_rows=100, **request)
    assert [each.environment["prefill_rows"] for each in (whole, several)] == [600, 100]
    for phase in PHASES:
        assert figures(rows["exact 4", phase]) == pytest.approx(figures(others["exact 4", phase]), rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"window": 600}, "at most 512 tokens, the context"),
        ({"window": 600, "vram_limit": 10**9}, "at most 512 tokens, on a device or with --vram-limit"),
        ({"observed": ("routing",), "prefill_rows": 12}, "windows of one step for --study routing"),
    ],
)
def test_windows_that_cannot_be_measured_are_refused(evaluate, changes, says):
    """Where a model's context, a limit or a study of whole windows contradicts them."""
    with pytest.raises(UserError, match=says):
        evaluate(table_arms(((4,),), (1.0,), reuse=False), **changes)


def test_a_long_window_needs_memory_for_its_logits(evaluate, long_checkpoint, monkeypatch):
    """They are in no plan, which without a limit may take all that is free."""
    reference, store = long_checkpoint
    monkeypatch.setattr("edgemoe.evaluate.plans.available_memory", lambda: 10**6)
    with pytest.raises(DoesNotFit, match="the logits of --window 600"):
        evaluate(table_arms(((4,),), (1.0,), reuse=False), store=store, reference=reference, window=600)


def test_tasks_leave_a_prompt_s_rows_to_the_plan(tiny_store):
    """Their context is longer than a window, whose rows are no limit for them."""
    request = EvalRequest(None, None, 96, 36, 1, 0, tuple(table_arms(((4,),), (1.0,), reuse=False)))
    given = []
    store = StoreModel.open(tiny_store)
    planned = SimpleNamespace(
        manifest=store.manifest,
        shape=store.shape,
        default_context=lambda: 2048,
        plan=lambda **options: given.append((options["context"], options["prefill_rows"])),
    )
    eval_plans(planned, request)
    assert given == [(1024, None)]


def test_bits_read_are_those_of_the_planes(measured):
    """A uniform level reads its planes and parameters: 8.5, 4.5 and 2.5 bits; every expert counts as critical."""
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
    """At the smallest limit that works, the figures are the same to the last bit."""
    _, rows = measured
    settings = RunSettings(levels=(4, 2), retention=0.75, exact=True)
    store = StoreModel.open(tiny_store)
    least = store.plan(vram_limit=None, settings=RunSettings.uniform(4), context=36).minimum_vram_bytes
    _, limited = evaluate([Arm(settings, PHASES, "table")], vram_limit=least)
    for phase in PHASES:
        key = ("4/2 r 0.75", phase)
        assert figures(limited[key]) == figures(rows[key])


def test_a_limit_too_small_is_reported_first(evaluate, capsys):
    """DoesNotFit is raised before the reference runs."""
    capsys.readouterr()
    with pytest.raises(DoesNotFit):
        evaluate(table_arms(((4,),), (1.0,), reuse=False), vram_limit=1000)
    assert "bf16" not in capsys.readouterr().err


def test_decode_rows_are_token_by_token(tiny_store, text):
    """One step with the decode policy gives the schedule and the logits of single-token steps."""
    from edgemoe.kv.step import Segment, Step

    settings = RunSettings(levels=(4, 0), retention=0.75, exact=True)
    store = StoreModel.open(tiny_store)
    plan = store.plan(vram_limit=None, settings=settings, context=32)
    tokens = tuple(a_tokenizer()(text.read_text())["input_ids"][:24])
    with CountedEngine(store, plan, settings) as engine:
        sequence = engine.sequences.new()
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


def test_decode_with_reuse_runs_token_by_token(evaluate, tiny_store, text):
    """A plane read for a later token does not serve an earlier one; bits count the planes computed from."""
    from edgemoe.kv.step import Segment, Step

    settings = RunSettings(levels=(8, 2), retention=0.5, depth="equal")
    _, rows = evaluate([Arm(settings, ("decode",), "table")], tokens=24, window=24)
    row = rows["8/2 r 0.5 reuse", "decode"]
    store = StoreModel.open(tiny_store)
    plan = store.plan(vram_limit=None, settings=settings, context=32)
    tokens = a_tokenizer()(text.read_text())["input_ids"][:24]
    with CountedEngine(store, plan, settings) as engine:
        sequence = engine.sequences.new()
        logits = torch.cat([engine.step(Step((Segment(sequence, (token,)),))) for token in tokens])
        use = engine.take_use()
    loss = torch.nn.functional.cross_entropy(logits[:-1].double(), torch.tensor(tokens[1:]))
    assert row.perplexity == pytest.approx(math.exp(loss), rel=1e-5)
    assert use.reused > 0
    assert mean_bits(use.scheduled) < row.bits_per_weight_read < 8.5
    assert row.bits_per_weight_read == pytest.approx(mean_bits(use.experts))


def test_settings_beyond_the_store_are_left_out(evaluate, checkpoint, tmp_path, caplog):
    """A store of 4 bits leaves out settings of 8 and logs their names; with no setting left, it is an error."""
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


@pytest.fixture
def command():
    """Returns a function that runs the command: (exception, stdout, stderr)."""
    app = typer.Typer()
    app.command(epilog=EXAMPLES)(eval_command)

    def run(*arguments: object):
        result = CliRunner().invoke(app, [*map(str, arguments)])
        return result.exception, result.stdout, result.stderr

    return run


@pytest.fixture
def short_answers(monkeypatch):
    """Answers of six tokens at most."""
    monkeypatch.setattr(accuracy, "ANSWER_TOKENS", 6)


@pytest.mark.usefixtures("short_answers")
def test_tasks_side_by_side(command, tiny_store, checkpoint):
    """--tasks alone prints a line for every kind and a column for bf16 and each setting; progress of both on stderr."""
    error, out, progress = command(
        *("--model", tiny_store, "--reference", checkpoint, "--tasks", "--task-count", 1, "--levels", 8)
    )
    assert error is None
    header, *lines = out.splitlines()
    assert header.split() == ["task", "bf16", "exact", "8"]
    assert [line.split()[0] for line in lines[:-1]] == list(KINDS)
    assert lines[-1].startswith("all kinds")
    # An untrained model answers nothing right.
    assert all(line.split()[-2:] == ["0.000", "0.000"] for line in lines)
    total = f"{len(KINDS)} of {len(KINDS)} (100 %), 0 s left"
    found = [line for line in progress.splitlines() if "10 of 10" in line]
    assert found == [f"bf16: tasks: {total}", f"exact 8 (1 of 1): tasks: {total}"]
    assert progress.splitlines()[-1].startswith("exact 8, prefill: ")
    assert progress.splitlines()[-1].endswith("0.000 of the tasks right")


@pytest.fixture
def task_counts(monkeypatch):
    """Tasks of each kind in the requests of the commands that ran. Nothing is evaluated."""
    requests = []

    def record(store, request):
        requests.append(request.task_count)
        return EvalReport({}, [], [], [])

    monkeypatch.setattr(run_module, "run_eval", record)
    return requests


@pytest.mark.parametrize(
    ("words", "count"),
    [((), 0), (("--tasks",), 20), (("--tasks", "--task-count", 3), 3), (("--task-count", 0), 0)],
)
def test_tasks_need_the_flag(command, tiny_store, text, monkeypatch, task_counts, words, count):
    """The demo's chat tasks run with --tasks alone, for the demo and for any other model."""
    assert command("--model", tiny_store, "--text", text, *words)[0] is None
    monkeypatch.setattr(evaluation, "DEMO", tiny_store)
    assert command("--model", tiny_store, "--text", text, *words)[0] is None
    assert task_counts == [count, count]


def test_the_command_prints_json_or_a_table(command, tiny_store, checkpoint, text):
    """Figures are equal as one JSON object and as a table with one line per row; progress goes to stderr."""
    words = ("--model", tiny_store, "--reference", checkpoint, "--text", text, "--tokens", 32, "--window", 32)
    words += ("--levels", "4/2", "--retention", 0.75, "--retention", 0.9)
    error, out, progress = command(*words, "--json")
    assert error is None
    rows = json.loads(out)["rows"]
    assert [line for line in progress.splitlines() if "left" in line][-3:] == [
        "bf16: text: 1 of 1 (100 %), 0 s left",
        "4/2 r 0.75 (1 of 2): text: 2 of 2 (100 %), 0 s left",
        "4/2 r 0.9 (2 of 2): text: 2 of 2 (100 %), 0 s left",
    ]
    assert "Loading weights" not in progress  # transformers' bar
    last = f"4/2 r 0.9, decode: perplexity {rows[-1]['perplexity']:.3f}, KL {rows[-1]['kl']:.5f}, "
    assert progress.splitlines()[-1].startswith(last)
    names = ["bf16", "4/2 r 0.75", "4/2 r 0.75", "4/2 r 0.9", "4/2 r 0.9"]
    assert [row["setting"] for row in rows] == names
    error, out, _ = command(*words)
    assert error is None
    (_, *table), legend = (block.splitlines() for block in out.split("\n\n"))
    assert [line.split("  ")[0] for line in table] == names
    assert {"setting", "phase", "KL", "bits read"} <= {line.partition(":")[0] for line in legend}
    assert [f"{row['perplexity']:.3f}" in line for row, line in zip(rows, table, strict=True)] == [True] * 5


def test_studies_and_plot(command, tiny_store, checkpoint, text, tmp_path):
    """A study's rows follow the table's; the plots of KL and of routing are PNGs next to each other."""
    picture = tmp_path / "kl.png"
    error, out, _ = command(
        *("--model", tiny_store, "--reference", checkpoint, "--text", text, "--tokens", 32, "--levels", 4),
        *("--study", "layers", "--study", "depth", "--study", "routing", "--plot", picture, "--json"),
    )
    assert error is None
    rows = json.loads(out)["rows"]
    lowered = [row for row in rows if row["study"] == "layers"]
    assert [(row["layer"], row["levels"], row["phase"]) for row in lowered] == [
        (0, "bf16/2", "prefill"),
        (2, "bf16/2", "prefill"),
    ]
    assert all(row["kl"] > 0 for row in lowered)
    assert {row["depth"] for row in rows if row["study"] == "depth"} == {"cosine", "equal"}
    assert len({(row["setting"], row["phase"]) for row in rows}) == len(rows)
    for path in (picture, tmp_path / "kl-routing.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "neither --text nor --tasks"),
        (("--tasks", "--task-count", 0), "--task-count 0"),
        (("--text", "x", "--task-count", 5), "--task-count 5"),
        (("--tasks", "--study", "depth"), "--study depth"),
        (("--tasks", "--plot", "x.png"), "x.png"),
        (("--text", "x", "--reference", "y", "--plot", "nowhere/x.png"), "no folder nowhere"),
        (("--tasks", "--tokens", 100), "--tokens 100"),
        (("--tasks", "--window", 100), "--window 100"),
        (("--tasks", "--batch", 2), "--batch 2"),
        (("--text", "x", "--tasks", "--batch", 2), "--tasks with it"),
        (("--text", "x", "--levels", 4, "--reuse"), "--reuse"),
        (("--text", "x", "--study", "breadth"), "breadth"),
        (("--text", "x", "--study", "layers"), "--study layers"),
        (("--text", "x", "--levels", "2/4"), "2/4"),
        (("--text", "x", "--levels", 4, "--retention", 0.75), "--retention 0.75"),
        (("--text", "x", "--levels", "4/2", "--retention", 0), "0.0"),
        (("--text", "x", "--levels", 4, "--critical", "ceil"), "--critical ceil"),
        (("--text", "x", "--levels", 4, "--renormalise"), "--renormalise"),
        (("--text", "x", "--levels", "4/2", "--renormalise"), "levels that skip"),
        (("--text", "x", "--levels", "4/2", "--heavy-hitters", 0.1), "counts none"),
        (("--text", "x", "--levels", "4/2", "--depth", "sine"), "'sine'"),
    ],
)
def test_options_without_effect_are_refused(command, arguments, said):
    """The error names the option, before the model is looked up."""
    error, *_ = command("--model", "there-is-none", *arguments)
    assert isinstance(error, UserError)
    assert said in str(error)


def small_evaluation(store, text, levels: str) -> tuple[object, ...]:
    """Arguments that evaluate a store at some levels on 32 tokens in one window."""
    return ("--model", store, "--text", text, "--tokens", 32, "--window", 32, "--levels", levels, "--json")


def test_options_of_the_ranking_reach_every_row(command, tiny_store, text):
    """Depth, rounding, signal, share and scaling reach the rows; uniform rows have them without effect."""
    words = small_evaluation(tiny_store, text, "4/0")
    ranking = ("--depth", "equal", "--critical", "ceil", "--importance", "load", "--renormalise")
    error, out, _ = command(*words, "--retention", 0.4, *ranking)
    assert error is None
    rows = json.loads(out)["rows"]
    names = ("retention", "depth", "critical", "importance", "renormalise")
    assert {tuple(row[name] for name in names) for row in rows} == {(0.4, "equal", "ceil", "load", True)}
    # Top-2 at r = 0.4 everywhere: ceil(0.8) = 1 of 2.
    assert [row["effective_retention"] for row in rows if row["phase"] == "decode"] == [0.5]


def test_the_papers_rule_is_evaluated(command, tiny_store, text):
    """Four levels by thresholds: top-2 at r = 0.4 has one expert at 8 bits and none at 4 or 2."""
    words = small_evaluation(tiny_store, text, "8/4/2/0")
    error, out, _ = command(*words, "--retention", 0.4, "--rule", "paper", "--depth", "equal")
    assert error is None
    rows = json.loads(out)["rows"]
    names = ("rule", "depth", "critical", "importance")
    assert {tuple(row[name] for name in names) for row in rows} == {
        ("paper", "equal", "ceil", "heavy-hitters")
    }
    assert [row["bits_per_weight_read"] for row in rows if row["phase"] == "decode"] == [4.25]


def test_rounding_is_studied_both_ways():
    """The study of critical experts has each setting with both roundings, in decode, under distinct names."""
    arms = study_arms("critical")
    pairs = {(arm.settings.levels, arm.settings.retention) for arm in arms}
    assert len(arms) == 2 * len(pairs) == len({arm.name for arm in arms})
    assert {arm.phases for arm in arms} == {("decode",)}


def test_skipping_is_studied_both_ways():
    """The study of skipped experts has each setting with and without scaling, under distinct names."""
    arms = study_arms("skipping")
    assert {(arm.settings.levels, arm.settings.renormalise) for arm in arms} == {
        (levels, scaled) for levels in ((4, 0), (8, 4, 2, 0)) for scaled in (False, True)
    }
    assert len({arm.name for arm in arms}) == len(arms)
