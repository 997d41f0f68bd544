"""Answers of a JSON schema in the Python API: alone, streamed, together, and what their tables take."""

from __future__ import annotations

import json

import pytest
from scripted import chatml_model

from edgemoe.errors import UserError
from edgemoe.grammar.matcher import Vocabulary

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


@pytest.mark.e2e
def test_no_step_runs_while_the_tables_are_made(tiny_store, monkeypatch):
    """A step would count their memory as the model's."""
    turns = []
    with chatml_model(tiny_store) as model:

        def vocabulary(*given):
            turns.append(model._scheduler._turns.taken)
            return Vocabulary(*given)

        monkeypatch.setattr("edgemoe.api.model.Vocabulary", vocabulary)
        model.generate(PROMPT, schema=WORD, max_new_tokens=2)
        assert turns == [True]
        assert not model._scheduler._turns.taken
