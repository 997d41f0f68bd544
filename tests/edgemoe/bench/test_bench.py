"""The benchmark: its numbers follow from its samples, and its samples agree with the operating system's counts."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from short_probes import probe_briefly

from edgemoe.bench import run as run_module
from edgemoe.bench.rows import BenchRow, ablation_rows, single_row
from edgemoe.bench.run import ARMS, BenchRequest, make_plans, run_bench
from edgemoe.bench.summary import summary
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.errors import ContextExceeded, DoesNotFit, UserError
from edgemoe.machine.process import peak_resident_bytes, reset_peak, resident_bytes
from edgemoe.policy.settings import RunSettings

pytestmark = pytest.mark.e2e

ROW = {
    "name",
    "arm",
    "valid",
    "levels",
    "retention",
    "prefetch",
    "eviction",
    "vram_limit_bytes",
    "ttft_s",
    "tpot_s",
    "itl_s",
    "prefill_tok_s",
    "decode_tok_s",
    "bytes_per_token",
    "hit_rate",
    "levels_used",
    "bandwidth",
    "bound_s",
    "fraction_of_bound",
    "samples",
    "quality",
    "importance",
    "heavy_hitters",
    "depth",
    "critical",
    "renormalise",
}
SUMMARY = {"mean", "p50", "p90", "p95", "p99", "std", "n"}
NEW_TOKENS, RUNS = 20, 2
EXPERT_BYTES = 20480


@pytest.fixture(scope="module", autouse=True)
def short_probes():
    """Measures bandwidths for 20 ms."""
    with pytest.MonkeyPatch.context() as patch:
        probe_briefly(patch)
        yield


def limit_for(store: StoreModel, experts: int, context: int = 64) -> int:
    """Returns the limit in bytes that fits this many experts at level 8."""
    least = store.plan(vram_limit=None, context=context).minimum_vram_bytes
    return least + (experts - 2) * EXPERT_BYTES


@pytest.fixture(scope="module")
def report(tiny_store):
    """Returns a function that benchmarks with a limit of that many experts, once for each number."""
    done = {}

    def run(experts: int):
        if experts not in done:
            store = StoreModel.open(tiny_store)
            rows = single_row(RunSettings.uniform(8))
            done[experts] = run_bench(
                store,
                BenchRequest(
                    rows,
                    vram_limit=limit_for(store, experts),
                    prompt_tokens=8,
                    new_tokens=NEW_TOKENS,
                    runs=RUNS,
                    context=64,
                ),
            )
        return done[experts]

    return run


def read(sample) -> int:
    return sum(sample[phase]["counts"]["ssd_bytes"] for phase in ("prefill", "decode"))


def test_every_field_is_there(report):
    """Two rows, cold and warm, with the documented names and a sample for each run."""
    rows = report(3)["rows"]
    assert [row["arm"] for row in rows] == ["cold", "warm"]
    for row in rows:
        assert set(row) >= ROW
        assert all(set(row[name]) == SUMMARY for name in ("ttft_s", "tpot_s", "itl_s"))
        assert (row["ttft_s"]["n"], row["itl_s"]["n"]) == (RUNS, RUNS * (NEW_TOKENS - 1))
        assert set(row["bytes_per_token"]) == set(row["bandwidth"]) == {"ssd", "dram", "vram"}
        assert all(rate > 0 for rate in row["bandwidth"].values())
        assert set(row["hit_rate"]) == {"vram", "dram"}
        assert row["levels_used"] == {"8": RUNS * (NEW_TOKENS - 1) * 4, "4": 0, "2": 0, "0": 0}
        assert (row["bits_per_weight_read"], row["effective_retention"]) == (8.5, 1)
        assert (row["quality"], len(row["samples"])) == (None, RUNS)
    environment = report(3)["environment"]
    assert {name: environment[name] for name in ("prompt_tokens", "new_tokens", "runs", "seed")} == {
        "prompt_tokens": 8,
        "new_tokens": NEW_TOKENS,
        "runs": RUNS,
        "seed": 0,
    }
    assert len(environment["bandwidth_probes"]) == RUNS + 1


def test_times_follow_from_the_samples(report):
    """TPOT is the time from the first to the last token over the number of gaps; the rest is statistics."""
    for row in report(3)["rows"]:
        tpots = []
        for sample in row["samples"]:
            gaps = sample["itl_s"]
            assert len(gaps) == NEW_TOKENS - 1
            assert all(gap > 0 for gap in (*gaps, sample["ttft_s"]))
            tpots.append(sum(gaps) / (NEW_TOKENS - 1))
            assert sample["tpot_s"] == pytest.approx(tpots[-1])
        assert row["tpot_s"]["mean"] == pytest.approx(statistics.fmean(tpots))
        assert row["tpot_s"]["std"] == pytest.approx(statistics.stdev(tpots))
        assert row["decode_tok_s"] == pytest.approx(1 / statistics.fmean(tpots))
        prefills = [sample["prefill_s"] for sample in row["samples"]]
        assert all(0 < t < s["ttft_s"] for t, s in zip(prefills, row["samples"], strict=True))
        assert row["prefill_tok_s"] == pytest.approx(8 * RUNS / sum(prefills))


def test_bytes_and_the_bound_follow_from_the_counts(report):
    """Every miss reads one expert; the bound is the time of these bytes at the reported bandwidths."""
    whole = report(3)
    for row in whole["rows"]:
        counts = [sample["decode"]["counts"] for sample in row["samples"]]
        requests, steps = sum(c["requests"] for c in counts), RUNS * (NEW_TOKENS - 1)
        assert requests == steps * 2 * 2
        misses = requests - sum(c["vram_hits"] for c in counts)
        assert sum(c["ssd_bytes"] for c in counts) == misses * EXPERT_BYTES
        assert row["hit_rate"]["vram"] == pytest.approx(1 - misses / requests)
        per_token, bandwidth = row["bytes_per_token"], row["bandwidth"]
        rates = [rate for probe in whole["environment"]["bandwidth_probes"] for rate in probe["ssd"].values()]
        rates += [s["prefill"]["counts"]["ssd_bytes"] / s["prefill_s"] for s in row["samples"]]
        assert bandwidth["ssd"] == pytest.approx(max(rates))
        assert per_token["ssd"] == pytest.approx(misses * EXPERT_BYTES / steps)
        experts = 2 * 2 * EXPERT_BYTES
        dense = per_token["vram"] - experts
        parts = {
            "dense": dense / bandwidth["vram"],
            "vram": experts / bandwidth["vram"],
            "dram": 0,
            "ssd": per_token["ssd"] / bandwidth["ssd"],
        }
        assert row["bound_per_tier_s"] == pytest.approx(parts)
        assert row["bound_s"] == pytest.approx(max(parts["dense"] + parts["vram"], parts["ssd"]))
        tpot = row["tpot_s"]["mean"]
        assert row["fraction_of_bound"] == pytest.approx(row["bound_s"] / tpot)
        assert row["fraction_per_tier"]["ssd"] == pytest.approx(parts["ssd"] / tpot)


@pytest.mark.usefixtures("accounted")
def test_bytes_are_the_operating_systems(report):
    """The bytes that a sample reports are the bytes that the operating system read for the process, within 2 %.

    Never fewer. More only when dropped pages of code are read again, which happens once.
    """
    samples = [sample for row in report(3)["rows"] for sample in row["samples"]]
    extra = [sample["disk_read_bytes"] / read(sample) - 1 for sample in samples]
    assert all(read(sample) > 20 * EXPERT_BYTES for sample in samples)
    assert min(extra) >= 0
    assert sorted(extra)[len(extra) // 2] <= 0.02


@pytest.mark.parametrize("experts", [12, 16])
def test_cold_reads_more_than_warm(report, experts):
    """The warm arm runs the same prompt again: it reads less, and nothing where everything fits."""
    cold, warm = report(experts)["rows"]
    for before, after in zip(cold["samples"], warm["samples"], strict=True):
        assert read(before) > read(after)
        assert (read(after) == 0) == (experts == 16)


def test_percentiles_by_hand():
    """Percentiles of 1..5 by linear interpolation: the 90th lies 0.6 of the way from 4 to 5."""
    got = summary([5.0, 1.0, 4.0, 2.0, 3.0])
    want = {"mean": 3, "p50": 3, "p90": 4.6, "p95": 4.8, "p99": 4.96, "std": 2.5**0.5, "n": 5}
    assert got == pytest.approx(want)
    assert summary([7.0])["std"] is None
    assert summary([]) == dict.fromkeys(SUMMARY - {"n"}) | {"n": 0}


class Opened:
    """Records the engines that a benchmark opens: their settings in order, and how many are open at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.settings: list[RunSettings] = []
        self.now = self.most = 0
        watch = self

        class Watched(Engine):
            def __init__(self, store, plan, settings, **others):
                super().__init__(store, plan, settings, **others)
                watch.settings.append(settings)
                watch.now += 1
                watch.most = max(watch.most, watch.now)

            def close(self):
                watch.now -= 1
                super().close()

        monkeypatch.setattr(run_module, "Engine", Watched)


def two_rows() -> tuple[BenchRow, ...]:
    return (BenchRow("low", RunSettings.uniform(4)), BenchRow("high", RunSettings.uniform(8)))


def test_rows_take_turns(tiny_store, monkeypatch):
    """After a warm-up, every run goes through all rows, another row first each time; each prompt set has an engine, one
    at a time."""
    opened = Opened(monkeypatch)
    store = StoreModel.open(tiny_store)
    done = run_bench(store, BenchRequest(two_rows(), prompts="both", prompt_tokens=4, new_tokens=2, runs=2))
    assert [settings.levels[0] for settings in opened.settings] == [4, 4, 4, 8, 8, 8, 8, 4, 4]
    assert (opened.now, opened.most) == (0, 1)
    rows = [(row["name"], row["prompts"] == "random tokens", row["arm"]) for row in done["rows"]]
    assert rows == [(n, random, arm) for n in ("low", "high") for random in (False, True) for arm in ARMS]
    assert all(len(row["samples"]) == 2 for row in done["rows"])


def test_the_bandwidth_is_that_of_the_levels_in_use(tiny_store):
    """The disk is measured at each row's highest level that it reads; every row has the best of all probes, or of its
    own prompts where these read faster, as with other work on the machine."""
    store = StoreModel.open(tiny_store)
    done = run_bench(store, BenchRequest(two_rows(), prompt_tokens=4, new_tokens=2, runs=1))
    probes = done["environment"]["bandwidth_probes"]
    assert all(set(probe["ssd"]) == {4, 8} for probe in probes)
    for row in done["rows"]:
        prompts = [
            sample["prefill"]["counts"]["ssd_bytes"] / sample["prefill_s"] for sample in row["samples"]
        ]
        assert row["bandwidth"]["ssd"] == max(
            *(probe["ssd"][int(row["levels"])] for probe in probes), *prompts
        )


def test_quality_is_joined_by_setting(tiny_store):
    """A row has the measures of its own setting, and null where that was not measured."""
    store = StoreModel.open(tiny_store)
    quality = [{"setting": "exact 4", "phase": "decode", "kl": 0.25}]
    done = run_bench(store, BenchRequest(two_rows(), prompt_tokens=4, new_tokens=2, runs=1), quality)
    found = {row["name"]: row["quality"] for row in done["rows"]}
    assert found["high"] is None
    assert (found["low"]["setting"], found["low"]["decode"]["kl"]) == ("exact 4", 0.25)


@pytest.mark.parametrize(
    ("change", "error"),
    [({"context": 5}, ContextExceeded), ({"vram_limit": 1000}, DoesNotFit), ({"prompts": "?"}, UserError)],
)
def test_impossible_requests_are_refused_first(tiny_store, monkeypatch, change, error):
    """An impossible context, limit or choice of prompts is refused before any engine is opened."""
    opened = Opened(monkeypatch)
    rows = single_row(RunSettings.uniform(8))
    request = BenchRequest(rows, **({"prompt_tokens": 4, "new_tokens": 2, "runs": 1} | change))
    with pytest.raises(error):
        run_bench(StoreModel.open(tiny_store), request)
    assert opened.settings == []


def test_a_peak_is_its_own_engines(tiny_store, monkeypatch):
    """A larger peak of the process before the engine was opened, as of a bigger row, is not in the row's peak."""
    if not reset_peak():
        pytest.skip("this system cannot reset the peak")
    before: list[int] = []

    class AfterABigOne(Engine):
        def __init__(self, *arguments, **others):
            before.append(resident_bytes())
            np.ones(400_000_000, np.uint8).sum()
            assert peak_resident_bytes() > before[-1] + 350_000_000
            super().__init__(*arguments, **others)

    monkeypatch.setattr(run_module, "Engine", AfterABigOne)
    store = StoreModel.open(tiny_store)
    request = BenchRequest(two_rows(), prompt_tokens=4, new_tokens=2, runs=1)
    for row in run_bench(store, request)["rows"]:
        assert min(before) < row["peak_process_bytes"] < max(before) + 200_000_000
        assert 0 < row["peak_vram_bytes"] < 200_000_000


@pytest.fixture(scope="module")
def ablation(tiny_store):
    """An ablation with a limit of six experts at level 8, every row once."""
    store = StoreModel.open(tiny_store)
    rows, notes = ablation_rows("ours", 8)
    request = BenchRequest(
        rows, vram_limit=limit_for(store, 6), prompt_tokens=12, new_tokens=12, runs=1, context=64, notes=notes
    )
    return run_bench(store, request)


def test_the_ablation_has_every_row(ablation):
    """Each row ran with the settings in its name."""
    settings = {
        row["name"]: (row["levels"], row["retention"], row["cache"], row["prefetch"], row["eviction"])
        for row in ablation["rows"]
    }
    assert settings == {
        "load on demand": ("4", None, False, "off", "none"),
        "cache": ("4", None, True, "off", "lru-experts"),
        "cache + prefetch": ("4", None, True, "full", "lru-experts"),
        "cache + 4/2": ("4/2", 0.75, True, "off", "lru-experts"),
        "cache + 4/2 + prefetch": ("4/2", 0.75, True, "full", "lru-experts"),
        "cache + 4/0 + prefetch": ("4/0", 0.75, True, "full", "lru-experts"),
        "ours: exact 4, planes": ("4", None, True, "auto", "lfru"),
        "ours: 4/2, planes": ("4/2", 0.75, True, "auto", "lfru"),
        "ours: 8/4/2/0, planes": ("8/4/2/0", 0.75, True, "auto", "lfru"),
    }
    assert len({row["readers"] for row in ablation["rows"]}) == 1
    rounding = {row["name"]: row["critical"] for row in ablation["rows"] if row["levels"] in ("4/2", "4/0")}
    assert {name for name, how in rounding.items() if how == "ceil"} == {n for n in rounding if "cache" in n}


def test_loading_on_demand_has_no_second_tier(tiny_store):
    """Loading on demand has no DRAM tier, because it is a cache; the other rows have one."""
    store = StoreModel.open(tiny_store)
    demand, cache, *_ = ablation_rows("ours", 8)[0]
    request = BenchRequest((demand, cache), vram_limit=limit_for(store, 4, 128), dram_limit=10 * EXPERT_BYTES)
    assert [plan.dram_experts > 0 for plan in make_plans(store, request)] == [False, True]


def test_each_part_of_the_ablation_acts(ablation, tiny_store):
    """Load on demand reads everything; a cache hits; levels read fewer bits; 4/0 skips; predictions are counted."""
    rows = {row["name"]: row for row in ablation["rows"] if row["arm"] == "warm"}
    demand, cache = rows["load on demand"], rows["cache"]
    whole = StoreModel.open(tiny_store).manifest.geometry.prefix_bytes(4)
    for row in (row for row in ablation["rows"] if row["name"] == "load on demand"):
        assert row["hit_rate"] == {"vram": 0, "dram": 0}
        assert row["bytes_per_token"]["ssd"] == 2 * 2 * whole
    assert demand["bytes_per_token"]["ssd"] > cache["bytes_per_token"]["ssd"]
    assert demand["hit_rate"]["vram"] < cache["hit_rate"]["vram"]
    assert rows["cache + 4/2"]["bits_per_weight_read"] < cache["bits_per_weight_read"] == 4.5
    assert rows["cache + 4/0 + prefetch"]["levels_used"]["0"] > 0
    for name, row in rows.items():
        layers = row["lookahead"]["decode"]["layers"]
        assert bool(layers) == ("prefetch" in name or "ours" in name)
        for layer in layers:
            assert layer["right"] <= min(layer["wanted"], layer["predicted"])
            assert layer["recall"] == (layer["right"] / layer["wanted"] if layer["wanted"] else None)


def test_a_store_without_level_8_leaves_a_row_out():
    """The four-level row is left out, and a note names it."""
    rows, notes = ablation_rows("ours", 4)
    assert all(row.settings.levels[0] == 4 for row in rows)
    assert len(rows) == 8
    assert len(notes) == 1
    assert "8/4/2/0" in notes[0]
    assert ablation_rows("ours", 8)[1] == ()
    rows, notes = ablation_rows("paper", 4)
    assert [row.name for row in rows][-1] == "cache + 4/0 + prefetch"
    assert "cache + 8/4/2/0 + prefetch: left out" in notes[0]


@pytest.mark.parametrize("which", ["paper", "ours"])
def test_rows_of_table_3_copy_experts_on_a_gpu(which):
    """Computed where it lies, an expert needs no look-ahead; the program's own rows compute it there."""
    places = {row.name: row.settings.in_place for row in ablation_rows(which, 8, on_gpu=True)[0]}
    assert {place for name, place in places.items() if "ours" not in name} == {"off"}
    assert {place for name, place in places.items() if "ours" in name} <= {"on"}


def test_the_papers_rows_have_the_papers_rules():
    """Each row of table 3, and four levels, by hand; nothing else differs from the program's defaults."""
    rows, notes = ablation_rows("paper", 8)
    assert notes == ()
    same = {"eviction": "lru-pool", "promotion": "whole", "scan": "off"}
    four = {"levels": (4,), "exact": True}
    mixed = {"levels": (4, 2), "retention": 0.75, "importance": "heavy-hitters", "critical": "ceil"}
    mixed |= {"rule": "paper"}
    ahead = {"speculate": "critical"}
    assert {row.name: row.settings for row in rows} == {
        "load on demand": RunSettings(**same | four, cache=False),
        "cache": RunSettings(**same | four),
        "cache + prefetch": RunSettings(**same | four | ahead),
        "cache + 4/2": RunSettings(**same | mixed),
        "cache + 4/2 + prefetch": RunSettings(**same | mixed | ahead),
        "cache + 4/0 + prefetch": RunSettings(**same | mixed | ahead | {"levels": (4, 0)}),
        "cache + 8/4/2/0 + prefetch": RunSettings(**same | mixed | ahead | {"levels": (8, 4, 2, 0)}),
    }
