"""tools/timing/heat.py: a start with heat finds in memory what an earlier run used."""

from __future__ import annotations

import json
import random

import pytest

from tools.timing import heat

pytestmark = pytest.mark.e2e


@pytest.mark.folders
def test_report(damageable, tmp_path, capsys):
    text = tmp_path / "a.txt"
    text.write_text(" ".join(random.Random(1).choices(("a", "quick", "fox", "jumps", "over", "dogs"), k=400)))
    sizes = ["--prompt-tokens", "8", "--new-tokens", "4", "--rounds", "2", "--vram-limit", "30MB"]
    assert heat.main(["--model", str(damageable), "--text", str(text), *sizes, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"without", "with"}
    for of in report.values():
        assert len(of["samples"]) == 2
        assert of["ttft_s"] > 0
        assert of["tpot_s"] > 0


def test_a_short_text_is_refused(damageable, tmp_path, capsys):
    text = tmp_path / "a.txt"
    text.write_text("a quick fox jumps over dogs " * 3)
    of_store = ["--model", str(damageable), "--text", str(text), "--vram-limit", "30MB"]
    assert heat.main([*of_store, "--prompt-tokens", "8"]) == 2
    assert "prompts in" in capsys.readouterr().err
