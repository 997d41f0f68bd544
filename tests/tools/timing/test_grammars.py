"""The timing of grammars: every schema compiles and is followed."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("llguidance")

from tools.timing.grammars import SCHEMAS, main, tokenizer_of


def test_a_small_vocabulary_is_timed(capsys):
    """A row a schema, as JSON and as lines."""
    options = ["--words", "1000", "--tokens", "20"]
    assert main([*options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schemas"].keys() == SCHEMAS.keys()
    assert all(0 < row["mask_us"] <= row["slowest_mask_us"] for row in found["schemas"].values())
    assert main(options) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(SCHEMAS)


def test_the_vocabulary_has_the_wanted_words():
    """All of them in use, the last one special."""
    tokenizer = tokenizer_of(500)
    assert len(tokenizer) == 500
    assert tokenizer.eos_token_id == 499
