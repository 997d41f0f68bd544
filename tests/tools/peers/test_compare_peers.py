"""tools/peers/compare.py with edgemoe itself and a peer that is a double, inside real memory cgroups."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cgroups import ROOT, needs_cgroup

from edgemoe.engine.engine import Engine, StoreModel
from storage.errors import UserError
from tools.peers import compare as compare_peers
from tools.peers import edgemoe_child as compare_peers_edgemoe
from tools.peers import run as compare_peers_run
from tools.peers.limited import Controller, LimitError, Usage, find_controller
from tools.peers.popularity import compare
from tools.peers.programs import Program, edgemoe_program
from tools.peers.report import as_table, reached, run_of, summarize
from tools.peers.run import Outcome, prove_enforced, require_in_force, run_child
from tools.synthetic import store as synthesize

TOOL = Path(compare_peers.__file__)
DOUBLE = Path(__file__).parents[2] / "support" / "peer_double.py"
MIB = 1 << 20


def controller() -> Controller:
    return find_controller(Path("/proc/mounts").read_text())


def cgroups() -> set[str]:
    return {path.name for path in ROOT.glob("limited-*")}


@pytest.fixture(autouse=True)
def handlers_are_put_back() -> Iterator[None]:
    """What main does to the signals of this process ends with the test."""
    before = {number: signal.getsignal(number) for number in compare_peers_run.ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("peers") / "store"
    monkeypatch = pytest.MonkeyPatch()
    # The pool is sized for experts of millions of weights.
    monkeypatch.setattr("tools.synthetic.workload.POOL", 1 << 13)
    assert synthesize.main(["--like", "small", "--max-level", "4", str(directory)]) == 0
    monkeypatch.undo()
    return directory


@pytest.fixture
def arguments(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A comparison of one round, prompts of 8 tokens, 3 new ones, inside 900 MB."""
    monkeypatch.setenv("PEER_DOUBLE", str(tmp_path / "requests"))
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -S {DOUBLE}\n")
    python.chmod(0o755)
    (tmp_path / "model.gguf").write_bytes(bytes(1000))
    return [
        *("--store", str(store), "--gguf", str(tmp_path / "model.gguf"), "--llama-python", str(python)),
        *("--limits", "900MB", "--prompt-tokens", "8", "--new-tokens", "3", "--rounds", "1"),
        *("--settings", "4", "--threads", "1", "--keep-cache", "--json", str(tmp_path / "report.json")),
    ]


def requests(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "requests").read_text().splitlines()]


@needs_cgroup
def test_both_sides_alternate_under_the_limit(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Same prompt ids on both sides, ratios of the times that were told, counts side by side, no cgroup left."""
    left = cgroups()
    assert compare_peers.main([*arguments, "--no-popularity", "--plot", str(tmp_path / "rows.png")]) == 0
    assert cgroups() == left
    report = json.loads((tmp_path / "report.json").read_text())
    peer, ours = report["runs"]
    assert (peer["name"], ours["name"]) == ("llama.cpp", "exact 4")
    assert (peer["ttft_s"], peer["tpot_s"], peer["tokens"]) == (8.0, 2.0, [0, 1, 2])
    assert len(ours["tokens"]) == len(ours["token_times"]) == 3
    assert ours["row"]["vram_limit_bytes"] == 300_000_000
    assert 0 < ours["peak_bytes"] <= 900_000_000
    (measured,) = requests(tmp_path)
    assert (measured["capped"], measured["omp"], len(measured["prompt"])) == (True, "1", 8)
    assert any(path.startswith("/limited-") for path in measured["inside"])
    by_name = {row["name"]: row for row in report["rows"]}
    assert by_name["llama.cpp"]["ratio_tpot"] == 1
    assert by_name["exact 4"]["ratio_tpot"] == pytest.approx(2.0 / ours["tpot_s"])
    printed = capsys.readouterr()
    assert "| 900 MB | 8 | exact 4 | 1 |" in printed.out
    assert "--vram-limit 300 MB" in printed.err
    assert (tmp_path / "rows.png").stat().st_size > 0


@needs_cgroup
@pytest.mark.parametrize(
    ("way", "told"),
    [("exit", "exit code 1: no such model"), ("silence", "no answer"), ("memory", "killed for memory")],
)
def test_a_peer_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, told: str) -> None:
    """A run that fails is an outcome that says why; the table tells it, and gives no ratio to it."""
    monkeypatch.setenv("PEER_DOUBLE", str(tmp_path / "requests"))
    monkeypatch.setenv("PEER_FAILS", way)
    request = {"threads": 1, "popularity": False, "new_tokens": 3}
    command = [sys.executable, "-S", str(DOUBLE)]
    failed = run_child(controller(), 100 * MIB, command, request, keep_cache=True)
    assert failed.failure is not None
    assert told in failed.failure
    assert requests(tmp_path)[0]["omp"] == "1"
    runs = [run_of("peer", (100, 8), 0, failed), run_of("ours", (100, 8), 0, outcome(1.0, 2.0))]
    peer, ours = summarize(runs, "peer", [], {})
    assert (peer["failed"], peer["tpot_s"]["n"], ours["ratio_tpot"]) == (1, 0, None)
    assert told in as_table([peer, ours])


ENDLESS = """
import sys
from pathlib import Path
from tools.peers.run import hear_endings, run_child
from tools.peers.limited import find_controller

hear_endings()
controller = find_controller(Path("/proc/mounts").read_text())
try:
    run_child(controller, 1 << 28, sys.argv[1:], {"threads": 1}, keep_cache=True)
except KeyboardInterrupt:
    sys.exit(130)
"""


@needs_cgroup
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """A signal in the middle of a run ends it, with its child and what that started, and its cgroup."""
    left = cgroups()
    child = ["/bin/sh", "-c", "sleep 1000 & echo $$ $! >&2; echo $$ $! > $0; wait", str(tmp_path / "pids")]
    os.mkfifo(tmp_path / "pids")
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, *child], env=os.environ | {"PYTHONPATH": str(TOOL.parents[2])}
    )
    pids = (tmp_path / "pids").read_text().split()
    process.send_signal(number)
    assert process.wait(60) == 130
    assert cgroups() == left
    assert len(pids) == 2
    assert not any(running(pid) for pid in pids)


def running(pid: str) -> bool:
    """Whether a process lives; a zombie, which nobody may have reaped yet, does not."""
    status = Path("/proc", pid, "status")
    return status.exists() and "State:\tZ" not in status.read_text()


@needs_cgroup
def test_limits_that_are_not_enforced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a process that takes too much is not killed, nothing is measured."""
    prove_enforced(controller())
    lived = Outcome({}, None, Usage(None, 0, 0, 0))
    monkeypatch.setattr(compare_peers_run, "run_child", lambda *_, **__: lived)
    with pytest.raises(LimitError, match="no effect"):
        prove_enforced(controller())


@needs_cgroup
def test_a_warm_run_is_counted_without_a_limit() -> None:
    """No limit is no limit, and the kernel's count of the peak is there all the same."""
    command = [sys.executable, "-S", "-c", f"x = b'1' * {80 * MIB}; print('{{}}')"]
    used = run_child(controller(), None, command, {"threads": 1}, keep_cache=True).used
    assert used.limit_bytes is None
    assert used.peak_bytes is not None
    assert used.peak_bytes >= 80 * MIB


@pytest.mark.parametrize(
    ("pid", "limit", "told"), [(7, 3 << 30, None), (8, 3 << 30, "Process 8"), (7, 2 << 30, "3221225472")]
)
def test_what_the_kernel_says_is_believed(tmp_path: Path, pid: int, limit: int, told: str | None) -> None:
    """A process that is not inside, or a limit that is another, is refused (files written here by hand)."""
    for name, value in {
        "cgroup.procs": "7\n12\n",
        "memory.max": "3221225472\n",
        "memory.events": "max 0\noom_kill 0\n",
    }.items():
        (tmp_path / name).write_text(value)
    if told is None:
        require_in_force(Controller(2, tmp_path), tmp_path, pid, limit)
    else:
        with pytest.raises(LimitError, match=told):
            require_in_force(Controller(2, tmp_path), tmp_path, pid, limit)


def outcome(*times: float, **more: Any) -> Outcome:
    return Outcome({"token_times": list(times), "load_s": 1.0, **more}, None, Usage(100, 90, 0, 0))


def test_experts_are_counted(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer and edgemoe's first row answer once more, unlimited and not warmed up, with the longest prompt."""
    asked = []

    def child(controller: None, limit: int | None, command: object, request: Any, **_: Any) -> Outcome:
        asked.append((limit, request["popularity"], request["warm_up"], len(request["prompt"])))
        answer = compare_peers_edgemoe.answer(request) if "settings" in request else {"counts": [[20]]}
        return outcome(**answer)

    monkeypatch.setattr(compare_peers, "run_child", child)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    programs = [Program("peer", ("peer",), store), edgemoe_program("4", store), edgemoe_program("4/2", store)]
    prompts = {length: [list(range(length))] for length in (4, 8)}
    options: Any = SimpleNamespace(seed=0, new_tokens=3, threads=1, beside=0, keep_cache=True)
    none: Any = None
    comparison = compare_peers.Comparison(none, programs, [(10**9, 8)], prompts, 8, 4096, options)
    comparison.count()
    assert asked == [(None, True, [], 8)] * 2
    assert sorted(comparison.popularity) == ["exact 4", "peer"]
    assert comparison.popularity["peer"] == [[20]]
    # 8 tokens of prompt and two decoded ones that are fed again, two experts each.
    assert [sum(layer) for layer in comparison.popularity["exact 4"]] == [20, 20]


def test_only_a_row_that_says_so_begins_empty(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row once; 4-empty does not have the engine fill its room."""
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    residents: list[int] = []
    fill = Engine.fill

    def counted(engine: Engine) -> None:
        fill(engine)
        residents.append(len(engine.vram.resident()))

    monkeypatch.setattr(Engine, "fill", counted)
    for row in ("4", "4-empty"):
        program = edgemoe_program(row, store)
        request = {"model": str(program.model), "settings": program.settings, "fill": program.fill}
        request |= {
            "vram_limit": None,
            "threads": 1,
            "new_tokens": 3,
            "prompt": list(range(8)),
            "warm_up": [],
        }
        assert len(compare_peers_edgemoe.answer(request | {"popularity": False})["tokens"]) == 3
    assert residents == [StoreModel.open(store).shape.experts]
    assert edgemoe_program("4-empty", store).name == "exact 4, empty at first"
    with pytest.raises(UserError, match="-full is not known"):
        edgemoe_program("4-full", store)


def test_ratios_are_of_means() -> None:
    """Two runs of each: 4 s over 2 s, and not the mean of their ratios; each case has its own peer."""
    runs = [
        run_of("peer", (100, 8), 0, outcome(2.0, 5.0)),
        run_of("peer", (100, 8), 1, outcome(4.0, 9.0)),
        run_of("ours", (100, 8), 0, outcome(1.0, 2.0)),
        run_of("ours", (100, 8), 1, outcome(1.0, 4.0)),
        run_of("ours", (None, 8), 0, outcome(1.0, 4.0)),
    ]
    _, ours, alone = summarize(runs, "peer", [], {})
    assert ours["ratio_tpot"] == pytest.approx(4.0 / 2.0)
    assert ours["ratio_ttft"] == pytest.approx(3.0)
    assert ours["tpot_s"]["p50"] == 2.0
    assert alone["ratio_tpot"] is None
    table = as_table([ours, alone]).splitlines()
    assert table[2].startswith("| 100 B | 8 | ours | 2 | 1.00 | 1.00 | 2000.0 |")
    assert table[3].startswith("| none | 8 | ours | 1 |")


def test_share_of_the_bound_is_at_the_best_rates() -> None:
    """Of 4 s: 1 s of dense weights and 1.5 s of disk at rates twice those probed; memory hides behind the disk."""
    row = {
        "bound_per_tier_s": {"dense": 2.0, "ssd": 3.0, "dram": 0.0, "vram": 0.5},
        "bandwidth": {"ssd": 1.0, "dram": 5.0, "vram": 10.0},
    }
    run = {"row": row, "tpot_s": 4.0}
    assert reached(run, {"ssd": 2.0, "dram": 5.0, "vram": 20.0}) == pytest.approx(2.5 / 4)


def test_popularity_side_by_side() -> None:
    """One of four experts takes 7 of 10 choices on one side, an even layer has no correlation."""
    first, second = compare([[7, 1, 2, 0], [1, 1, 1, 1]], [[14, 2, 4, 0], [3, 0, 0, 1]])
    assert first.top == (0.7, 0.7)
    assert first.unused == (1, 1)
    assert first.correlation == pytest.approx(1)
    assert second.correlation is None
    assert second.unused == (0, 2)


@pytest.mark.parametrize(
    ("change", "told", "code"),
    [
        (["--gguf", "nowhere.gguf"], "--gguf", 2),
        (["--peer", "accelerate"], "--checkpoint", 2),
        (["--limits", "much"], "a size was wanted", 2),
        (["--limits", "601MB"], "--vram-limit", 3),
        (["--json", "no/where.json"], "folder", 2),
        (["--plot", "no/where.png"], "folder", 2),
        (["--plot", "rows.doc"], "ends in none of", 2),
    ],
)
def test_refused_before_anything_runs(
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: list[str],
    told: str,
    code: int,
) -> None:
    """What cannot work is told before the first run: exit 2, or 3 where the limit is too small for edgemoe."""
    assert compare_peers.main([*arguments, *change]) == code
    assert told in capsys.readouterr().err
    assert not (tmp_path / "requests").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [("--rounds", "0"), ("--threads", "-1"), ("--prompt-tokens", "8,0"), ("--new-tokens", "1")],
)
def test_counts_of_nothing(
    arguments: list[str], capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    """A number of runs, threads or tokens that measures nothing exits 2 and is named."""
    with pytest.raises(SystemExit) as stopped:
        compare_peers.main([*arguments, name, value])
    assert stopped.value.code == 2
    assert name in capsys.readouterr().err
