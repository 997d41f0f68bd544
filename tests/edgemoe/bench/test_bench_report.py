"""Bytes, prompts and commit in a benchmark's report, in cases that are easily reported wrong."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from resealed_store import without_tokenizer
from short_probes import probe_briefly

from edgemoe.bench.environment import _commit
from edgemoe.bench.rows import single_row
from edgemoe.bench.run import BenchRequest, run_bench
from edgemoe.engine.engine import StoreModel
from edgemoe.policy.settings import RunSettings
from edgemoe.speed import tiers as tier_speed


@pytest.fixture(autouse=True)
def short_probes(monkeypatch):
    """Measures bandwidths for 20 ms."""
    probe_briefly(monkeypatch)


def bench(directory: Path, settings: RunSettings, **options):
    request = BenchRequest(single_row(settings), prompt_tokens=6, new_tokens=4, runs=1, **options)
    return run_bench(StoreModel.open(directory), request)


def test_copies_are_measured_side_by_side(monkeypatch):
    """PROBE_THREADS copies run at once: each waits for the others, and together they copy all bytes."""
    together = threading.Barrier(tier_speed.PROBE_THREADS)
    copied: list[int] = []

    def copy(target: np.ndarray, source: np.ndarray) -> None:
        together.wait(30)
        copied.append(source.nbytes)

    monkeypatch.setattr(tier_speed.np, "copyto", copy)
    assert tier_speed.copy_speed(None, 1 << 20, 0.1) > 0
    assert sum(copied) % (1 << 20) == 0
    assert len(copied) % tier_speed.PROBE_THREADS == 0


@pytest.mark.e2e
def test_reused_planes_are_read_from_vram(tiny_store):
    """An expert scheduled at 4 and computed at 8, because its planes are resident, counts as read from VRAM at 8."""
    report = bench(tiny_store, RunSettings(levels=(8, 4), retention=0.5, depth="equal"))
    store = StoreModel.open(tiny_store)
    warm = report["rows"][1]
    assert warm["experts_reused"] > 0
    used = {8: warm["levels_used"]["8"], 4: warm["levels_used"]["4"]}
    assert sum(used.values()) == 3 * 2 * 2
    read = sum(store.manifest.geometry.prefix_bytes(level) * experts for level, experts in used.items())
    assert warm["bytes_per_token"]["vram"] - store.dense_bytes_per_token == pytest.approx(read / 3)


@pytest.mark.e2e
def test_random_tokens_instead_of_text_are_noted(damageable):
    """For text and both, the report on a store without a tokenizer notes that there was no text."""
    without_tokenizer(damageable)
    for prompts, noted in (("text", 1), ("both", 1), ("random", 0)):
        environment = bench(damageable, RunSettings.uniform(4), prompts=prompts)["environment"]
        assert environment["prompts"] == ["random tokens"]
        assert len(environment["notes"]) == noted


@pytest.mark.e2e
def test_the_commit_is_the_programs_own(tmp_path):
    """The commit of the checkout itself; None where the program is installed below another repository."""

    def git(*words: str) -> str:
        identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *words], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    git("init")
    git("commit", "--allow-empty", "--no-gpg-sign", "-m", "first")
    installed = tmp_path / "site-packages"
    installed.mkdir()
    assert _commit(installed) is None
    assert _commit(tmp_path) == git("rev-parse", "HEAD")
    (installed / "new.py").touch()
    assert _commit(tmp_path) == git("rev-parse", "HEAD") + "+"
