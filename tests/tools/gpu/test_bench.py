"""tools/gpu/bench.py: a rehearsal on the CPU, and its arithmetic on given figures."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
from device_double import DoubleDevice
from short_probes import probe_briefly

from edgemoe.bench import bandwidth
from edgemoe.speed.tiers import copy_speed
from tools.gpu import aims, bench, cases, children, run_cases
from tools.synthetic import store as synthetic_store

TINY = [
    "--device",
    "cpu",
    "--like",
    "tiny",
    "--limits",
    "3MB",
    "--dram-small",
    "200KB",
    "--offload-layers",
    "2",
]
TINY += ["--prompt-tokens", "16", "--new-tokens", "3", "--offload-tokens", "2"]


@pytest.mark.e2e
@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_rehearsal_measures_every_case(monkeypatch, capsys, tmp_path):
    """Every case is measured cold and warm, the store is removed, and the output says that no figure is a GPU's."""
    probe_briefly(monkeypatch)
    work, file = tmp_path / "work", tmp_path / "gpu.json"
    work.mkdir()
    trace = tmp_path / "trace.json"
    assert bench.main([*TINY, "--work", str(work), "--json", str(file), "--trace", str(trace)]) == 0
    assert any("topk" in event["name"] for event in json.loads(trace.read_text())["traceEvents"])
    report = json.loads(file.read_text())
    tiers = [f"3 MB, DRAM large: {row.name}" for row in cases.TIERED]
    tiers += [f"3 MB, DRAM small: {row.name}" for row in cases.TIERED[:2]]
    loaded = [f"3 MB, DRAM large: {row.name}" for row in cases.LOADED]
    names = {*tiers, *loaded, "everything resident: exact 4"}
    assert {(row["name"], row["arm"]) for row in report["rows"]} == {
        (n, a) for n in names for a in ("cold", "warm")
    }
    assert not any(work.iterdir())
    assert report["left_out"] == []
    assert all(aim["found"] is not None for aim in report["aims"])
    by_name = {row["name"]: row for row in report["rows"] if row["arm"] == "warm"}
    from_dram, from_ssd = (by_name[name] for name in loaded)
    assert from_ssd["bytes_per_token"]["ssd"] > 0 == from_ssd["dram_limit_bytes"]
    assert from_dram["bytes_per_token"]["ssd"] < from_ssd["bytes_per_token"]["ssd"]
    assert from_dram["bytes_per_token"]["dram"] > 0 == from_ssd["bytes_per_token"]["dram"]
    assert by_name["everything resident: exact 4"]["hit_rate"]["vram"] == 1
    assert report["offload"]["layers"] == 2
    printed = capsys.readouterr().out
    assert printed.startswith("A rehearsal on the CPU: no figure here is a GPU's.")
    assert "GPU's.\n\n| row |" in printed


@pytest.fixture
def synthesized(monkeypatch):
    """Writes stores in this process."""

    def in_this_process(arguments, layout, store):
        options = ["--like", arguments.like, "--layout", layout, "--max-level", "4"]
        assert synthetic_store.main([*options, str(store)]) == 0

    monkeypatch.setattr(children, "synthesize", in_this_process)


@pytest.mark.usefixtures("synthesized")
def test_cases_without_time_are_listed(capsys, tmp_path):
    """After the minutes no case starts, each is listed, and every aim is not measured."""
    assert bench.main([*TINY, "--minutes", "0", "--work", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("0 minutes were over") == 6  # five cases, and accelerate's
    assert printed.count("not measured") == 6


@pytest.mark.e2e
@pytest.mark.usefixtures("synthesized")
@pytest.mark.parametrize(
    ("only", "rows", "left_out"),
    [
        (["from SSD"], ["on demand from SSD"], 12),
        (["14 MB", "everything resident"], ["exact 4", "exact 4", "4/2 + prefetch"], 10),
        (["3 MB, DRAM small: exact 4", "accelerate"], ["offload", "exact 4"], 11),
        (["accelerate"], ["offload"], 12),
    ],
)
def test_only_some_rows_are_measured(monkeypatch, capsys, tmp_path, only, rows, left_out):
    """A row runs if one of the texts begins a word of its name; the others are listed with the reason."""
    ran = []

    def run_bench(store, request, notify):
        ran.extend(row.name for row in request.rows)
        return {"environment": {}, "rows": []}

    monkeypatch.setattr(run_cases, "run_bench", run_bench)
    monkeypatch.setattr(bench, "offload", lambda *_: ran.append("offload") or "it ran")
    options = [option for text in only for option in ("--only", text)]
    assert bench.main([*TINY, "--limits", "3MB,14MB", *options, "--work", str(tmp_path)]) == 0
    assert ran == rows
    assert capsys.readouterr().out.count("not in --only") == left_out


@pytest.mark.parametrize("text", ["16GB", "4 MB"])
def test_a_text_of_no_row_is_refused_before_measuring(monkeypatch, capsys, text):
    """The tool exits 2 with every row's name, and synthesizes no store."""
    monkeypatch.setattr(children, "synthesize", lambda *_: pytest.fail("began"))
    assert bench.main([*TINY, "--limits", "3MB,14MB", "--only", text]) == 2
    assert "3 MB, DRAM small: exact 4" in capsys.readouterr().err


def row(name: str, tpot: float, *, peak: int = 9) -> dict:
    return {
        "name": f"12 GB, DRAM large: {name}",
        "arm": "warm",
        "tpot_s": {"mean": tpot},
        "ttft_s": {"mean": 10 * tpot},
        "fraction_of_bound": 0.75,
        "peak_vram_bytes": peak,
        "vram_limit_bytes": 10,
    }


def test_aims_are_ratios_of_the_rows():
    """A figure is the quotient of the two times in its name, for offload a layer; the largest peak counts."""
    rows = [
        row("exact 4", 0.050),
        row("4/2 + prefetch", 0.040, peak=11),
        row("on demand from SSD", 0.200),
        row("on demand from DRAM", 0.100),
    ]
    found = aims.aims(rows, {"layers": 16, "ttft_s": 1.6, "tpot_s": 0.32}, 48, 12_000_000_000)
    # accelerate: 20 ms per layer and 100 for the prompt; 4/2: 40 ms and 400 of 48 layers
    assert [aim["found"] for aim in found] == pytest.approx([0.75, 2.5, 5.0, 24.0, 12.0, 1.1])
    missing = aims.aims([], "not installed", 48, 12_000_000_000)
    assert [aim["found"] for aim in missing] == [None] * 6


def test_smallest_limit_comes_first():
    """Limits have any order on the command line; the cases of the smallest come first, cases on demand last."""
    made = list(cases.cases([24, 12, 16], 100, 4))
    assert [(case.vram, case.dram, len(case.rows)) for case in made] == [
        *[(12, 100, 5), (None, 0, 1), (12, 100, 1), (12, 4, 2), (16, 100, 2), (24, 100, 2), (12, 100, 1)],
    ]


def test_limit_that_is_no_size_is_refused(capsys):
    """The tool exits 2 with the value before it writes a file."""
    assert bench.main(["--device", "cpu", "--limits", "many"]) == 2
    assert "many" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--runs", "0"], "1 or more"),
        (["--layers", "-3"], "1 or more"),
        (["--new-tokens", "1"], "2 or more"),
        (["--offload-tokens", "1"], "2 or more"),
        (["--offload-layers", "many"], "1 or more"),
    ],
)
def test_numbers_that_measure_nothing_are_refused(capsys, options, expected):
    """The tool exits 2 with the expected number."""
    with pytest.raises(SystemExit) as ended:
        bench.main(["--device", "cpu", *options])
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--work"])
def test_missing_folder_is_refused_before_measuring(monkeypatch, capsys, tmp_path, option):
    """Without a folder for the report or the store the tool exits 2 and synthesizes no store."""
    monkeypatch.setattr(children, "synthesize", lambda *_: pytest.fail("began"))
    assert bench.main([*TINY, option, str(tmp_path / "none" / "gpu.json")]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err


def test_links_are_measured_by_the_devices_copies(monkeypatch):
    """The probe pins host memory, unpins it at the end, and keeps every rule of the device."""
    probe_briefly(monkeypatch)
    device = DoubleDevice(seed=1)
    assert copy_speed(device, 1 << 20, 0.02) > 0
    assert bandwidth.read_device(device) > 0
    rates = bandwidth.machine_rates(1e9, device)
    assert {place: each.ssd for place, each in rates.items()} == {"cpu": 1e9, "cuda": 1e9}
    assert min(each.vram for each in rates.values()) > 0
    assert device.broken == []
