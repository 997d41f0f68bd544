"""The benchmark: its numbers follow from its own samples, and its samples from the operating system's."""

from __future__ import annotations

import statistics

import pytest

from edgemoe import bench as bench_module
from edgemoe.bench import BenchRequest, report_lines, run_bench, summary
from edgemoe.engine import StoreModel
from storage.errors import UserError

ROW = {
    "name",
    "arm",
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
}
SUMMARY = {"mean", "p50", "p90", "p95", "p99", "std", "n"}
NEW_TOKENS, RUNS = 20, 2
EXPERT_BYTES = 20480


@pytest.fixture(scope="module")
def report(tiny_store):
    """Returns a function that benchmarks with room for so many experts, once."""
    done = {}

    def run(experts: int):
        if experts not in done:
            store = StoreModel.open(tiny_store)
            least = store.plan(vram_limit=None, context=64).minimum_vram_bytes
            plan = store.plan(vram_limit=least + (experts - 2) * EXPERT_BYTES, context=64)
            request = BenchRequest(None, 8, NEW_TOKENS, RUNS, 0)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(bench_module, "PROBE_SECONDS", 0.1)
                done[experts] = run_bench(store, plan, request, exact=True)
        return done[experts]

    return run


def read(sample) -> int:
    return sample["prefill"]["ssd_bytes"] + sample["decode"]["ssd_bytes"]


def test_every_field_is_there(report):
    """Two rows, cold and warm, with the documented names, and as many samples as runs were asked for."""
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
        assert len(row["samples"]) == RUNS
    environment = report(3)["environment"]
    assert (environment["prompt"], environment["runs"], environment["new_tokens"]) == (
        "random tokens",
        RUNS,
        NEW_TOKENS,
    )


def test_times_follow_from_the_samples(report):
    """TPOT is the time from the first to the last token over the gaps between them; the rest is statistics."""
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
        assert row["prefill_tok_s"] == pytest.approx(8 * RUNS / sum(s["ttft_s"] for s in row["samples"]))


def test_bytes_and_the_bound_follow_from_the_counts(report):
    """Every miss is one expert read; the bound is what those bytes take at the bandwidths beside it."""
    for row in report(3)["rows"]:
        counts = [sample["decode"] for sample in row["samples"]]
        requests, steps = sum(c["requests"] for c in counts), RUNS * (NEW_TOKENS - 1)
        assert requests == steps * 2 * 2
        misses = requests - sum(c["vram_hits"] for c in counts)
        assert sum(c["ssd_bytes"] for c in counts) == misses * EXPERT_BYTES
        assert row["hit_rate"]["vram"] == pytest.approx(1 - misses / requests)
        per_token, bandwidth = row["bytes_per_token"], row["bandwidth"]
        assert per_token["ssd"] == pytest.approx(misses * EXPERT_BYTES / steps)
        experts = 2 * 2 * EXPERT_BYTES
        dense = per_token["vram"] - experts
        bound = dense / bandwidth["vram"] + max(
            experts / bandwidth["vram"], per_token["ssd"] / bandwidth["ssd"]
        )
        assert row["bound_s"] == pytest.approx(bound)
        assert row["fraction_of_bound"] == pytest.approx(bound / row["tpot_s"]["mean"])


@pytest.mark.usefixtures("accounted")
def test_bytes_are_the_operating_systems(report):
    """What a sample says it read is what the kernel fetched for the process meanwhile, within 2 %.

    Never less. More only while code that the kernel had dropped from its cache comes back, which happens once.
    """
    samples = [sample for row in report(3)["rows"] for sample in row["samples"]]
    extra = [sample["disk_read_bytes"] / read(sample) - 1 for sample in samples]
    assert all(read(sample) > 20 * EXPERT_BYTES for sample in samples)
    assert min(extra) >= 0
    assert sorted(extra)[len(extra) // 2] <= 0.02


@pytest.mark.parametrize("experts", [12, 16])
def test_cold_reads_more_than_warm(report, experts):
    """The warm arm runs the cold one's prompt again: it reads less, and nothing where everything fits."""
    cold, warm = report(experts)["rows"]
    for before, after in zip(cold["samples"], warm["samples"], strict=True):
        assert read(before) > read(after)
        assert (read(after) == 0) == (experts == 16)


def test_percentiles_by_hand():
    """Of 1..5, between neighbours in proportion: the 90th lies 0.6 of the way from 4 to 5."""
    got = summary([5.0, 1.0, 4.0, 2.0, 3.0])
    want = {"mean": 3, "p50": 3, "p90": 4.6, "p95": 4.8, "p99": 4.96, "std": 2.5**0.5, "n": 5}
    assert got == pytest.approx(want)
    assert summary([7.0])["std"] is None
    assert summary([]) == dict.fromkeys(SUMMARY - {"n"}) | {"n": 0}


def test_a_report_for_people(report):
    """Both arms, with their times, are in the lines."""
    rows, text = report(3)["rows"], "\n".join(report_lines(report(3)))
    for row in rows:
        assert f"{row['arm']} cache" in text
        assert f"TPOT {1000 * row['tpot_s']['mean']:.1f} ms" in text


def request_for(path, tokens: int = 8) -> BenchRequest:
    return BenchRequest(path, tokens, 2, 2, 0)


@pytest.mark.parametrize("content", [None, b"too short", b"\xff\xfe\xff"])
def test_a_prompt_file_that_will_not_do(tiny_store, tmp_path, content):
    """Missing, too short or not UTF-8: a user error that names the file, before anything is measured."""
    path = tmp_path / "prompt.txt"
    if content is not None:
        path.write_bytes(content)
    store = StoreModel.open(tiny_store)
    with pytest.raises(UserError, match=r"prompt\.txt"):
        run_bench(store, store.plan(vram_limit=None, context=256), request_for(path, 100), exact=True)


def test_prompts_come_from_the_file(tiny_store, tmp_path, monkeypatch):
    """Each run gets the next piece of the file, and the report says which file it was."""
    monkeypatch.setattr(bench_module, "PROBE_SECONDS", 0.02)
    path = tmp_path / "prompt.txt"
    path.write_text("the quick brown fox jumps over the lazy dog " * 3)
    store = StoreModel.open(tiny_store)
    done = run_bench(store, store.plan(vram_limit=None, context=32), request_for(path), exact=True)
    assert done["environment"]["prompt"] == "prompt.txt"
    assert [sample["prompt_tokens"] for row in done["rows"] for sample in row["samples"]] == [8] * 4
