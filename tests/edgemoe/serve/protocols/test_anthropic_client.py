"""Anthropic's own client against the server: messages whole and streamed, tools, counts, and its errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial

import pytest
from imported_later import imported_later
from scripted import ANSWER, CITY, chatml_model, script
from servers import server_of

from edgemoe.serve.guard import Access

anthropic = imported_later("anthropic")
pytest.importorskip("llguidance")

pytestmark = pytest.mark.e2e  # the contract of all protocols is tested in the fast lane, without its package

KEY = "sk-local"
TOOLS = [{"name": name, "description": "x", "input_schema": CITY} for name in ("weather", "tides")]
QUESTION = [{"role": "user", "content": "Oslo?"}]
MESSAGES = "/v1/messages"


@pytest.fixture(scope="module")
def keyed(tiny_store) -> Iterator[object]:
    with server_of(chatml_model(tiny_store), Access(key=KEY), limit=8) as one:
        one.client.headers["x-api-key"] = KEY
        yield one


@pytest.fixture
def messages(keyed) -> Iterator[object]:
    with anthropic.Anthropic(base_url=keyed.url, api_key=KEY, max_retries=0) as client:
        yield client.messages
    keyed.idle()


@pytest.fixture
def wants(keyed, monkeypatch):
    """Has the model want an answer, or one for each prompt."""
    return partial(script, monkeypatch, keyed.serving.model.tokenizer)


BODY = {"model": "any", "max_tokens": 200, "messages": QUESTION}


def blocks_of(message) -> list[dict]:
    return [block.model_dump(exclude_none=True) for block in message.content]


def without_ids(blocks: list[dict]) -> list[dict]:
    return [{name: value for name, value in block.items() if name != "id"} for block in blocks]


PARTS = [
    {"type": "thinking", "thinking": "hm", "signature": ""},
    {"type": "text", "text": "Let me see."},
    {"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}},
]


@pytest.mark.e2e
def test_a_message_whole_and_streamed(messages, wants):
    """Reasoning, text and call as blocks, the same in both; the prompt has system and tools, as chats have them."""
    prompts = wants(ANSWER)
    fields = BODY | {"tools": TOOLS, "system": [{"type": "text", "text": "Be kind."}]}
    whole = messages.create(**fields)
    assert without_ids(blocks_of(whole)) == PARTS
    assert (whole.role, whole.model, whole.stop_reason, whole.stop_sequence) == (
        "assistant",
        "any",
        "tool_use",
        None,
    )
    assert "<|im_start|>system\nBe kind.<|im_end|>" in prompts[0]
    function = {"name": "tides", "description": "x", "parameters": CITY}
    assert json.dumps({"type": "function", "function": function}) in prompts[0]
    with messages.stream(**fields) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_message()
    assert without_ids(blocks_of(final)) == PARTS
    assert final.stop_reason == "tool_use"
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert (events[0], events[-1]) == ("message_start", "message_stop")
    assert prompts[0] == prompts[1]


def test_events_come_in_order(keyed, wants):
    """Each block begins, grows and ends before the next; then the end of the message, with names as in its data."""
    wants(ANSWER)
    fields = BODY | {"tools": TOOLS, "stream": True}
    raw = keyed.client.post(MESSAGES, json=fields)
    assert raw.headers["content-type"].startswith("text/event-stream")
    pairs = [part.split("\n") for part in raw.text.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {event['type']}" for event in events]
    order = []
    for event in events:
        step = (event["type"].removeprefix("content_block_"), event.get("index"))
        order += [step] if order[-1:] != [step] else []
    blocks = [(step, index) for index in range(3) for step in ("start", "delta", "stop")]
    assert order == [("message_start", None), *blocks, ("message_delta", None), ("message_stop", None)]
    usage = [event.get("usage") or event["message"]["usage"] for event in (events[0], events[-2])]
    read, new = (usage[1][f"{name}input_tokens"] for name in ("cache_read_", ""))
    assert usage[0]["input_tokens"] == read + new


def test_results_and_texts_of_a_turn_keep_their_order(messages, wants):
    """A failed result says so; texts are joined; a call that this server has not made is written by the template."""
    prompts = wants("yes")
    said = [
        *QUESTION,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "a", "name": "tides", "input": {"city": "Rome"}}],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "a",
                    "is_error": True,
                    "content": [{"type": "text", "text": "no", "cache_control": {"type": "ephemeral"}}],
                },
                {"type": "text", "text": "One."},
                {"type": "text", "text": "Two."},
            ],
        },
    ]
    messages.create(**BODY | {"messages": said, "tools": TOOLS})
    result, text = (
        prompts[0].index("<tool_response>\nError: no\n</tool_response>"),
        prompts[0].index("One.\nTwo."),
    )
    assert prompts[0].index('{"name": "tides", "arguments": {"city": "Rome"}}') < result < text


def test_counts_are_those_of_the_message(keyed, messages, wants):
    """count_tokens counts what the message has as its prompt, and what chats have; it computes nothing."""
    wants("yes")
    fields = {"model": "any", "messages": QUESTION, "tools": TOOLS, "system": "Be kind."}
    counted = messages.count_tokens(**fields).input_tokens
    usage = messages.create(**fields, max_tokens=1).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens
    keyed.idle()  # an answer is counted after its last byte is sent
    computed = keyed.serving.new_tokens
    assert messages.count_tokens(**fields | {"messages": QUESTION * 500}).input_tokens > 1536
    assert keyed.serving.new_tokens == computed


def test_errors_have_the_clients_types(keyed, messages, wants):
    """The client raises its own type for a status, with the server's object."""
    with (
        anthropic.Anthropic(base_url=keyed.url, api_key="x", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError) as refused,
    ):
        client.messages.create(**BODY)
    assert refused.value.body["error"]["type"] == "authentication_error"
    wants("one two three " * 30)
    with keyed.limited(answer_seconds=0.05), pytest.raises(anthropic.APIStatusError) as late:
        list(messages.create(**BODY | {"stream": True}))
    assert late.value.body["error"]["type"] == "timeout_error"


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
def test_the_key_comes_in_either_header(keyed, name):
    """The client's api_key and auth_token; a wrong one in either is refused, whatever the protocol."""
    given = {"authorization": f"Bearer {KEY}", "x-api-key": KEY}[name]
    for path in ("/v1/models", "/metrics"):
        for value, status in ((given, 200), (given + "x", 401), (given[:-1], 401), ("", 401)):
            request = keyed.client.build_request("GET", path, headers={name: value})
            if name != "x-api-key":
                del request.headers["x-api-key"]
            assert keyed.client.send(request).status_code == status
