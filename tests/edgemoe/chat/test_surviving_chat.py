"""A store damaged under a running chat, or a disk that fails: exit 4 with the file's name, never wrong text."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faults import OUTAGE
from pairwise import few
from programs import Program, programs

from edgemoe.engine.engine import StoreModel
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.store.manifest import MANIFEST_NAME, Manifest

pytestmark = pytest.mark.e2e

PROMPTS = ("the quick brown fox", "jumps over the lazy dog")


@pytest.fixture
def chat(tiny_store: Path) -> Iterator[Callable[[Path], Program]]:
    """Starts a chat over a pipe at its smallest limit, so that every turn reads experts."""
    settings = RunSettings(levels=(8,), exact=True)
    least = (
        StoreModel.open(tiny_store).plan(vram_limit=None, settings=settings, context=128).minimum_vram_bytes
    )

    with programs() as run:

        def start(store: Path, outage: Path | None = None) -> Program:
            limits = ("--vram-limit", least, "--context", 128, "--max-new-tokens", 6)
            program = ("-m", "edgemoe") if outage is None else ("-c", OUTAGE, outage)
            return run(
                *program, "chat", "--json", "--model", store, *limits, "--temperature", 0, "--exact", 8
            )

        yield start


def send(process: Program, prompt: str) -> None:
    """Types a turn."""
    assert process.stdin is not None
    process.stdin.write(prompt + "\n")
    process.stdin.flush()


def answer(process: Program, prompt: str) -> dict[str, object]:
    """Reads the answer to one turn; empty if the process ended."""
    send(process, prompt)
    assert process.stdout is not None
    line = process.stdout.readline()
    return json.loads(line) if line else {}


def ask(process: Program, prompt: str) -> object:
    """Reads the text of the answer to one turn; empty if the process ended."""
    return answer(process, prompt).get("text", "")


@pytest.fixture(scope="module")
def shards(tiny_store: Path) -> list[str]:
    return [layer.file for layer in Manifest.load(tiny_store).layers.values()]


def overwrite(path: Path) -> None:
    """Writes other bytes into the same file."""
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\x5a" * (path.stat().st_size - 4096))


DAMAGE = {
    "truncated": lambda path: os.truncate(path, 4096),
    "emptied": lambda path: os.truncate(path, 0),
    "overwritten in place": overwrite,
}


@pytest.mark.parametrize("damage", few(DAMAGE, ["truncated", "overwritten in place"]))
def test_a_store_damaged_under_a_running_chat(chat, damageable, shards, damage):
    """The turn after the damage exits 4 with the file's name and prints no text."""
    process = chat(damageable)
    assert ask(process, PROMPTS[0])
    for shard in shards:
        DAMAGE[damage](damageable / shard)
    assert ask(process, PROMPTS[1]) == ""
    _, err = process.communicate(timeout=60)
    assert process.returncode == 4
    errors = [line for line in err.splitlines() if line.startswith("edgemoe: ")]
    assert any(shard in errors[-1] for shard in shards)
    assert "expert" in errors[-1]
    assert "Traceback" not in err


def test_a_store_replaced_under_a_running_chat(chat, tiny_store, damageable, shards):
    """Replaced files do not affect a running chat, which keeps reading the files it opened."""
    undisturbed = chat(tiny_store)
    expected = [ask(undisturbed, prompt) for prompt in PROMPTS]
    process = chat(damageable)
    assert ask(process, PROMPTS[0]) == expected[0]
    for name in (*shards, "dense.safetensors", MANIFEST_NAME):
        path = damageable / name
        other = path.with_name("other")
        other.write_bytes(bytes(path.stat().st_size))
        other.replace(path)
    assert ask(process, PROMPTS[1]) == expected[1]


def test_a_disk_that_fails_for_a_second_and_then_for_good(chat, tiny_store, shards, tmp_path):
    """EIO for a second changes no answer, is counted in it, and gives one warning; EIO for 5 s exits 4."""
    until = tmp_path / "until"
    process, undisturbed = chat(tiny_store, until), chat(tiny_store)
    expected = [ask(undisturbed, prompt) for prompt in PROMPTS]
    first = answer(process, PROMPTS[0])
    assert (first["text"], first["read_retries"]) == (expected[0], 0)
    until.write_text(str(time.time() + 1))
    second = answer(process, PROMPTS[1])
    assert second["text"] == expected[1]
    assert isinstance(second["read_retries"], int)
    assert second["read_retries"] > 0
    until.write_text(str(time.time() + 1000))
    start = time.monotonic()
    assert ask(process, PROMPTS[0]) == ""
    assert 5 <= time.monotonic() - start < 9
    _, err = process.communicate(timeout=60)
    assert process.returncode == 4
    assert err.count("and then succeeded") == 1
    assert any(shard in err.splitlines()[-1] for shard in shards)
    assert " times in 5." in err.splitlines()[-1]


def test_ctrl_c_while_a_read_is_tried_again(chat, tiny_store, tmp_path):
    """Ctrl-C during the retries of an answer's reads exits 130 without waiting for their end."""
    process = chat(tiny_store, tmp_path / "until")
    assert ask(process, PROMPTS[0])
    (tmp_path / "until").write_text(str(time.time() + 100))
    send(process, PROMPTS[1])
    await_file(tmp_path / "until.met")
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert time.monotonic() - start < 4


def await_file(path: Path) -> None:
    """Waits until a file exists."""
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
