"""Less free memory than a limit: a smaller arena or a refusal before loading, never a killed process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgemoe.cache import arena
from edgemoe.engine.engine import StoreModel
from edgemoe.machine import process
from edgemoe.memory.overhead import PROCESS_BYTES
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.sizes import format_least

ASK = ("--prompt", "the fox", "--max-new-tokens", 3, "--temperature", 0, "--context", 64)


@pytest.fixture
def smallest(tiny_store) -> int:
    """Bytes of the smallest limit that works."""
    settings = RunSettings.uniform(8)
    return StoreModel.open(tiny_store).plan(vram_limit=None, settings=settings, context=64).minimum_vram_bytes


@pytest.fixture
def room(monkeypatch):
    """Gives this process a memory cgroup with so many free bytes."""

    def leave(size: int) -> None:
        monkeypatch.setattr(process, "resident_bytes", lambda: PROCESS_BYTES)
        monkeypatch.setattr(process, "_cgroup_free_bytes", lambda: [size])

    return leave


@pytest.mark.e2e
def test_a_cgroup_with_less_than_the_limit_shrinks_it(run, tiny_store, room, smallest, caplog):
    """The answer is the same, the limit is the cgroup's free memory, and one line reports it."""
    _, whole, _ = run("chat", "--model", tiny_store, "--json", "--vram-limit", "4MB", *ASK)
    assert not caplog.messages
    room(smallest + 20_000)
    code, out, _ = run("chat", "--model", tiny_store, "--json", "--vram-limit", "4MB", *ASK)
    assert code == 0
    assert json.loads(out)["text"] == json.loads(whole)["text"]
    assert json.loads(out)["vram_limit_bytes"] < 4_000_000
    (line,) = caplog.messages
    assert line.startswith("--vram-limit 4 MB is more than the free memory allows")


def test_a_cgroup_with_less_than_the_smallest_limit_is_refused_before_loading(
    run, tiny_store, room, smallest, monkeypatch
):
    """Exit 3, with the smallest limit that works; no arena was mapped."""
    monkeypatch.setattr(arena.Arena, "__init__", lambda self, *args, **kwargs: pytest.fail("mapped"))
    room(smallest - 50_000)
    code, out, err = run("chat", "--model", tiny_store, *ASK)
    assert (code, out) == (3, "")
    assert f"--vram-limit {format_least(smallest)} or more" in err.splitlines()[-1]


@pytest.mark.e2e
def test_memory_that_cannot_be_locked_is_used_unlocked(run, tiny_store, monkeypatch):
    """The answer is the same where the system refuses to lock arenas, without a message."""
    ask = ("chat", "--model", tiny_store, "--json", *ASK)
    locked = json.loads(run(*ask)[1])
    refused = []
    monkeypatch.setattr(arena, "lock_pages", lambda memory, *_: bool(refused.append(len(memory))))
    code, out, err = run(*ask)
    assert refused
    assert (code, err) == (0, "")
    assert json.loads(out)["text"] == locked["text"]


@pytest.mark.e2e
@pytest.mark.usefixtures("one_short_name")
def test_doctor_reports_how_much_memory_may_be_locked(run, tmp_path: Path, monkeypatch):
    """The report has the system's limit on locked memory."""
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda what: (8_388_608, 8_388_608))
    code, out, _ = run("doctor", tmp_path)
    assert code == 0
    assert "to be locked  8.39 MB" in out
