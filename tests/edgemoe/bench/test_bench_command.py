"""`edgemoe bench` as a command: its output, its files, and the options that it refuses."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import fields

import pytest
import typer
from short_probes import probe_briefly

from edgemoe.bench import run as run_module
from edgemoe.commands.bench import EXAMPLES, bench_command
from edgemoe.commands.options.bench import BatchOptions
from edgemoe.engine.engine import StoreModel
from edgemoe.engine.pace import WORK_BETWEEN
from edgemoe.errors import DoesNotFit, UserError
from edgemoe.memory.limits import SHARED_ROWS

pytestmark = pytest.mark.e2e

SHORT = ("--prompt-tokens", 4, "--new-tokens", 2, "--runs", 1)


@pytest.fixture
def bench(tiny_store, capsys, monkeypatch):
    """Returns a function that runs the command on the tiny store: stdout."""
    probe_briefly(monkeypatch, peak=0)
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command(epilog=EXAMPLES)(bench_command)

    def run(*words: object) -> str:
        typer.main.get_command(app).main(
            ["--model", str(tiny_store), *map(str, words)], prog_name="bench", standalone_mode=False
        )
        return capsys.readouterr().out

    return run


def test_one_setting(bench):
    """A cold and a warm row with the given settings, as one JSON object on one line."""
    out = bench(*SHORT, "--levels", "4/2", "--retention", 0.75, "--speculate", "base", "--json")
    assert out.count("\n") == 1
    rows = json.loads(out)["rows"]
    assert [(r["arm"], r["levels"], r["retention"], r["prefetch"]) for r in rows] == [
        ("cold", "4/2", 0.75, "base"),
        ("warm", "4/2", 0.75, "base"),
    ]


def test_a_wanted_time(bench):
    """Bits that follow a time per token are measured like any others; no evaluation has their quality."""
    rows = json.loads(bench(*SHORT, "--levels", "8/4/2/0", "--tpot-target", "50ms", "--json"))["rows"]
    assert [(r["name"], r["quality"]) for r in rows] == [("8/4/2/0 50 ms", None)] * 2


def test_precision_by_hotness(bench, tmp_path, tiny_store):
    """It is measured as any setting, and joined with the evaluation of the same hotness, never of ranked levels."""
    rows = [
        {"setting": "4/2 r 0.75", "phase": "decode", "kl": 0.5},
        {"setting": "4/2 hot mass, 3 a layer reuse", "phase": "decode", "kl": 0.25},
    ]
    path = tmp_path / "eval.json"
    fingerprint = StoreModel.open(tiny_store).manifest.fingerprint
    path.write_text(json.dumps({"rows": rows, "environment": {"store": fingerprint}}))
    options = (*SHORT, "--levels", "4/2", "--policy", "hotness", "--quality", path, "--json")
    joined = json.loads(bench(*options, "--hot-experts", 3))["rows"]
    assert {(row["name"], row["quality"]["decode"]["kl"]) for row in joined} == {
        ("4/2 hot mass, 3 a layer", 0.25)
    }
    assert all(row["quality"] is None for row in json.loads(bench(*options))["rows"])


def test_the_ablation_in_one_command(bench, tmp_path):
    """Nine rows, cold and warm, a picture and a timeline of all of them."""
    pytest.importorskip("matplotlib")
    plot, trace = tmp_path / "rows.png", tmp_path / "trace.json"
    out = bench(*SHORT, "--ablation", "ours", "--format", "csv", "--plot", plot, "--trace", trace)
    lines = list(csv.DictReader(io.StringIO(out)))
    assert len(lines) == 18
    assert len({line["name"] for line in lines}) == 9
    assert plot.read_bytes().startswith(b"\x89PNG")
    groups = {
        e["args"]["name"] for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "process_name"
    }
    assert {f"{line['name']}: SSD" for line in lines} <= groups


def test_the_papers_ablation_takes_other_options(bench):
    """Seven rows; options that rank experts hold for the rows with several levels, all others for every row."""
    given = (
        "--heavy-hitters",
        0.1,
        "--retention",
        0.9,
        "--critical",
        "carry",
        "--scan",
        "on",
        "--renormalise",
    )
    rows = json.loads(bench(*SHORT, "--ablation", "paper", *given, "--json"))["rows"]
    assert len({row["name"] for row in rows}) == 7
    assert {row["scan"] for row in rows} == {"on"}
    for row in rows:
        mixed = "/" in row["levels"]
        assert row["retention"] == (0.9 if mixed else None)
        assert (row["heavy_hitters"], row["critical"]) == ((0.1, "carry") if mixed else (0.5, "carry"))
        assert row["renormalise"] == row["levels"].endswith("/0")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--ablation", "ours", "--levels", "4/2"), "--levels"),
        (("--ablation", "paper", "--rule", "damage"), "--rule"),
        (("--ablation", "ours", "--exact", 4, "--eviction", "lfru"), "--exact, --eviction"),
        (("--ablation", "paper", "--speculate", "full", "--bits", 3), "--bits, --speculate"),
        (("--ablation", "theirs"), "theirs"),
        (("--ablation", "ours", "--heavy-hitters", 0.5), "--importance gate, which counts none"),
        (("--ablation", "ours", "--bits", 3, "--retention", 0.75), "--bits 3"),
        (("--ablation", "paper", "--importance", "luck"), "luck"),
        (("--ablation", "ours", "--policy", "hotness"), "got --policy hotness"),
        (("--ablation", "paper", "--compensate", 1), "got --compensate 1"),
        (("--ablation", "ours", "--hot-experts", 3), "got --hot-experts 3"),
        (("--ablation", "paper", "--migration-rate", "1MB"), "got --migration-rate 1MB"),
        (("--json", "--format", "md"), "--format md"),
        (("--format", "xml"), "xml"),
        (("--prompts", "poems"), "poems"),
        (("--plot", "nowhere/rows.png"), "nowhere"),
        (("--plot", "rows.doc"), "rows.doc"),
        (("--trace", "nowhere/trace.json"), "nowhere"),
        (("--quality", "nothing.json"), "nothing.json"),
        (("--levels", "4/8"), "4/8"),
    ],
)
def test_wrong_options_are_refused_first(bench, monkeypatch, options, said):
    """A user error names the option; no engine is opened."""

    def never(*arguments: object) -> None:
        raise AssertionError("an engine was opened")

    monkeypatch.setattr(run_module, "Engine", never)
    with pytest.raises(UserError, match=said):
        bench(*SHORT, *options)


def test_a_row_over_its_limit_is_not_valid(bench, monkeypatch, capsys):
    """Such a row is marked in the table, and the command ends with DoesNotFit after it has printed the report."""
    probe_briefly(monkeypatch, peak=2_000_001)
    with pytest.raises(DoesNotFit, match="1B more: the row is not valid") as caught:
        bench(*SHORT, "--vram-limit", "2MB")
    assert "INVALID: over its limit" in capsys.readouterr().out
    assert caught.value.exit_code == 3


def test_the_help_of_chunks_says_what_the_scheduler_does():
    """The default chunk of several sequences on a CPU, and on a device."""
    (chunk,) = (each for each in fields(BatchOptions) if each.name == "chunk")
    assert f"at most {SHARED_ROWS}, and {WORK_BETWEEN} on a GPU" in chunk.metadata["help"]
