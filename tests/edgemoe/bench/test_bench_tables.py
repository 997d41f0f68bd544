"""The report as text and picture: JSON and CSV are complete, Markdown marks figures that were not measured."""

from __future__ import annotations

import csv
import io
import json

import pytest
from short_probes import probe_briefly

from edgemoe.bench.plot import plot_report
from edgemoe.bench.quality import Evaluation, load_quality, quality_of
from edgemoe.bench.rows import BenchRow
from edgemoe.bench.run import BenchRequest, run_bench
from edgemoe.bench.tables import FORMATS, as_summary
from edgemoe.engine.engine import StoreModel
from edgemoe.errors import UserError
from edgemoe.policy.settings import RunSettings

EVALUATION = {
    "rows": [
        {"setting": "bf16", "phase": "decode", "perplexity": 9.0, "kl": 0.0},
        {"setting": "exact 4", "phase": "decode", "perplexity": 12.5, "kl": 0.125, "task_accuracy": 0.75},
        {"setting": "exact 4", "phase": "prefill", "perplexity": 12.25, "kl": 0.0625},
    ]
}


@pytest.fixture(scope="module")
def report(tiny_store, tmp_path_factory):
    """Two rows: one with quality and no look-ahead, one with look-ahead and no quality."""
    store = StoreModel.open(tiny_store)
    path = tmp_path_factory.mktemp("quality") / "eval.json"
    path.write_text(json.dumps(EVALUATION | {"environment": {"store": store.manifest.fingerprint}}))
    quality, left_out = load_quality(path).of(store.manifest)
    assert not left_out
    rows = (
        BenchRow("plain", RunSettings.uniform(4)),
        BenchRow("ahead", RunSettings(levels=(4, 2), retention=0.75, speculate="full")),
    )
    with pytest.MonkeyPatch.context() as patch:
        probe_briefly(patch, peak=0)
        request = BenchRequest(rows, prompt_tokens=6, new_tokens=4, runs=2, notes=("one row is missing",))
        return run_bench(store, request, quality)


@pytest.mark.e2e
def test_json_is_the_report_on_one_line(report):
    """Reading it gives the report again, with strings for the keys of counts."""
    text = FORMATS["json"](report)
    assert "\n" not in text
    again = json.loads(text)
    assert again["environment"] == json.loads(json.dumps(report["environment"]))
    assert [row["tpot_s"] for row in again["rows"]] == [row["tpot_s"] for row in report["rows"]]
    assert "NaN" not in text


@pytest.mark.e2e
def test_json_lines_are_rows(report):
    """Every line is a row with its environment."""
    lines = [json.loads(line) for line in FORMATS["jsonl"](report).splitlines()]
    assert [(line["name"], line["arm"]) for line in lines] == [
        (name, arm) for name in ("plain", "ahead") for arm in ("cold", "warm")
    ]
    assert all(line["environment"]["torch"] == report["environment"]["torch"] for line in lines)


@pytest.mark.e2e
def test_csv_has_a_column_for_every_number(report):
    """Each row's numbers are in columns named by their path; a quality that was not measured is empty."""
    lines = list(csv.DictReader(io.StringIO(FORMATS["csv"](report))))
    for line, row in zip(lines, report["rows"], strict=True):
        assert float(line["tpot_s.p99"]) == row["tpot_s"]["p99"]
        assert int(line["vram_limit_bytes"]) == row["vram_limit_bytes"]
        assert float(line["bytes_per_token.ssd"]) == row["bytes_per_token"]["ssd"]
        assert line["name"] == row["name"]
        assert line["environment.torch"] == report["environment"]["torch"]
    assert [line["quality.decode.kl"] for line in lines] == ["0.125", "0.125", "", ""]


def cells(markdown: str, title: str) -> list[dict[str, str]]:
    """The rows of the table that has a column of that title."""
    for block in markdown.split("\n\n"):
        lines = [[c.strip() for c in line.strip("|").split("|")] for line in block.splitlines()]
        if title in lines[0]:
            return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]
    raise AssertionError(f"no column {title}")


@pytest.mark.e2e
def test_markdown_shows_times_and_bounds(report):
    """Mean times are in the units that the titles name."""
    for shown, row in zip(cells(FORMATS["md"](report), "TPOT ms"), report["rows"], strict=True):
        assert float(shown["TPOT ms"]) == pytest.approx(1000 * row["tpot_s"]["mean"], abs=0.05)
        assert float(shown["TTFT s"]) == pytest.approx(row["ttft_s"]["mean"], abs=0.0005)
        assert float(shown["decode tok/s"]) == pytest.approx(row["decode_tok_s"], abs=0.005)
        assert shown["cache"] == row["arm"]
    for shown, row in zip(cells(FORMATS["md"](report), "reached %"), report["rows"], strict=True):
        assert float(shown["reached %"]) == pytest.approx(100 * row["fraction_of_bound"], abs=0.5)


@pytest.mark.e2e
def test_markdown_fits_a_terminal(report):
    """Lines have 100 columns at most; every table has the row's name, and every column is there once."""
    long = {"name": "ours: 8/4/2/0, planes, heavy-hitters", "valid": False}
    rows = [row | long for row in report["rows"]]
    for markdown in (FORMATS["md"](report), FORMATS["md"](report | {"rows": rows})):
        assert max(map(len, markdown.splitlines())) <= 100
        titles = [block.splitlines()[0] for block in markdown.split("\n\n") if block.startswith("|")]
        assert all(title.startswith("| row ") for title in titles)
        columns = [c.strip() for title in titles for c in title.strip("|").split("|")[2:]]
        timed = columns[: columns.index("read ahead")]
        assert len(timed) == len(set(timed)) > 30


@pytest.mark.e2e
def test_markdown_says_what_was_not_measured(report):
    """Quality is in the row of its setting, or "not measured"; notes are listed."""
    text = FORMATS["md"](report)
    shown = [
        (c["row"], c["perplexity"], c["KL prefill"], c["task accuracy"]) for c in cells(text, "perplexity")
    ]
    assert shown[0] == ("plain", "12.5", "0.0625", "0.75")
    assert shown[2] == ("ahead", *["not measured"] * 3)
    assert "- one row is missing" in text


@pytest.mark.e2e
def test_markdown_shows_predictions_per_layer(report):
    """Recall and precision are shown for the layer that can be predicted, in the row with look-ahead."""
    shown = cells(FORMATS["md"](report), "recall %")
    assert {(line["row"], line["layer"]) for line in shown} == {("ahead", "2")}
    assert all(0 <= float(line["recall %"]) <= 100 for line in shown)


MIXED = RunSettings(levels=(4, 2), retention=0.75, importance="load")
"""Reuses resident planes."""


def joined_quality(settings: RunSettings, *rows: tuple) -> tuple[str, float] | None:
    """Returns (setting, KL in decode) of the row that matches, out of rows of (setting, KL, importance)."""
    names = ("setting", "kl", "importance")
    ranking = {"heavy_hitters": 0.5, "depth": "cosine", "critical": "carry", "renormalise": False}
    evaluated = [{"phase": "decode", **ranking, **dict(zip(names, row, strict=True))} for row in rows]
    quality = quality_of(evaluated, settings)
    return quality and (quality["setting"], quality["decode"]["kl"])


def test_quality_is_found_by_setting():
    """A setting that the evaluation lacks has no quality."""
    one = RunSettings.uniform(4)
    assert joined_quality(one, ("exact 8", 1.0, "load"), ("exact 4", 2.0, "random")) == ("exact 4", 2.0)
    assert joined_quality(one, ("exact 8", 1.0, "load"), ("4 reuse", 2.0, "load")) is None
    assert joined_quality(one) is None


def test_quality_of_reuse():
    """The row with reuse where the benchmark reuses, else the scheduled one; the name says which."""
    rows = [("4/2 r 0.75", 2.0, "load"), ("4/2 r 0.75 reuse", 1.0, "load")]
    assert joined_quality(MIXED, *rows) == ("4/2 r 0.75 reuse", 1.0)
    assert joined_quality(MIXED, rows[0]) == ("4/2 r 0.75", 2.0)
    assert joined_quality(MIXED.with_(exact=True), *rows) == ("4/2 r 0.75", 2.0)
    assert joined_quality(MIXED.with_(retention=0.9), *rows) is None


def test_quality_of_another_signal_does_not_match():
    """Levels chosen by another signal are another setting; a report without a signal matches none."""
    assert joined_quality(MIXED, ("4/2 r 0.75", 2.0, "random")) is None
    assert joined_quality(MIXED.with_(importance="random"), ("4/2 r 0.75", 2.0, "random")) == (
        "4/2 r 0.75",
        2.0,
    )
    assert joined_quality(MIXED, ("4/2 r 0.75", 2.0, None)) is None


@pytest.mark.parametrize(
    "change", [{"heavy_hitters": 0.1}, {"depth": "equal"}, {"critical": "ceil"}, {"renormalise": True}]
)
def test_quality_of_another_choice_does_not_match(change):
    """Whatever ranks experts or weighs them differs: not the same quality. One level for all is no choice."""
    row = ("4/2 r 0.75", 2.0, "load")
    assert joined_quality(MIXED, row) == ("4/2 r 0.75", 2.0)
    assert joined_quality(MIXED.with_(**change), row) is None
    assert joined_quality(RunSettings.uniform(4, **change), ("exact 4", 1.0, "gate")) == ("exact 4", 1.0)


def test_quality_of_another_store_is_left_out(tiny_store, tmp_path):
    """Rows are joined with the speed of the store that they were measured on; otherwise a note says why not."""
    manifest = StoreModel.open(tiny_store).manifest
    rows = EVALUATION["rows"]
    assert Evaluation(tmp_path / "own.json", rows, manifest.fingerprint).of(manifest) == (rows, ())
    path = tmp_path / "eval.json"
    for environment, said in (({"store": "0" * 32}, "another store"), ({}, "does not name")):
        path.write_text(json.dumps(EVALUATION | {"environment": environment}))
        joined, notes = load_quality(path).of(manifest)
        assert joined == []
        assert said in notes[0]
        assert "eval.json" in notes[0]


@pytest.mark.parametrize("content", [None, b"no json", b"[]", b'{"rows": [{"phase": "decode"}]}', b"\xff"])
def test_an_unusable_quality_file(tmp_path, content):
    """Missing, no JSON, or no evaluation: a user error that names the file."""
    path = tmp_path / "eval.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"eval\.json"):
        load_quality(path)


@pytest.mark.e2e
def test_a_plot_is_an_image(report, tmp_path):
    """A PNG of the expected width, or an SVG."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "rows.png"
    plot_report(report, path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert int.from_bytes(data[16:20], "big") > 1000
    drawn = tmp_path / "rows.svg"
    plot_report(report, drawn)
    assert drawn.stat().st_size > 10_000


@pytest.mark.e2e
def test_the_summary_is_one_table_that_fits_a_terminal(report):
    """A row for each row of the report with its speed, and a few lines; the tables of --full have the rest."""
    lines = as_summary(report).splitlines()
    rows = [line for line in lines if line.startswith("|")][2:]
    assert len(rows) == len(report["rows"])
    assert max(map(len, lines)) <= 100
    assert len(lines) <= len(rows) + 10
    for line, row in zip(rows, report["rows"], strict=True):
        assert f"{row['decode_tok_s']:.1f}" in line
    assert "--full" in lines[-1]
