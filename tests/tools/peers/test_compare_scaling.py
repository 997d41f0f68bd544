"""tools/peers/scaling.py: lines through points that are known, limits in proportion, two stores measured."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from edgemoe.bench import bandwidth
from edgemoe.engine.engine import StoreModel
from tools.peers import edgemoe_child as compare_peers_edgemoe
from tools.peers import scaling as compare_peers_scaling
from tools.peers.limited import Usage
from tools.peers.run import ENDING, Outcome
from tools.peers.scaling import as_table, fit, summarize, vram_limit
from tools.synthetic import store as synthesize


@pytest.fixture(autouse=True)
def handlers_are_put_back() -> Iterator[None]:
    """What main does to the signals of this process ends with the test."""
    before = {number: signal.getsignal(number) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(layers: int, ttft: float, tpot: float) -> dict:
    own = 100 * layers
    return {
        "layers": layers,
        "limit_bytes": own + 500,
        "vram_limit_bytes": own,
        "ttft_s": ttft,
        "tpot_s": tpot,
        "row": {"hit_rate": {"vram": 0.5}},
    }


def test_a_line() -> None:
    """Points on a line are on it; of one that is a quarter above, the distance and what is left are told."""
    line = fit([16, 32, 48], [3.5, 6.5, 9.5])
    assert (line.slope, line.intercept) == (pytest.approx(3 / 16), pytest.approx(0.5))
    assert line.r_squared == pytest.approx(1)
    assert line.off == pytest.approx(0, abs=1e-9)
    # By hand: through (0, 0), (1, 4), (2, 4) goes y = 2 x + 2/3, off by 2/3, 4/3 and 2/3 of it.
    bent = fit([0, 1, 2], [0, 4, 4])
    assert (bent.slope, bent.intercept) == (pytest.approx(2), pytest.approx(2 / 3))
    assert bent.r_squared == pytest.approx(1 - (4 + 16 + 4) / (64 + 16 + 16))
    assert bent.off == pytest.approx(1)


def test_means_are_what_is_fitted() -> None:
    """Two runs of a store are one point; the table has a row for each depth and both lines below."""
    summary = summarize([run(16, 1, 0.1), run(48, 3, 0.4), run(16, 1, 0.3), run(32, 2, 0.3)])
    assert [(row["layers"], row["runs"]) for row in summary["rows"]] == [(16, 2), (32, 1), (48, 1)]
    assert [row["tpot_s"] for row in summary["rows"]] == [pytest.approx(t) for t in (0.2, 0.3, 0.4)]
    table = as_table(summary)
    assert "| 16 | 2.1 KB | 1.6 KB | 1.00 | 200.0 | 12.50 | 50 | 2 |" in table
    assert "TPOT = 100.0 ms + 6.25 ms a layer, R² 1.0000, no point off by more than 0.0 %" in table


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("scaling")
    with pytest.MonkeyPatch.context() as patch:
        # The pool is sized for experts of millions of weights.
        patch.setattr("tools.synthetic.workload.POOL", 1 << 13)
        for layers in (1, 2):
            options = ["--like", "small", "--layers", str(layers), "--max-level", "4"]
            assert synthesize.main([*options, str(directory / str(layers))]) == 0
    return [directory / "1", directory / "2"]


def test_limits_are_in_proportion(stores: list[Path]) -> None:
    """Of the second layer's experts, attention and KV each store's limit has the asked share."""
    one, two = (StoreModel.open(store) for store in stores)
    dense = two.shape.dense_bytes - one.shape.dense_bytes
    # Of each token: keys and values of two heads of 64, in bf16.
    kv = 24 * 2 * 2 * 64 * 2
    more = 8 * one.form.bytes_at(4) + dense + kv
    assert vram_limit(two, 1, 24) - vram_limit(one, 1, 24) == pytest.approx(more, abs=1)
    assert vram_limit(two, 0.95, 24) == pytest.approx(0.95 * vram_limit(two, 1, 24), abs=1)


def test_two_stores_are_measured(
    stores: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each store runs in each round, another first, with the round's prompt, in its own limit; lines are printed."""
    asked = []

    def child(controller: None, limit: int, command: object, request: Any, *, keep_cache: bool) -> Outcome:
        asked.append((Path(request["model"]).name, limit - request["vram_limit"], request["prompt"]))
        assert keep_cache
        return Outcome(compare_peers_edgemoe.answer(request), None, Usage(limit, limit, 0, 0))

    monkeypatch.setattr(bandwidth, "PROBE_SECONDS", 0.02)
    monkeypatch.setattr(bandwidth, "PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(compare_peers_scaling, "run_child", child)
    for name in ("find_controller", "prove_enforced"):
        monkeypatch.setattr(compare_peers_scaling, name, lambda of: None)
    report = tmp_path / "report.json"
    sizes = ["--ratio", "1", "--beside", "900MB", "--prompt-tokens", "8", "--new-tokens", "3"]
    options = ["--rounds", "2", "--threads", "1", "--keep-cache", "--json", str(report)]
    assert compare_peers_scaling.main([*map(str, stores), *sizes, *options]) == 0
    names, besides, prompts = zip(*asked, strict=True)
    assert names == ("1", "2", "2", "1")
    assert set(besides) == {900_000_000}
    assert (prompts[0], prompts[2]) == (prompts[1], prompts[3])
    runs = json.loads(report.read_text())["runs"]
    assert [run["layers"] for run in runs] == [1, 2, 2, 1]
    assert all(len(run["itl_s"]) == 2 for run in runs)
    assert "ms a layer" in capsys.readouterr().out


@pytest.mark.parametrize("given", [1, 2])
def test_one_depth_makes_no_line(stores: list[Path], given: int, capsys: pytest.CaptureFixture[str]) -> None:
    """One store, or two of the same depth, exit 2."""
    assert compare_peers_scaling.main([str(stores[0])] * given) == 2
    assert "different depth" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_missing_folder_is_found_before_anything_runs(
    stores: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    """Exit 2, and the folder is named; nothing of the machine was asked."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(compare_peers_scaling, "find_controller", lambda mounts: pytest.fail("went on"))
    assert compare_peers_scaling.main([*map(str, stores), option, "nowhere/of.png"]) == 2
    assert "no folder nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, "0") for name in ("--prompt-tokens", "--rounds", "--threads", "--ratio")),
        ("--new-tokens", "1"),
        ("--ratio", "1.1"),
    ],
)
def test_what_measures_nothing_is_named(capsys: pytest.CaptureFixture[str], name: str, value: str) -> None:
    """It exits 2 before a store is opened."""
    with pytest.raises(SystemExit) as stopped:
        compare_peers_scaling.main(["no-store", name, value])
    assert stopped.value.code == 2
    assert name in capsys.readouterr().err
