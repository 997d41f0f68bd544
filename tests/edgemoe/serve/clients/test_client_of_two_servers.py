"""One program with OpenAI's client against `edgemoe serve` and against vLLM on an export of the store."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from imported_later import imported_later
from programs import ForkedPython

from edgemoe.families.table import family_of
from edgemoe.storage.export.levels import one_level
from edgemoe.storage.export.run import export
from edgemoe.storage.files.untrusted import read_json
from edgemoe.storage.store.manifest import Manifest

openai = imported_later("openai")

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

ROOT = Path(__file__).resolve().parents[4]

QUESTIONS = ("What is the capital of France?", "What is 12 + 30?", "Sort these numbers: 5, 3, 9")
START = 900
"""Seconds that vLLM may take to load."""


def conversation(url: str) -> list[tuple[str, str | None, int, str]]:
    """A client's view of a server: text, reason, tokens of the prompt, and the streamed text, by question."""
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


@contextmanager
def served(
    command: Sequence[object],
    log: Path,
    start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
) -> Iterator[str]:
    """Runs a server's process on a free port, whose number follows the command; yields its address once it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    # Every server has its own packages: this process finds edgemoe's through a path that vLLM would inherit.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("wb") as out:
        arguments = [*map(str, command), "--port", str(port)]
        process = start(arguments, stdout=out, stderr=out, env=environment, cwd=ROOT)
        try:
            _wait(address, process, log)
            yield address
        finally:
            process.terminate()
            process.wait(60)


def _wait(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text(errors="replace")[-2000:]
        with suppress(httpx.TransportError):
            if httpx.get(f"{address}/health", trust_env=False).status_code == 200:
                return
        time.sleep(0.1)
    pytest.fail(log.read_text(errors="replace")[-2000:])


@pytest.fixture(scope="module")
def ours(demo_store, tmp_path_factory) -> Iterator[list[tuple[str, str | None, int, str]]]:
    """The client's view of `edgemoe serve`."""
    log = tmp_path_factory.mktemp("edgemoe") / "log"
    command = ("-m", "edgemoe", "serve", "--model", demo_store, "--exact", "8", "--context", "256")
    with served(command, log, lambda given, **options: ForkedPython(*given, **options)) as address:
        yield conversation(address)


def test_the_server_answers_the_client(ours):
    """Each answer ends by itself, is right where the demo model knows it, and is the same when it is streamed."""
    assert [text for text, _, _, _ in ours[:2]] == ["The capital of France is Paris.", "12 + 30 = 42"]
    assert {reason for _, reason, _, _ in ours} == {"stop"}
    assert all(text == streamed and tokens for text, _, tokens, streamed in ours)


def test_the_client_cannot_tell_the_servers_apart(demo_store, ours, tmp_path):
    """Texts, reasons, prompts' tokens and streams are the same: weights, template and interface move along."""
    program = shutil.which("vllm")
    if program is None:
        pytest.skip("vLLM is not installed: no program vllm on PATH")
    family = family_of(read_json(demo_store, "config.json"))
    levels = one_level(Manifest.load(demo_store), 8)
    export(
        demo_store,
        out := tmp_path / "out",
        family,
        format="safetensors",
        levels=levels,
        progress=lambda *_: None,
    )
    # Not `vllm serve`: in builds for CPUs, whose package has another name, the program cannot find its version.
    command = [Path(program).with_name("python"), "-m", "vllm.entrypoints.openai.api_server", "--model", out]
    command += ["--host", "127.0.0.1", "--enforce-eager", "--dtype", "bfloat16"]
    with served([*command, "--max-model-len", "256", "--max-num-seqs", "4"], tmp_path / "log") as address:
        assert conversation(address) == ours
