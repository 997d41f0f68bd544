"""Ollama's own client against the server: chats and texts, whole and streamed, tools, forms, models, and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from functools import partial

import pytest
from imported_later import imported_later
from scripted import ANSWER, CITY, chatml_model, script
from servers import a_model, server_of

ollama = imported_later("ollama")
pytest.importorskip("llguidance")

TOOLS = [
    {"type": "function", "function": {"name": name, "description": "x", "parameters": CITY}}
    for name in ("weather", "tides")
]
QUESTION = [{"role": "user", "content": "Oslo?"}]


@pytest.fixture(scope="module")
def served(tiny_store) -> Iterator[object]:
    with server_of(chatml_model(tiny_store), limit=8) as one:
        yield one


@pytest.fixture
def client(served) -> Iterator[object]:
    with ollama.Client(host=served.url) as one:
        yield one
    served.idle()


@pytest.fixture
def wants(served, monkeypatch):
    """Has the model want an answer, or one for each prompt."""
    return partial(script, monkeypatch, served.serving.model.tokenizer)


def test_a_chat_whole_and_streamed(client, wants):
    """Thinking, text and call, the same in both; the prompt has the tools; counts and times at the end."""
    prompts = wants(ANSWER)
    whole = client.chat("any", QUESTION, tools=TOOLS, keep_alive="5m")
    assert (whole.message.thinking, whole.message.content) == ("hm", "Let me see.")
    (call,) = whole.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Oslo"})
    assert (whole.model, whole.done, whole.done_reason) == ("any", True, "stop")
    assert '"name": "tides"' in prompts[0]
    lines = list(client.chat("any", QUESTION, tools=TOOLS, stream=True))
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert "".join(line.message.thinking or "" for line in lines) == "hm"
    assert "".join(line.message.content for line in lines) == "Let me see."
    assert [called.function for line in lines for called in line.message.tool_calls or []] == [call.function]
    assert prompts[0] == prompts[1]
    for end in (whole, lines[-1]):
        assert end.prompt_eval_count > 100
        assert end.eval_count == whole.eval_count > 20
        assert 0 < end.eval_duration <= end.total_duration
        assert 0 < end.prompt_eval_duration <= end.total_duration
        datetime.fromisoformat(end.created_at)


def test_a_stream_is_lines_of_json(served, wants):
    """The default, as ollama has it; each line has the fields of every answer."""
    wants("one two")
    raw = served.client.post("/api/chat", json={"model": "x", "messages": QUESTION})
    assert raw.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in raw.text.splitlines()]
    assert len(lines) > 2
    assert all(line.keys() >= {"model", "created_at", "message", "done"} for line in lines)
    assert "".join(line["message"]["content"] for line in lines) == "one two"


@pytest.mark.e2e
@pytest.mark.parametrize("change", ["thinking", "content", "arguments"])
def test_a_changed_answer_is_rendered_by_the_template(client, wants, change):
    """Without an id an answer is known by all that it says: one without its reasoning does not get it back."""
    prompts = wants(ANSWER)
    said = json.loads(client.chat("x", QUESTION, tools=TOOLS).message.model_dump_json(exclude_none=True))
    if change == "arguments":
        said["tool_calls"][0]["function"]["arguments"] = {"city": "Rome"}
    else:
        said[change] = ""
    client.chat("x", [*QUESTION, said, {"role": "tool", "content": "sunny"}], tools=TOOLS)
    city = "Rome" if change == "arguments" else "Oslo"
    assert f'{{"name": "weather", "arguments": {{"city": "{city}"}}}}' in prompts[-1]
    assert ("hm" in prompts[-1]) == (change != "thinking")


def test_a_text_whole_and_streamed(client, wants):
    """A prompt goes through the chat template, with a system prompt; raw does not."""
    prompts = wants("one two three")
    fields = {"options": {"num_predict": 100, "temperature": 0, "top_k": 0, "seed": 3, "num_gpu": 1}}
    whole = client.generate("any", "Oslo?", system="Be kind.", think=False, **fields)
    assert (whole.response, whole.done_reason) == ("one two three", "stop")
    assert prompts[0].startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nOslo?<|im_end|>")
    assert prompts[0].endswith("<think>\n\n</think>\n\n")
    lines = list(client.generate("any", "Oslo?", raw=True, stream=True, **fields))
    assert "".join(line.response for line in lines) == "one two three"
    assert prompts[1] == "Oslo?"
    cut = client.generate("any", "Oslo?", options={"num_predict": 3, "stop": ["zzz"]})
    assert (cut.eval_count, cut.done_reason) == (3, "length")
    stopped = client.generate("any", "Oslo?", options={"stop": [" three"], "num_predict": -1})
    assert (stopped.response, stopped.done_reason) == ("one two", "stop")


def test_log_probabilities(client, wants):
    """Every token has one, whole and streamed, and the likeliest tokens too."""
    wants("one two")
    whole = client.chat("any", QUESTION, logprobs=True, top_logprobs=2)
    assert len(whole.logprobs) == whole.eval_count
    assert all(len(each.top_logprobs) == 2 and each.logprob <= 0 for each in whole.logprobs)
    lines = client.chat("any", QUESTION, logprobs=True, stream=True)
    assert [each.token for line in lines for each in line.logprobs or []] == [e.token for e in whole.logprobs]
    assert len(client.generate("any", "a", raw=True, logprobs=True).logprobs) == whole.eval_count


@pytest.mark.e2e
def test_texts_think_and_have_forms_too(client, wants):
    """Reasoning of /api/generate has a field of its own; json is an object, whatever the model wants."""
    wants("<think>\nhm\n</think>\n\nyes")
    done = client.generate("any", "Oslo?", think=True)
    assert (done.thinking, done.response) == ("hm", "yes")
    assert isinstance(json.loads(client.generate("any", "Oslo?", format="json").response), dict)


def test_an_error_within_a_stream_is_raised(served, client, wants):
    """The client reads the last line as one."""
    wants("one two three " * 30)
    with served.limited(answer_seconds=0.05), pytest.raises(ollama.ResponseError, match="time limit"):
        list(client.chat("x", QUESTION, stream=True))


def test_the_one_model(served, client, tiny_store):
    """Its entry in the list, its description, the version, and what loading it answers."""
    (entry,) = client.list().models
    size = sum(path.stat().st_size for path in tiny_store.iterdir())
    assert (entry.model, entry.size) == ("tiny", size)
    assert (entry.details.format, entry.details.family) == ("edgemoe", "qwen3_moe")
    assert entry.details.quantization_level == "8 bits"
    shown = client.show("tiny:latest")
    assert shown.details == entry.details
    assert set(shown.capabilities) == {"completion", "tools", "thinking"}
    assert shown.modelinfo["qwen3_moe.context_length"] == served.serving.model.engine.plan.context
    assert "<tool_call>" in shown.template
    with pytest.raises(ollama.ResponseError, match="not found") as missing:
        client.show("other")
    assert missing.value.status_code == 404
    (loaded,) = served.client.get("/api/ps").json()["models"]
    plan = served.serving.model.engine.plan
    assert (loaded["size_vram"], loaded["context_length"]) == (plan.vram_limit_bytes, plan.context)
    assert served.client.get("/api/version").json()["version"].count(".") == 2
    assert client.generate("tiny", keep_alive="5m").done_reason == "load"
    assert client.chat("tiny", keep_alive=-1).done_reason == "load"


def test_capabilities_are_those_of_the_template(tiny_store):
    """The tiny model's own template has neither tools nor tags of reasoning."""
    with server_of(a_model(tiny_store)) as one, ollama.Client(host=one.url) as client:
        assert client.show("tiny").capabilities == ["completion"]
