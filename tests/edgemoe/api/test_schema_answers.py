"""Answers of a JSON schema in the Python API: alone, streamed, together, and what their tables take."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
from scripted import chatml_model

from edgemoe.engine.peak import PeakMemory
from edgemoe.errors import UserError
from edgemoe.machine.process import peak_resident_bytes

pytest.importorskip("llguidance")

WORD = {"type": "string", "pattern": "^[a-z]{3,5}$"}
PROMPT = "the quick"


@pytest.fixture(scope="module")
def model(tiny_store):
    with chatml_model(tiny_store) as one:
        yield one


@pytest.mark.e2e
def test_each_way_to_an_answer_has_the_schema(model):
    """generate, stream and submit give one text, which parses; hot answers have the schema too, with any seed."""
    want = model.generate(PROMPT, schema=WORD, max_new_tokens=20)
    assert json.loads(want.text).isalpha()
    assert want.finish_reason == "stop"
    assert "".join(model.stream(PROMPT, schema=WORD, max_new_tokens=20)) == want.text
    grammar = model.grammar(WORD)
    futures = [
        model.submit(PROMPT, schema=grammar, temperature=2.0, seed=i, max_new_tokens=20) for i in range(8)
    ]
    assert all(3 <= len(json.loads(future.result().text)) <= 5 for future in futures)


@pytest.mark.e2e
def test_log_probabilities_are_the_models_own(model):
    """The mask is no part of them: the token is chosen against the model's likeliest one."""
    free = model.generate(PROMPT, logprobs=1, max_new_tokens=1).logprobs[0]
    bound = model.generate(PROMPT, schema=WORD, logprobs=1, max_new_tokens=1).logprobs[0]
    assert bound.top == free.top
    assert bound.logprob < free.logprob


@pytest.mark.e2e
def test_settings_let_no_other_token_through(model):
    """A bias of the largest size, penalties, and few candidates."""
    outside = model.tokenizer("z")["input_ids"][0]
    hard = {"logit_bias": {outside: 10_000.0}, "presence_penalty": 2.0, "top_k": 1, "min_p": 0.9}
    answer = model.generate(PROMPT, schema={"enum": ["aaaa", "abab"]}, temperature=1.0, **hard)
    assert json.loads(answer.text) in ("aaaa", "abab")


@pytest.mark.e2e
def test_a_wrong_schema_leaves_nothing_behind(model):
    """The error comes before a request does."""
    with pytest.raises(UserError, match="uniqueItems"):
        model.submit(PROMPT, schema={"type": "array", "uniqueItems": True})
    assert model.status().waiting == model.status().running == 0


def test_tables_of_the_vocabulary_are_no_part_of_the_model(model, monkeypatch):
    """peak_bytes leaves out by how much they have raised the process's peak."""
    peak, engine = peak_resident_bytes(), model.engine
    before, counted = engine.peak.resident_before, iter([peak, peak + 1_000_000])
    monkeypatch.setattr("edgemoe.engine.peak.peak_resident_bytes", lambda: next(counted))
    with engine.peak.excluded():
        pass
    assert engine.peak.resident_before == before + 1_000_000
    engine.peak.resident_before = before


@pytest.mark.e2e
def test_no_step_runs_while_the_tables_are_made(tiny_store, monkeypatch):
    """The memory that a step takes meanwhile would be left out of the peak."""
    turns = []
    with chatml_model(tiny_store) as model:
        monkeypatch.setattr(
            PeakMemory, "excluded", lambda _: nullcontext(turns.append(model._scheduler._turns.taken))
        )
        model.generate(PROMPT, schema=WORD, max_new_tokens=2)
        assert turns == [True]
        assert not model._scheduler._turns.taken
