"""The same code of OpenAI's client against `edgemoe serve` and against vLLM on an export of the same store."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from servers import a_model, server_of

from edgemoe.commands.options import DEMO
from edgemoe.families.table import family_of
from edgemoe.models.resolve import convert_checkpoint
from storage.export.levels import one_level
from storage.export.run import export
from storage.manifest import Manifest
from storage.untrusted import read_json

openai = pytest.importorskip("openai")

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

QUESTIONS = ("What is the capital of France?", "What is 12 + 30?", "Sort these numbers: 5, 3, 9")
START = 900
"""Seconds that vLLM may take to load."""


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    """The demo model's store at level 8."""
    directory = tmp_path_factory.mktemp("demo") / "store"
    convert_checkpoint(DEMO, directory, max_level=8, layout="auto", dense_bits=16)
    return directory


def conversation(url: str) -> list[tuple[str, str | None, int, str]]:
    """What a client sees of a server: text, reason, tokens of the prompt, and the streamed text, by question."""
    out = []
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        (model,) = client.models.list().data
        for question in QUESTIONS:
            messages = [{"role": "user", "content": question}]
            fields = {"model": model.id, "messages": messages, "max_tokens": 16, "temperature": 0}
            whole = client.chat.completions.create(**fields)
            pieces = client.chat.completions.create(**fields, stream=True)
            streamed = "".join(each.choices[0].delta.content or "" for each in pieces if each.choices)
            (choice,) = whole.choices
            out.append((choice.message.content, choice.finish_reason, whole.usage.prompt_tokens, streamed))
    return out


@pytest.fixture
def vllm(store, tmp_path) -> Iterator[str]:
    """The address of vLLM with the store's export in bf16; skips where vLLM is not installed."""
    program = shutil.which("vllm")
    if program is None:
        pytest.skip("vLLM is not installed: no program vllm on PATH")
    manifest = Manifest.load(store)
    family = family_of(read_json(store, "config.json"))
    levels = one_level(manifest, 8)
    export(
        store, out := tmp_path / "out", family, format="safetensors", levels=levels, progress=lambda *_: None
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [program, "serve", str(out), "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    command += ["--dtype", "bfloat16", "--max-model-len", "256", "--max-num-seqs", "4"]
    # Only its own packages: this process finds edgemoe's through a path that vLLM would inherit.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=tmp_path)
        try:
            _wait(address, process, tmp_path / "log")
            yield address
        finally:
            process.terminate()
            process.wait(60)


def _wait(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text(errors="replace")[-2000:]
        try:
            if httpx.get(f"{address}/health", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    pytest.fail(log.read_text(errors="replace")[-2000:])


def test_the_client_cannot_tell_the_servers_apart(store, vllm):
    """Texts, reasons, prompts' tokens and streams are the same: weights, template and interface move along."""
    with server_of(a_model(store, context=256)) as ours:
        mine = conversation(ours.url)
    assert all(text == streamed and text for text, _, _, streamed in mine)
    assert mine == conversation(vllm)
