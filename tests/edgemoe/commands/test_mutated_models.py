"""Commands on mutated stores, checkpoints and GGUF files: exit 0, 2, 3 or 4, and never a traceback."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest
from gguf_files import write_model
from mutated_models import CHECKPOINTS, STORES, Edit, edit
from small_tokenizer import a_tokenizer
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

SECONDS = 0.5
"""Of one test; on a busy machine it sees fewer cases, and at least LEAST."""

LEAST = 20

CODES = {0, 2, 3, 4}
ANSWER = ("--prompt", "a", "--max-new-tokens", 2)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore"),  # of transformers, about values
]


def each(
    good: Path,
    edits: Sequence[Edit],
    kind: str,
    limit: int,
    commands: Callable[[Path], list[tuple]],
    run,
    least: int = LEAST,
) -> Counter[tuple[str, int]]:
    """Runs commands on copies of a model, each mutated once; counts (command, exit code)."""
    found: Counter[tuple[str, int]] = Counter()
    copy, until = good.parent / f"mutated-{kind}" / good.name, time.monotonic() + SECONDS
    for case in range(limit):
        if case >= least and time.monotonic() > until:
            break
        random = Random(f"{kind}/{case}")
        shutil.rmtree(copy.parent, ignore_errors=True)
        shutil.copytree(good, copy)
        random.choice(edits)(copy, random)
        for command in commands(copy):
            code, _, err = run(*command)
            assert code in CODES, (kind, case, command, err)
            assert "Traceback" not in err, (kind, case, command)
            assert code == 0 or "edgemoe: expected " in err or command[0] == "verify", (kind, case, err)
            found[str(command[0]), code] += 1
    shutil.rmtree(copy.parent, ignore_errors=True)
    return found


def test_mutated_stores(run, tiny_store):
    """chat, plan, verify and inspect of a store with one file changed, resealed or not."""

    def commands(store: Path) -> list[tuple]:
        return [
            ("chat", "--model", store, *ANSWER),
            ("plan", "--model", store),
            ("verify", store),
            ("inspect", store),
        ]

    found = each(tiny_store, STORES, "store", 150, commands, run)
    assert {found["chat", code] > 0 for code in (0, 2, 4)} == {True}


def test_mutated_checkpoints(run, fused_checkpoint, tmp_path):
    """convert of a checkpoint with one file changed, and chat with what it made."""

    def commands(checkpoint: Path) -> list[tuple]:
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        return [
            ("convert", checkpoint, tmp_path / "store"),
            ("chat", "--model", tmp_path / "store", *ANSWER),
        ]

    found = each(fused_checkpoint, CHECKPOINTS, "checkpoint", 150, commands, run)
    assert {found["convert", code] > 0 for code in (0, 2, 4)} == {True}


def test_mutated_gguf_files(run, tiny_model, tmp_path):
    """convert of a GGUF file with changed fields or bytes."""
    good = tmp_path / "good"
    good.mkdir()
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**tiny_model.config.to_dict() | {"mlp_only_layers": []}))
    write_model(good / "model.gguf", model, a_tokenizer())
    head = (good / "model.gguf").read_bytes()

    def near_the_start(model: Path, random: Random) -> None:
        """Most of the file is weights, whose bytes may have any values."""
        at, length = random.randrange(4, 1200), random.randrange(1, 9)
        raw = bytearray(head)
        raw[at : at + length] = random.choice((random.randbytes(length), b"\xff" * length, bytes(length)))
        (model / "model.gguf").write_bytes(raw)

    def commands(model: Path) -> list[tuple]:
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        return [("convert", model / "model.gguf", tmp_path / "store")]

    found = each(good, (near_the_start, edit("model.gguf")), "gguf", 100, commands, run, least=40)
    assert {found["convert", code] > 0 for code in (0, 2, 4)} == {True}
