"""The conformance suite canitoolcall against the server: calls of tools, whole and streamed, as a client reads them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from scripted import chatml_model, script
from servers import server_of

from tools.frontends.conformance import ANSWERS, answer, probe

pytest.importorskip("canitoolcall")
pytest.importorskip("llguidance")


def run(url: str) -> tuple[int, dict]:
    """Runs the suite; returns its exit status and its report."""
    path = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*probe(url), "--json", "-"], env=path, capture_output=True, text=True, timeout=120)
    return done.returncode, json.loads(done.stdout)


@pytest.mark.e2e
def test_every_check_passes_and_a_wrong_answer_does_not(tiny_store, monkeypatch):
    """Each scenario whole, streamed, and both alike; without the calls that it waits for, the suite says so."""
    with server_of(chatml_model(tiny_store, context=4096), limit=16) as server:
        tokenizer = server.serving.model.tokenizer
        script(monkeypatch, tokenizer, answer)
        status, report = run(server.url)
        checks = 3 * len(ANSWERS)
        assert (status, report["summary"]) == (0, {"pass": checks, "fail": 0, "error": 0, "skip": 0})
        script(monkeypatch, tokenizer, "I do not know.")
        status, report = run(server.url)
        assert status != 0
        assert report["summary"]["fail"] > 0
        server.idle()
