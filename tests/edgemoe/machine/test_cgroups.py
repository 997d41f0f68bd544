"""Cores that a container's limit of CPU time leaves, by both versions of cgroups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from availability import needs_native

from edgemoe.kernels.native import library
from edgemoe.machine import cgroups
from edgemoe.machine.cgroups import cores


@pytest.fixture
def limited(monkeypatch):
    """A process that may run on eight cores, in a cgroup whose directories have these files."""

    def limit(entry: str, files: dict[str, str]) -> None:
        there = {"/proc/self/cgroup": entry} | {f"/sys/fs/cgroup/{k}": v for k, v in files.items()}

        def read_text(path: Path) -> str:
            if str(path) not in there:
                raise FileNotFoundError(path)
            return there[str(path)]

        monkeypatch.setattr(Path, "read_text", read_text)
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)

    return limit


def v1(quota: int, place: str = "") -> dict[str, str]:
    return {f"cpu{place}/cpu.cfs_quota_us": f"{quota}\n", f"cpu{place}/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("entry", "files", "count"),
    [
        ("0::/box\n", {"box/cpu.max": "100000 100000\n"}, 1),
        ("0::/box\n", {"box/cpu.max": "250000 100000\n"}, 2),
        ("0::/box\n", {"box/cpu.max": "20000 100000\n"}, 1),
        ("0::/box\n", {"box/cpu.max": "max 100000\n"}, 8),
        ("0::/box\n", {"box/cpu.max": "1600000 100000\n"}, 8),
        ("0::/box/inner\n", {"box/inner/cpu.max": "max 100000\n", "box/cpu.max": "200000 100000\n"}, 2),
        ("0::/host/path\n", {"cpu.max": "400000 100000\n"}, 4),
        ("1:cpu,cpuacct:/box\n0::/\n", v1(190_000, "/box"), 1),
        ("1:cpu:/box\n", v1(-1, "/box"), 8),
        ("1:cpu:/docker/4d3c\n", v1(300_000), 3),
        ("1:memory:/box\n", {}, 8),
        ("0::/box\n", {"box/cpu.max": "what\n"}, 8),
    ],
)
def test_the_smallest_share_counts(limited, entry, files, count):
    """A quota of CPU time, of the cgroup or one above it; a part of a core counts for nothing."""
    limited(entry, files)
    assert cores() == count


@needs_native
@pytest.mark.parametrize(("count", "environment", "threads"), [(None, None, 1), (3, None, 3), (None, "3", 3)])
def test_products_have_no_more_threads_than_the_share(monkeypatch, count, environment, threads):
    """By default; --threads and OMP_NUM_THREADS, which torch has obeyed, stay."""
    before = torch.get_num_threads()
    monkeypatch.setattr(library, "cores", lambda: 1)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if environment:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    try:
        torch.set_num_threads(3)
        library.choose_threads(count)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_without_cgroups_every_core_counts(monkeypatch):
    monkeypatch.setattr(cgroups, "cgroups", lambda controller: iter(()))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2}, raising=False)
    assert cores() == 3
