"""Budgets of reasoning in every protocol: the tag is closed, shown as reasoning's end, and tokens are counted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from dialects import DIALECTS
from scripted import CITY, chatml_model, script
from servers import server_of

pytest.importorskip("llguidance")

ASKS = {
    "openai_chat": [
        {"thinking_budget": 3},
        {"reasoning_effort": "low"},
        {"thinking": {"type": "enabled", "budget_tokens": 3}},
        {"reasoning": {"max_tokens": 3}},
        {"reasoning": {"effort": "low"}},
    ],
    "openai_responses": [{"reasoning": {"effort": "low"}}],
    "anthropic": [
        {"thinking": {"type": "enabled", "budget_tokens": 3}},
        {"output_config": {"effort": "low"}},
    ],
    "ollama": [{"think": "low"}],
}
"""Protocol -> fields that ask for 3 tokens of reasoning in an answer of at most 15."""

LIMIT = 15


@pytest.fixture(scope="module")
def served(tiny_store) -> Iterator[object]:
    with server_of(chatml_model(tiny_store), limit=8) as one:
        yield one


def wants(served, monkeypatch, budget: int, answer: str = "yes", inside: bool = False) -> list[str]:
    """Has the model reason without an end, and answer once its reasoning is closed after `budget` tokens."""
    tokenizer = served.serving.model.tokenizer

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    closed = [0] * len(ids("\n</think>\n\n"))  # no token of these is chosen
    tokens = [*ids("" if inside else "<think>"), *ids("the ") * 40]
    tokens = [*tokens[: budget + (not inside)], *closed, *ids(answer)]
    return script(monkeypatch, tokenizer, lambda prompt: tokens)


def counted(usage: dict) -> int | None:
    """The tokens of reasoning in a protocol's usage; None: the protocol has no such count."""
    details = usage.get("completion_tokens_details") or usage.get("output_tokens_details")
    return details["reasoning_tokens"] if details else None


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("name", "fields"), [(name, each) for name, every in ASKS.items() for each in every], ids=str
)
def test_a_budget_under_each_of_its_names(served, monkeypatch, name, fields, stream):
    """Three tokens of reasoning, and the answer after them has nothing of the tag."""
    dialect = DIALECTS[name]
    wants(served, monkeypatch, 3)
    body = dialect.body(dialect.question("Oslo?"), stream, limit=LIMIT) | fields
    response = served.client.post(dialect.path, json=body)
    assert response.status_code == 200, response.text
    said = dialect.streamed(response.text) if stream else dialect.whole(response.json())
    assert (said.thought, said.text, said.end) == ("the the", "yes", dialect.ends["own"])
    if not stream and "usage" in response.json():
        assert counted(response.json()["usage"]) == (None if name == "anthropic" else 3)
    served.idle()


def chat(served, **fields: object) -> dict:
    body = {"messages": [{"role": "user", "content": "Oslo?"}], **fields}
    response = served.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    served.idle()
    return response.json()


def test_log_probabilities_stop_strings_and_several_answers(served, monkeypatch):
    """Each token has its own, the closing ones too; a text after them stops; each of two answers has the budget."""
    wants(served, monkeypatch, 3, "yes no")
    found = chat(served, thinking_budget=3, logprobs=True, top_logprobs=1, stop=" no", n=2)
    for choice in found["choices"]:
        assert choice["message"]["content"] == "yes"
        entries = choice["logprobs"]["content"]
        assert "</think>" in [entry["token"] for entry in entries]
        assert all(entry["logprob"] < 0 for entry in entries)
    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] == 6
    assert found["edgemoe"]["answers"][0]["reasoning_tokens"] == 3


def test_no_budget_no_limit_and_the_servers_own(served, monkeypatch):
    """0 is no reasoning, also where the prompt has opened it; -1 none that ends; otherwise the server's."""
    prompts = wants(served, monkeypatch, 0, inside=True)
    found = chat(served, thinking_budget=0, chat_template_kwargs={"thinking_begun": True})
    assert prompts[-1].endswith("<think>\n\n</think>\n\n")  # the template closes it by itself
    more = {"thinking_begun": True, "enable_thinking": True}
    found = chat(served, thinking_budget=0, chat_template_kwargs=more)
    assert found["usage"]["completion_tokens"] == len(
        served.serving.model.tokenizer("\n</think>\n\nyes<|im_end|>")["input_ids"]
    )
    assert found["choices"][0]["message"]["content"] == "yes"
    assert "reasoning_content" not in found["choices"][0]["message"]
    with served.limited(thinking_budget=2):
        for fields, budget in (({}, 2), ({"thinking_budget": -1}, 9), ({"reasoning_effort": "max"}, 9)):
            wants(served, monkeypatch, budget)
            found = chat(served, max_tokens=10, **fields)
            assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] == budget


ON = {
    "openai_chat": [
        {"enable_thinking": True},
        {"thinking": {"type": "enabled"}},
        {"reasoning": {"enabled": True}},
        {"chat_template_kwargs": {"enable_thinking": True}},
    ],
    "anthropic": [{"thinking": {"type": "adaptive"}}],
    "ollama": [{"think": True}],
}
"""Protocol -> fields that turn reasoning on, and say nothing of its length."""


@pytest.mark.parametrize(
    ("name", "fields"), [(name, each) for name, every in ON.items() for each in every], ids=str
)
def test_a_request_turns_reasoning_on_where_the_servers_budget_is_0(served, monkeypatch, name, fields):
    """It goes before the server's budget, as a budget of the request does."""
    dialect = DIALECTS[name]
    prompts = wants(served, monkeypatch, 40)
    body = dialect.body(dialect.question("Oslo?"), False, limit=LIMIT) | fields
    with served.limited(thinking_budget=0):
        response = served.client.post(dialect.path, json=body)
        served.idle()
    assert response.status_code == 200, response.text
    assert dialect.whole(response.json()).thought.startswith("the the the")
    assert not prompts[-1].endswith("</think>\n\n")


@pytest.mark.e2e
def test_a_form_follows_a_spent_budget(served, monkeypatch):
    """JSON of the schema, and a call that is required."""
    wants(served, monkeypatch, 3, '{"city": "Oslo"}')
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": CITY | {"additionalProperties": False}},
    }
    message = chat(served, thinking_budget=3, response_format=schema)["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ('{"city": "Oslo"}', "the the")
    tools = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    wants(served, monkeypatch, 3, call)
    message = chat(served, thinking_budget=3, tools=tools, tool_choice="required")["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'
