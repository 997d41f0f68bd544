"""A model that answers in channels, as gpt-oss does: reasoning, text and calls apart in every protocol."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from dialects import DIALECTS
from scripted import CITY, chatml_model, script
from servers import server_of

pytest.importorskip("llguidance")

SPECIAL = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"]
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{% if m.tool_calls is defined %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant "
    "to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}<|im_end|>{% endfor %}<|start|>assistant"
)
ANALYSIS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city":"Oslo"}'


@pytest.fixture(scope="module")
def served(tiny_store) -> Iterator[object]:
    model = chatml_model(tiny_store, TEMPLATE)
    model.tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    with server_of(model, limit=8) as one:
        yield one


@pytest.mark.e2e
@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_channels_become_parts(served, dialect, monkeypatch):
    """Text of `final`, reasoning of `analysis`, a call, the call that comes back, and a form that is enforced."""
    wanted = {"answer": f"{ANALYSIS}<|channel|>final<|message|>Paris."}
    prompts = script(monkeypatch, served.serving.model.tokenizer, lambda prompt: wanted["answer"])

    def post(said, **more):
        response = served.client.post(dialect.path, json=dialect.body(said, **more))
        assert response.status_code == 200, response.text
        served.idle()
        return response.json()

    question = dialect.question("Oslo?")
    said = dialect.whole(post(question))
    assert (said.thought, said.text, said.calls) == ("hm", "Paris.", [])
    wanted["answer"] = ANALYSIS + CALL
    called = post(question, tools=[("weather", CITY)])
    said = dialect.whole(called)
    assert (said.thought, said.text, said.calls) == ("hm", "", [("weather", {"city": "Oslo"})])
    assert '"name": "weather"' in prompts[-1]  # in the system message: the template leaves tools out
    post([*question, *dialect.answered(called, "sunny")], tools=[("weather", CITY)])
    assert "hm<|end|><|start|>assistant" in prompts[-1]
    if dialect.forces_calls:
        wanted["answer"] = f"{ANALYSIS} It is sunny."
        ((name, _),) = dialect.whole(post(question, tools=[("weather", CITY)], choice="required")).calls
        assert name == "weather"
    wanted["answer"] = f"{ANALYSIS} It is sunny."
    said = dialect.whole(post(question, schema=CITY | {"additionalProperties": False}))
    assert json.loads(said.text).keys() == {"city"}
    assert said.thought == "hm"


@pytest.mark.parametrize("dialect", [each for each in DIALECTS.values() if "stop" in each.ends], ids=type)
def test_a_special_token_stops_an_answer(served, dialect, monkeypatch):
    """Where a stop string has it, though it ends no answer of the model."""
    script(monkeypatch, served.serving.model.tokenizer, "<|channel|>final<|message|>one two<|call|> three")
    body = dialect.body(dialect.question("Oslo?"), stop="<|call|>")
    said = dialect.whole(served.client.post(dialect.path, json=body).json())
    assert said.text == "one two"
    assert said.end in (dialect.ends["stop"], ("stop_sequence", "<|call|>"))
