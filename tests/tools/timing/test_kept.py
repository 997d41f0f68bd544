"""The tool that times shared beginnings, on the demo model."""

from __future__ import annotations

import json

import pytest

from tools.timing import kept

pytestmark = pytest.mark.e2e


def test_a_shared_beginning_is_computed_once(capsys):
    """Without keeping no token is reused; with it the beginning is, and so are both conversations, each in its turn."""
    assert kept.main(["--questions", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["nothing_kept"]["cached_tokens"] == 0
    assert report["kept"]["cached_tokens"] >= 300
    assert report["kept"]["prompt_tokens"] == report["nothing_kept"]["prompt_tokens"]
    turns = report["turns"]
    assert turns[0][0] == 0
    assert all(cached >= 300 for cached, _ in turns[1:])
    for (_, before), (cached, now) in zip(turns[:-2], turns[2:], strict=True):
        assert before <= cached < now


def test_a_context_that_is_too_small_is_refused(capsys):
    """Exit code 2 and both counts."""
    assert kept.main(["--context", "64", "--shared", "300"]) == 2
    assert "expected a context of at least" in capsys.readouterr().err
