"""The tool that times a restart, on the demo model."""

from __future__ import annotations

import json

import pytest
from programs import run_forked

from tools.kv import prefix_cache

pytestmark = pytest.mark.e2e


@pytest.mark.folders
def test_a_restarted_process_reads_what_the_first_one_computed(tmp_path, capsys, monkeypatch):
    """Both answers are equal; whole blocks come from disk, and the computing process has none."""
    monkeypatch.setattr(prefix_cache.subprocess, "run", lambda command, **options: run_forked(*command[1:]))
    text = tmp_path / "text"
    text.write_text("The capital of France is Paris. " * 300)
    options = ["--text", str(text), "--tokens", "600", "--context", "1024", "--json"]
    assert prefix_cache.main(options) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["cold"]["cached_tokens"], found["restarted"]["cached_tokens"]) == (0, 512)
    assert found["disk_bytes"] > 0
    assert prefix_cache.main(["--text", str(text), "--tokens", "9999999"]) == 2
