"""Fields of completions that chats do not have: suffix and best_of."""

from __future__ import annotations

from statistics import mean

import pytest
from scripted import chatml_tokenizer
from servers import a_model, server_of
from small_tokenizer import SPECIAL
from tokenizers.processors import TemplateProcessing

from edgemoe.api.infill import infill_prompt
from edgemoe.errors import UserError

COMPLETE = "/v1/completions"
MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]


@pytest.fixture
def marked():
    """A tokenizer with tokens for a text in the middle."""
    tokenizer = chatml_tokenizer()
    tokenizer.add_tokens(MARKS, special_tokens=True)
    return tokenizer


def test_a_suffix_stands_before_the_answer(tiny_store, marked):
    """The prompt is prefix, suffix and answer in the order of such models, as text or token ids."""
    want = marked(f"{MARKS[0]}a {{{MARKS[1]}}} b{MARKS[2]}", add_special_tokens=False)["input_ids"]
    ids = marked("a {", add_special_tokens=False)["input_ids"]
    assert infill_prompt(marked, "a {", "} b") == infill_prompt(marked, ids, "} b") == want
    model = a_model(tiny_store)
    model.tokenizer = marked
    with server_of(model) as server:
        fields = {"max_tokens": 3, "temperature": 0}
        done = server.client.post(COMPLETE, json={"prompt": "a {", "suffix": "} b"} | fields).json()
        plain = server.client.post(COMPLETE, json={"prompt": want} | fields).json()
    assert done["usage"]["prompt_tokens"] == len(want)
    assert done["choices"][0]["text"] == plain["choices"][0]["text"]


def test_a_prompt_begins_as_the_tokenizer_begins_one(marked):
    """Its token for the begin of a text stays first."""
    marked.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], 0)]
    )
    tokens = infill_prompt(marked, "a", "b")
    assert tokens[:2] == [0, marked.convert_tokens_to_ids(MARKS[0])]
    assert tokens.count(0) == 1


def test_a_model_without_such_tokens_is_named():
    """The error says which tokens are missing."""
    with pytest.raises(UserError, match="fim_prefix"):
        infill_prompt(chatml_tokenizer(), "a", "b")


@pytest.mark.e2e
@pytest.mark.parametrize("logprobs", [None, 1])
def test_the_likeliest_of_several_answers(server, logprobs):
    """The two with the highest mean of each prompt's five come back; all of them count as tokens."""
    fields = {"prompt": ["the fox", "the dog"], "max_tokens": 4, "temperature": 2.0, "seed": 5}
    every = server.client.post(COMPLETE, json=fields | {"n": 5, "logprobs": 1}).json()
    best = server.client.post(COMPLETE, json=fields | {"n": 2, "best_of": 5, "logprobs": logprobs}).json()
    want = []
    for first in (0, 5):
        five = every["choices"][first : first + 5]
        want += sorted(five, key=lambda choice: -mean(choice["logprobs"]["token_logprobs"]))[:2]
    assert [choice["text"] for choice in best["choices"]] == [choice["text"] for choice in want]
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert all((choice["logprobs"] is None) == (logprobs is None) for choice in best["choices"])
    assert best["usage"]["completion_tokens"] == every["usage"]["completion_tokens"]
    server.idle()
