"""tools/peers/scaling.py: lines through known points, proportional limits, and the measurement of two stores."""

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
from edgemoe.memory.overhead import EXPERT_BYTES
from tools.peers import edgemoe_child, scaling
from tools.peers.limited import Usage
from tools.peers.run import ENDING, Outcome
from tools.peers.scaling import as_table, fit, summarize, vram_limit
from tools.synthetic import store as synthetic_store


@pytest.fixture(autouse=True)
def restored_signal_handlers() -> Iterator[None]:
    """Restores the signal handlers that main replaces in this process."""
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


def test_line_through_points() -> None:
    """The fit is exact for points on a line; for bent points it gives their largest relative distance."""
    line = fit([16, 32, 48], [3.5, 6.5, 9.5])
    assert (line.slope, line.intercept) == (pytest.approx(3 / 16), pytest.approx(0.5))
    assert line.r_squared == pytest.approx(1)
    assert line.off == pytest.approx(0, abs=1e-9)
    # By hand: the line through (0, 0), (1, 4), (2, 4) is y = 2 x + 2/3, with distances 2/3, 4/3 and 2/3.
    bent = fit([0, 1, 2], [0, 4, 4])
    assert (bent.slope, bent.intercept) == (pytest.approx(2), pytest.approx(2 / 3))
    assert bent.r_squared == pytest.approx(1 - (4 + 16 + 4) / (64 + 16 + 16))
    assert bent.off == pytest.approx(1)


def test_lines_are_fitted_to_means() -> None:
    """Two runs of a store are one point; the table has a row for each depth and both lines."""
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
            assert synthetic_store.main([*options, str(directory / str(layers))]) == 0
    return [directory / "1", directory / "2"]


def test_limits_are_proportional(stores: list[Path]) -> None:
    """A second layer adds its experts, attention, sums of attention and KV to the limit, times the ratio."""
    one, two = (StoreModel.open(store) for store in stores)
    dense = two.shape.dense_bytes - one.shape.dense_bytes
    # Keys and values of two heads of 64 a token, in bf16.
    kv = 24 * 2 * 2 * 64 * 2
    sums = 24 * 2 * 4  # of attention, before and after a step
    more = 8 * (one.form.bytes_at(4) + EXPERT_BYTES) + dense + kv + sums
    assert vram_limit(two, 1, 24) - vram_limit(one, 1, 24) == pytest.approx(more, abs=1)
    assert vram_limit(two, 0.95, 24) == pytest.approx(0.95 * vram_limit(two, 1, 24), abs=1)


@pytest.mark.e2e
def test_two_stores_are_measured(
    stores: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each store runs in each round, another first, with the round's prompt and its own limit; lines are printed."""
    requested = []

    def child(controller: None, limit: int, command: object, request: Any, *, keep_cache: bool) -> Outcome:
        requested.append((Path(request["model"]).name, limit - request["vram_limit"], *request["prompts"]))
        assert keep_cache
        return Outcome(edgemoe_child.answer(request), None, Usage(limit, limit, 0, 0))

    monkeypatch.setattr(bandwidth, "PROBE_SECONDS", 0.02)
    monkeypatch.setattr(bandwidth, "PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(scaling, "run_child", child)
    for name in ("find_controller", "prove_enforced"):
        monkeypatch.setattr(scaling, name, lambda _: None)
    report = tmp_path / "report.json"
    sizes = ["--ratio", "1", "--beside", "900MB", "--prompt-tokens", "8", "--new-tokens", "3"]
    options = ["--rounds", "2", "--threads", "1", "--keep-cache", "--json", str(report)]
    assert scaling.main([*map(str, stores), *sizes, *options]) == 0
    names, besides, prompts = zip(*requested, strict=True)
    assert names == ("1", "2", "2", "1")
    assert set(besides) == {900_000_000}
    assert (prompts[0], prompts[2]) == (prompts[1], prompts[3])
    runs = json.loads(report.read_text())["runs"]
    assert [run["layers"] for run in runs] == [1, 2, 2, 1]
    assert all(len(run["itl_s"]) == 2 for run in runs)
    assert "ms a layer" in capsys.readouterr().out


@pytest.mark.parametrize("given", [1, 2])
def test_stores_of_one_depth_are_refused(
    stores: list[Path], given: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """One store, or two of the same depth, exit 2."""
    assert scaling.main([str(stores[0])] * given) == 2
    assert "different depth" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_missing_folder_is_refused_before_the_first_run(
    stores: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    """The exit code is 2 and the message names the folder; no cgroup is looked up."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(scaling, "find_controller", lambda mounts: pytest.fail("went on"))
    assert scaling.main([*map(str, stores), option, "nowhere/of.png"]) == 2
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, "0") for name in ("--prompt-tokens", "--rounds", "--threads", "--ratio")),
        ("--new-tokens", "1"),
        ("--ratio", "1.1"),
    ],
)
def test_numbers_that_measure_nothing_are_refused(
    capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    """The tool exits 2 with the option's name before it opens a store."""
    with pytest.raises(SystemExit) as stopped:
        scaling.main(["no-store", name, value])
    assert stopped.value.code == 2
    assert name in capsys.readouterr().err
