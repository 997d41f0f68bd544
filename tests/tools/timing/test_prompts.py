"""The tool that times prompts in one step and in several."""

from __future__ import annotations

import json

import pytest

from tools.timing import prompts

pytestmark = pytest.mark.e2e


@pytest.mark.folders
def test_one_step_reads_each_expert_once_and_several_read_more(tiny_store, capsys, monkeypatch):
    """A limit of a few experts: one step reads at most all of them, steps of 8 rows read more; both stay below it."""
    monkeypatch.setattr(
        prompts, "text_prompts", lambda *_: type("Set", (), {"prompts": [lambda: [5, 9] * 30]})()
    )
    how = ["--model", str(tiny_store), "--prompt-tokens", "60", "--prefill-rows", "8", "--exact", "4"]
    assert prompts.main([*how, "--vram-limit", "1KB"]) == 3
    least = capsys.readouterr().err.partition("use --vram-limit ")[2].split()[0]
    assert prompts.main([*how, "--vram-limit", least]) == 0
    whole, cut = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (whole["prefill_rows"], cut["prefill_rows"]) == (512, 8)
    assert 0 < whole["of_experts"] <= 1
    assert cut["ssd_bytes"] > whole["ssd_bytes"]
    assert 0 <= whole["attention_s"] < whole["ttft_s"]
    assert prompts.main([*how, "--fill"]) == 0
    filled, _ = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert filled["ssd_bytes"] == 0
