"""tools/timing/drafts.py: answers are the given ones, in both ways, and an edit has guesses."""

from __future__ import annotations

import json
import random

import pytest

from tools.timing import drafts

pytestmark = pytest.mark.e2e


@pytest.mark.folders
def test_report(demo_store, tmp_path, capsys):
    text = tmp_path / "a.txt"
    text.write_text(" ".join(random.Random(1).choices(("a", "quick", "fox", "jumps", "over", "dogs"), k=800)))
    how = ["--model", str(demo_store), "--prose", str(text)]
    assert drafts.main([*how, "--rounds", "1", "--new-tokens", "60", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["rows"]) == {"prose", "own", "edit", "json", "worst"}
    for of in report["samples"].values():
        assert of["off"][0]["tokens_per_step"] == 1
        assert of["off"][0]["drafted"] == 0
    assert report["rows"]["edit"]["accepted"] > 0
