"""`edgemoe bench --synthetic`: a store of random weights in the cache, made once."""

from __future__ import annotations

import json

import pytest
from short_probes import probe_briefly

from edgemoe.bench.synthetic import workload
from edgemoe.bench.synthetic.store import SYNTHETIC
from edgemoe.models import cache

SHORT = ("--prompts", "random", "--prompt-tokens", 4, "--new-tokens", 2, "--runs", 1, "--json")


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """A cache of the test's own, few groups of weights, and short probes."""
    monkeypatch.setattr(cache, "user_cache", lambda: tmp_path / "cache")
    monkeypatch.setattr(workload, "POOL", 1 << 13)
    probe_briefly(monkeypatch, peak=0)


@pytest.mark.e2e
def test_it_is_made_once(run, tmp_path):
    """The second benchmark reads the same files; both name the store."""
    reports = []
    for _ in range(2):
        code, out, err = run("bench", "--synthetic", "tiny", *SHORT)
        assert code == 0, err
        (store,) = (tmp_path / "cache" / "synthetic").iterdir()
        assert f"synthetic store: {store}" in err
        written = (store / "store.json").stat().st_mtime_ns
        reports.append((json.loads(out)["environment"]["store"], written))
    assert reports[0] == reports[1]


def test_what_is_refused(run, tiny_store):
    """A name that is none, and a model next to it."""
    code, _, err = run("bench", "--synthetic", "huge", *SHORT)
    assert (code, "one of w1, qwen3-30b-a3b" in err) == (2, True)
    code, _, err = run("bench", "--synthetic", "tiny", "--model", tiny_store, *SHORT)
    assert (code, "--synthetic tiny alone" in err) == (2, True)


def test_w1_has_its_size():
    """9.7 billion parameters, experts at 4 bits, other matrices at 8."""
    w1 = SYNTHETIC["w1"]
    shape = w1.shape
    experts = shape.layers * shape.experts * 3 * shape.hidden * shape.inner
    dense = sum(rows * (columns or [1])[0] for rows, *columns in shape.dense().values())
    assert 9.65e9 < experts + dense < 10.2e9
    assert (w1.max_level, w1.dense_bits) == (4, 8)
