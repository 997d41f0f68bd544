"""tools/peers/compare.py with edgemoe and a double of the peer, inside real memory cgroups."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from availability import needs_native
from cgroups import controller, has_cgroup, needs_cgroup
from short_probes import probe_briefly

from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.errors import UserError
from edgemoe.experts.step import StepContext
from edgemoe.kernels.native import paths
from edgemoe.kv.step import Step
from tools.checkout import child_environment
from tools.peers import compare, comparison, edgemoe_child, popularity, programs, run
from tools.peers.limited import Usage
from tools.peers.programs import Program, edgemoe_program
from tools.peers.report import Case, as_table, reached, run_of, summarize
from tools.peers.run import Outcome, run_child
from tools.peers.token_bytes import gguf_bytes_per_token
from tools.synthetic import store as synthetic_store

DOUBLE = Path(__file__).parents[2] / "support" / "peer_double.py"
MIB = 1 << 20


@pytest.fixture(autouse=True)
def restored_signal_handlers() -> Iterator[None]:
    """Restores the signal handlers that main replaces in this process."""
    before = {number: signal.getsignal(number) for number in run.ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def child_in_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Measures bandwidths for a moment, and restores the number of torch's threads, which a child sets."""
    probe_briefly(monkeypatch)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("peers") / "store"
    monkeypatch = pytest.MonkeyPatch()
    # The pool is sized for experts of millions of weights.
    monkeypatch.setattr("edgemoe.bench.synthetic.workload.POOL", 1 << 13)
    assert synthetic_store.main(["--like", "small", "--max-level", "4", str(directory)]) == 0
    monkeypatch.undo()
    return directory


@pytest.fixture
def arguments(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A comparison of one round with prompts of 8 tokens and 3 new tokens, inside 900 MB."""
    monkeypatch.setenv("PEER_DOUBLE", str(tmp_path / "requests"))
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -S {DOUBLE}\n")
    python.chmod(0o755)
    write_gguf(tmp_path / "model.gguf")
    return [
        *("--store", str(store), "--gguf", str(tmp_path / "model.gguf"), "--llama-python", str(python)),
        *("--limits", "900MB", "--prompt-tokens", "8", "--new-tokens", "3", "--rounds", "1"),
        *("--settings", "4", "--threads", "1", "--keep-cache", "--json", str(tmp_path / "report.json")),
    ]


def write_gguf(path: Path) -> None:
    """A GGUF with 8 experts of 40 bytes, 2 per token, a head of 24 bytes and an embedding."""
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_expert_count(8)
    writer.add_expert_used_count(2)
    sizes = {"token_embd.weight": (3, 2), "output.weight": (3, 2), "blk.0.ffn_up_exps.weight": (8, 5, 2)}
    for name, shape in sizes.items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def no_edgemoe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The double answers for edgemoe too, and its requests are not kept: for tests of what the peer gets."""

    def double(row: str, store: Path) -> Program:
        return replace(edgemoe_program(row, store), command=(sys.executable, "-S", str(DOUBLE), "unlogged"))

    monkeypatch.setattr(programs, "edgemoe_program", double)


def requests(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "requests").read_text().splitlines()]


@needs_cgroup
@pytest.mark.e2e
@pytest.mark.folders
def test_both_programs_run_under_the_limit(
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both programs get the same prompt ids, context and format of its KV, from any current directory.

    Ratios are right, and no cgroup remains.
    """
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    more = ["--kv-cache", "q8_0", "--context", "300", "--no-popularity"]
    assert compare.main([*arguments, *more, "--plot", str(tmp_path / "rows.png")]) == 0
    assert not has_cgroup(os.getpid())
    report = json.loads((tmp_path / "report.json").read_text())
    peer, ours = report["runs"]
    assert (peer["name"], ours["name"]) == ("llama.cpp", "exact 4")
    assert (peer["ttft_s"], peer["tpot_s"], peer["tokens"]) == (8.0, 2.0, [0, 1, 2])
    assert len(ours["tokens"]) == len(ours["token_times"]) == 3
    assert ours["row"]["vram_limit_bytes"] == 300_000_000
    assert 0 < ours["peak_bytes"] <= 900_000_000
    (measured,) = requests(tmp_path)
    assert (measured["capped"], measured["omp"], len(measured["prompts"][0])) == (True, "1", 8)
    assert any(path.startswith("/limited-") for path in measured["inside"])
    assert (measured["context"], measured["kv_cache"]) == (300, "q8_0")
    assert (ours["plan"]["context"], ours["plan"]["kv_cache"]) == (300, "q8_0")
    assert report["environment"]["kv_cache"] == "q8_0"
    by_name = {row["name"]: row for row in report["rows"]}
    assert by_name["llama.cpp"]["ratio_tpot"] == 1
    assert by_name["exact 4"]["ratio_tpot"] == pytest.approx(2.0 / ours["tpot_s"])
    assert by_name["exact 4"]["ratio_ttft_p50"] == pytest.approx(8.0 / ours["ttft_s"])
    assert by_name["llama.cpp"]["weight_bytes_per_step"] == 24 + 2 * 40
    assert by_name["exact 4"]["weight_bytes_per_step"] == ours["row"]["bytes_per_token"]["vram"]
    printed = capsys.readouterr()
    assert "| 900 MB | 8 | 1 | exact 4 | 1 |" in printed.out
    assert "--vram-limit 300 MB" in printed.err
    assert (tmp_path / "rows.png").stat().st_size > 0


@needs_cgroup
@pytest.mark.parametrize(
    ("failure", "message"),
    [("exit", "exit code 1: no such model"), ("silence", "no answer"), ("memory", "killed for memory")],
)
def test_failed_run_gives_an_outcome_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str, message: str
) -> None:
    """A failed run is an outcome with a reason; the table lists it and leaves its ratio out."""
    monkeypatch.setenv("PEER_DOUBLE", str(tmp_path / "requests"))
    monkeypatch.setenv("PEER_FAILS", failure)
    request = {"threads": 1, "popularity": False, "new_tokens": 3}
    command = [sys.executable, "-S", str(DOUBLE)]
    failed = run_child(controller(), 100 * MIB, command, request, keep_cache=True)
    assert failed.failure is not None
    assert message in failed.failure
    assert requests(tmp_path)[0]["omp"] == "1"
    runs = [run_of("peer", Case(100, 8), 0, failed), run_of("ours", Case(100, 8), 0, outcome(1.0, 2.0))]
    peer, ours = summarize(runs, "peer", [], {})
    assert (peer["failed"], peer["tpot_s"]["n"], ours["ratio_tpot"]) == (1, 0, None)
    assert message in as_table([peer, ours])


@needs_cgroup
@pytest.mark.e2e
@pytest.mark.usefixtures("no_edgemoe")
def test_the_peer_computes_a_prompt_once_without_a_limit(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its state is in a file that later runs load inside the limit; they measure later tokens alone."""
    (tmp_path / "states").mkdir()
    more = ["--peer-states", str(tmp_path / "states"), "--no-popularity"]
    for _ in range(2):
        assert compare.main([*arguments, *more]) == 0
        assert "TTFT not measured, TPOT 2000.0 ms" in capsys.readouterr().err
        peer, ours = json.loads((tmp_path / "report.json").read_text())["rows"]
        assert (peer["ttft_s"]["n"], peer["tpot_s"]["n"], ours["ratio_ttft"]) == (0, 1, None)
        assert ours["ratio_tpot"] == pytest.approx(2.0 / ours["tpot_s"]["mean"])
    saving, *loading = requests(tmp_path)
    assert (saving["saves_state"], saving["capped"], saving["new_tokens"]) == (True, True, 1)
    assert [request["saves_state"] for request in loading] == [False, False]
    (state,) = (tmp_path / "states").iterdir()
    assert {request["state"] for request in loading} == {str(state)}


def test_states_are_those_of_one_prompt_of_llama_cpp(arguments: list[str], tmp_path: Path) -> None:
    """Several prompts that decode together have none."""
    assert compare.main([*arguments, "--peer-states", str(tmp_path), "--batch", "2"]) == 2


@needs_cgroup
@pytest.mark.e2e
@pytest.mark.usefixtures("no_edgemoe")
def test_a_peer_that_crashes_with_repacking_runs_without(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The crashed run is repeated without repacking, later runs have none from the start, and the report says so."""
    monkeypatch.setenv("PEER_FAILS", "repacking")
    monkeypatch.setattr(comparison, "WARM_UP_SECONDS", 0)
    more = ["--limits", "none", "--rounds", "2", "--no-popularity"]
    assert compare.main([*arguments, *more]) == 0
    assert [request["repacking"] for request in requests(tmp_path)] == [True, False, False]
    report = json.loads((tmp_path / "report.json").read_text())
    assert [run["failure"] for run in report["runs"]] == [None] * 4
    says = "off: llama.cpp crashes with it (exit code -11"
    assert report["environment"]["repacking"].startswith(says)
    assert says in capsys.readouterr().out


@pytest.mark.e2e
@needs_native
def test_edgemoe_computes_by_the_kernel_of_the_request(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--kernel` of the comparison is the child's."""
    before, narrowest = paths.choice(), paths.available()[0]
    request = {"model": str(store), "settings": {"exact": 4}, "fill": True, "vram_limit": None, "threads": 1}
    request |= {
        "prompts": [[5, 6, 7]],
        "warm_up": [],
        "new_tokens": 2,
        "popularity": False,
        "kernel": narrowest,
    }
    try:
        edgemoe_child.answer(request)
        assert set(paths.choice().values()) == {narrowest}
    finally:
        paths.choose(before)


@needs_cgroup
@pytest.mark.e2e
@pytest.mark.usefixtures("no_edgemoe")
def test_repacking_is_off_on_request(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run without a limit has none either, and the report says so."""
    monkeypatch.setattr(comparison, "WARM_UP_SECONDS", 0)
    assert compare.main([*arguments, "--limits", "none", "--no-popularity", "--no-repacking"]) == 0
    assert [request["repacking"] for request in requests(tmp_path)] == [False]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["environment"]["repacking"] == "off"


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
@pytest.mark.e2e
def test_llama_child_starts_in_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child imports its modules outside the repository, too, and reports a model that it cannot load."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"no GGUF")
    request = {"model": str(tmp_path / "model.gguf"), "prompts": [[1]], "warm_up": [], "new_tokens": 2}
    request |= {"threads": 1, "capped": False, "repacking": True, "popularity": False, "experts": 8}
    done = start_child("tools.peers.llama_child", request)
    assert "model.gguf" in done.stderr
    assert "Traceback" not in done.stderr


def start_child(module: str, request: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Runs a child as run_child does, without a cgroup."""
    command = [sys.executable, "-m", module]
    environment = child_environment(OMP_NUM_THREADS="1")
    return subprocess.run(command, input=json.dumps(request), env=environment, capture_output=True, text=True)


@pytest.mark.e2e
@pytest.mark.folders
def test_child_finds_the_packages_in_any_directory(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that starts outside the repository, with no PYTHONPATH of its own, answers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    program = edgemoe_program("4", store)
    request = {
        "model": str(store),
        "settings": program.settings,
        "fill": True,
        "vram_limit": None,
        "threads": 1,
    }
    request |= {"new_tokens": 3, "prompts": [list(range(8))], "warm_up": [], "popularity": True}
    done = start_child(program.command[-1], request)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["tokens"]) == 3


def outcome(*times: float, **more: Any) -> Outcome:
    return Outcome({"token_times": list(times), "load_s": 1.0, **more}, None, Usage(100, 90, 0, 0))


@pytest.mark.e2e
def test_experts_are_counted(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer and edgemoe's first row answer the longest prompt once more, unlimited and without warm-up."""
    requested = []

    def child(controller: None, limit: int | None, command: object, request: Any, **_: Any) -> Outcome:
        requested.append((limit, request["popularity"], request["warm_up"], len(request["prompts"][0])))
        answer = edgemoe_child.answer(request) if "settings" in request else {"counts": [[20]]}
        return outcome(**answer)

    monkeypatch.setattr(comparison, "run_child", child)
    rows = [Program("peer", ("peer",), store), edgemoe_program("4", store), edgemoe_program("4/2", store)]
    prompts = {length: [list(range(length))] for length in (4, 8)}
    options: Any = SimpleNamespace(batch=[1], seed=0, new_tokens=3, threads=1, beside=0, keep_cache=True)
    options.context = options.kv_cache = options.peer_states = None
    options.repacking, options.kernel = True, "auto"
    none: Any = None
    runs = comparison.Comparison(none, rows, [Case(10**9, 8)], prompts, 8, 4096, options)
    runs.count()
    assert requested == [(None, True, [], 8)] * 2
    assert sorted(runs.popularity) == ["exact 4", "peer"]
    assert runs.popularity["peer"] == [[20]]
    # 8 tokens of the prompt and two decoded tokens that are fed again, two experts each.
    assert [sum(layer) for layer in runs.popularity["exact 4"]] == [20, 20]


@pytest.mark.e2e
def test_row_with_the_suffix_empty_fills_no_blocks(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 4 fills the engine's free blocks before the prompt; row 4-empty does not."""
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
            "prompts": [list(range(8))],
            "warm_up": [],
        }
        assert len(edgemoe_child.answer(request | {"popularity": False})["tokens"]) == 3
    assert residents == [StoreModel.open(store).shape.experts]
    assert edgemoe_program("4-empty", store).name == "exact 4, empty at first"
    with pytest.raises(UserError, match="4-full"):
        edgemoe_program("4-full", store)


@needs_cgroup
@pytest.mark.e2e
@pytest.mark.usefixtures("no_edgemoe")
def test_several_stores_run_in_turn(arguments: list[str], store: Path, tmp_path: Path) -> None:
    """Every setting runs with every store; rows have the stores' names, and the report has both stores' sizes."""
    (tmp_path / "other").symlink_to(store)
    assert compare.main([*arguments, "--store", str(tmp_path / "other"), "--no-popularity"]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert [row["name"] for row in report["rows"]] == ["llama.cpp", "exact 4 (store)", "exact 4 (other)"]
    stores = report["environment"]["stores"]
    assert stores["store"] == stores["other"]
    assert stores["store"]["dense_bytes_per_token"] == StoreModel.open(store).dense_bytes_per_token


def test_stores_of_other_models_or_of_one_name_are_refused(
    arguments: list[str], store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the stores, or says which sizes differ."""
    assert compare.main([*arguments, "--store", str(store)]) == 2
    assert "store, store" in capsys.readouterr().err
    assert compare.main([*arguments, "--store", str(tmp_path / "other"), "--quality", "q.json"]) == 2
    assert "2 stores" in capsys.readouterr().err
    make = ["--like", "small", "--layers", "1", "--max-level", "4", str(tmp_path / "other")]
    assert synthetic_store.main(make) == 0
    assert compare.main([*arguments, "--store", str(tmp_path / "other")]) == 2
    assert "stores of one model" in capsys.readouterr().err


def test_an_embedding_that_is_the_head_counts(tmp_path: Path) -> None:
    """Without output.weight a token multiplies with the whole embedding."""
    writer = gguf.GGUFWriter(tmp_path / "tied.gguf", "qwen3moe")
    writer.add_expert_count(4)
    writer.add_expert_used_count(1)
    writer.add_tensor("token_embd.weight", np.zeros((5, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert gguf_bytes_per_token(tmp_path / "tied.gguf") == 40


def test_one_file_of_several_is_no_model(tmp_path: Path) -> None:
    """Its tensors alone would be too few bytes."""
    writer = gguf.GGUFWriter(tmp_path / "first.gguf", "qwen3moe")
    writer.add_uint16(gguf.Keys.Split.LLM_KV_SPLIT_COUNT, 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UserError, match="one of 2"):
        gguf_bytes_per_token(tmp_path / "first.gguf")


def test_ratios_are_of_means() -> None:
    """A ratio divides the means of two runs each, 6 s by 3 s, and is no mean of ratios; each case has its own peer."""
    runs = [
        run_of("peer", Case(100, 8), 0, outcome(2.0, 5.0)),
        run_of("peer", Case(100, 8), 1, outcome(4.0, 9.0)),
        run_of("ours", Case(100, 8), 0, outcome(1.0, 2.0)),
        run_of("ours", Case(100, 8), 1, outcome(1.0, 4.0)),
        run_of("ours", Case(None, 8), 0, outcome(1.0, 4.0)),
    ]
    _, ours, alone = summarize(runs, "peer", [], {})
    assert ours["ratio_tpot"] == pytest.approx(4.0 / 2.0)
    assert ours["ratio_ttft"] == pytest.approx(3.0)
    assert ours["tpot_s"]["p50"] == 2.0
    assert alone["ratio_tpot"] is None
    table = as_table([ours, alone]).splitlines()
    assert table[2].startswith("| 100 B | 8 | 1 | ours | 2 | 1.00 | 1.00 | 2000.0 |")
    assert table[3].startswith("| none | 8 | 1 | ours | 1 |")


def test_a_step_of_several_prompts_counts_each_ones_token() -> None:
    """A step of 4 prompts that takes 2 s is 2 tokens per second; batches are compared with equal batches alone."""
    runs = [
        run_of("peer", Case(None, 8), 0, outcome(1.0, 2.0)),
        run_of("peer", Case(None, 8, 4), 0, outcome(1.0, 5.0)),
        run_of("ours", Case(None, 8, 4), 0, outcome(1.0, 3.0)),
    ]
    _, peer, ours = summarize(runs, "peer", [], {})
    assert (peer["tok_s"], ours["tok_s"], ours["ratio_tpot"]) == (1.0, 2.0, 2.0)
    assert str(Case.of(ours)) == "none, 8 tokens, batch 4"


@pytest.mark.e2e
def test_prompts_decode_together(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every timed step decodes a token of each prompt; the last prompt's tokens are as if it ran alone."""
    program, steps = edgemoe_program("4", store), list[tuple[bool, int]]()
    begin = Engine.begin

    def counted(engine: Engine, of: Step, **options: Any) -> StepContext:
        steps.append((of.decodes, of.rows))
        return begin(engine, of, **options)

    monkeypatch.setattr(Engine, "begin", counted)
    prompts = [[1, 2, 3], list(range(200)), [7, 8, 9, 10]]
    request = {"model": str(store), "settings": program.settings, "fill": True, "vram_limit": None}
    request |= {"threads": 1, "new_tokens": 4, "warm_up": [], "popularity": False}
    together = edgemoe_child.answer(request | {"prompts": prompts})
    assert [rows for decodes, rows in steps if decodes][-3:] == [3, 3, 3]
    assert together["row"]["bytes_per_token"]["vram"] > 0
    alone = edgemoe_child.answer(request | {"prompts": prompts[-1:]})
    assert together["tokens"] == alone["tokens"]
    assert len(together["token_times"]) == len(alone["token_times"]) == 4


def test_fraction_of_the_bound_uses_the_best_rates() -> None:
    """At twice the probed rates 4 s contain 1.5 s of disk, which overlaps 1.25 s of dense weights and experts."""
    row = {
        "bound_per_tier_s": {"dense": 2.0, "ssd": 3.0, "dram": 0.0, "vram": 0.5},
        "bandwidth": {"ssd": 1.0, "dram": 5.0, "vram": 10.0},
    }
    run = {"row": row, "tpot_s": 4.0}
    assert reached(run, {"ssd": 2.0, "dram": 5.0, "vram": 20.0}) == pytest.approx(1.5 / 4)


def test_popularity_of_two_programs() -> None:
    """One of four experts takes 7 of 10 choices of both programs; a layer of equal counts has no correlation."""
    first, second = popularity.compare([[7, 1, 2, 0], [1, 1, 1, 1]], [[14, 2, 4, 0], [3, 0, 0, 1]])
    assert first.top == (0.7, 0.7)
    assert first.unused == (1, 1)
    assert first.correlation == pytest.approx(1)
    assert second.correlation is None
    assert second.unused == (0, 2)


@pytest.mark.parametrize(
    ("change", "message", "code"),
    [
        (["--gguf", "nowhere.gguf"], "--gguf", 2),
        (["--peer", "accelerate"], "--checkpoint", 2),
        (["--limits", "613MB", "--batch", "1,32"], "32 sequences", 3),
        (["--limits", "much"], "'much'", 2),
        (["--limits", "601MB"], "--vram-limit", 3),
        (["--json", "no/where.json"], "no/where.json", 2),
        (["--plot", "no/where.png"], "no/where.png", 2),
        (["--plot", "rows.doc"], "rows.doc", 2),
    ],
)
def test_impossible_options_are_refused_before_the_first_run(
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: list[str],
    message: str,
    code: int,
) -> None:
    """The exit code is 2, or 3 where the limit is too small for edgemoe, and the message names the value."""
    assert compare.main([*arguments, *change]) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "requests").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [("--rounds", "0"), ("--threads", "-1"), ("--prompt-tokens", "8,0"), ("--new-tokens", "1")],
)
def test_numbers_that_measure_nothing_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    """Too few runs, threads or tokens exit 2 with the option's name."""
    with pytest.raises(SystemExit) as stopped:
        compare.main([*arguments, name, value])
    assert stopped.value.code == 2
    assert name in capsys.readouterr().err
