"""Benchmarks of several requests at once: their reports, and the requests that are refused."""

from __future__ import annotations

import json

import pytest
from short_probes import probe_briefly

from edgemoe.bench.batch import BatchRequest
from edgemoe.bench.tables import FORMATS
from edgemoe.errors import UserError

SHORT = ("--prompt-tokens", 12, "--new-tokens", 6, "--runs", 2, "--exact", 4)


@pytest.mark.e2e
@pytest.mark.parametrize("arrival", ["closed", "poisson:50"])
def test_a_report_of_batches_by_hand(run, tiny_store, tmp_path, monkeypatch, arrival):
    """Requests, times, bytes, and active experts of 1 and 3 sequences at once agree with what was requested."""
    probe_briefly(monkeypatch, peak=0)
    plot = tmp_path / "batch.png"
    arguments = ("--model", tiny_store, "--batch", "1,3", "--arrival", arrival, "--every", 1, *SHORT)
    arguments += ("--prompts", "random")  # answers to conversations end in the same tokens here
    code, out, err = run("bench", *arguments, "--plot", plot, "--json")
    report = json.loads(out)
    assert code == 0, err
    assert report["environment"]["arrival"] == arrival
    assert plot.stat().st_size > 1000
    one, three = report["rows"]
    for row, batch in ((one, 1), (three, 3)):
        assert (row["batch"], row["requests"], row["plan"]["parallel"]) == (batch, 2 * batch, batch)
        assert row["itl_s"]["n"] == 2 * batch * 5
        assert 1 <= row["rows_per_step"] <= batch
        assert row["ttft_s"]["mean"] < row["e2e_s"]["mean"] <= row["e2e_s"]["p99"]
        assert row["fraction_of_bound"] == pytest.approx(row["bound_s"] / row["step_s"]["mean"])
        assert row["bound_tok_s"] == pytest.approx(row["rows_per_step"] / row["bound_s"])
        assert row["bytes_per_step"]["ssd"] == 0  # all experts are resident
        assert row["valid"]
        layers = [of["layer"] for of in row["active_per_layer"]["decode"]]
        assert layers == [0, 2]
    assert one["active"]["decode"] == 2 / 8  # two of eight experts per token
    # More of them, the more sequences a step has; sequences that arrive by chance may run one after another.
    assert 2 / 8 <= three["active"]["decode"] <= 6 / 8
    assert three["active"]["decode"] > 2 / 8 or arrival != "closed"
    assert one["active"]["prefill"] > one["active"]["decode"]
    assert (one["active_paper"]["decode"], three["active_paper"]["decode"]) == (0.063, None)


@pytest.fixture
def batch(run, tiny_store, monkeypatch):
    """Returns a function that benchmarks batches of the tiny store: the report, or its table."""
    probe_briefly(monkeypatch, peak=0)

    def bench(*options: object) -> str:
        code, out, err = run("bench", "--model", tiny_store, *SHORT, *options)
        assert code == 0, err
        return out

    return bench


@pytest.mark.e2e
def test_closed_batches_are_full(batch):
    """Every step of new tokens has a row of each sequence; decode counts experts of these steps alone."""
    four = json.loads(batch("--batch", 4, "--json"))["rows"][0]
    assert (four["full"], four["rows_per_step"], four["most_rows"]) == (True, 4, 4)
    assert four["step_s"]["n"] == 2 * 5  # two waves, and a prompt's step has the first of six tokens
    assert {len(of) for of in four["active_per_layer"].values()} == {2}
    assert all(layer["active"] <= 1 for layer in four["active_per_layer"]["decode"])


@pytest.mark.e2e
def test_a_batch_that_never_fills_is_marked(batch):
    """The second request comes 1.9 s after the first, by when that is answered: the row and a note say so."""
    options = ("--batch", 2, "--arrival", "poisson:1", "--runs", 1, "--new-tokens", 2)
    report = json.loads(batch(*options, "--json"))
    (row,) = report["rows"]
    assert (row["full"], row["rows_per_step"], row["most_rows"], row["full_tok_s"]) == (False, 1, 1, None)
    assert report["environment"]["notes"] == [
        "batch 2 is not one: no step had 2 rows, the largest had 1, the mean was 1.0"
    ]
    assert "2, NOT FULL: at most 1 rows" in FORMATS["md"](report)


@pytest.mark.parametrize("batches", ["", "0", "1,x", "65", "-1"])
def test_wrong_batches_are_refused(batches):
    with pytest.raises(UserError, match="batches of 1 to 64"):
        BatchRequest.parse(batches, "closed")


@pytest.mark.parametrize(
    "arrival", ["open", "poisson", "poisson:", "poisson:0", "poisson:-2", "poisson:nan", "poisson:inf"]
)
def test_wrong_arrivals_are_refused(arrival):
    with pytest.raises(UserError, match="closed or poisson:RATE"):
        BatchRequest.parse("1", arrival)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--arrival", "closed"),
        ("--chunk", 64),
        ("--batch", "2", "--ablation", "ours"),
        ("--batch", "2", "--trace", "x.json"),
    ],
)
def test_options_without_effect_are_refused(run, tiny_store, arguments):
    """Options of batches without --batch, and other rows with it, exit 2."""
    code, _, err = run("bench", "--model", tiny_store, *arguments)
    assert code == 2
    assert "--batch" in err
