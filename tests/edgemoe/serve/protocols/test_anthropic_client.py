"""Anthropic's own client against the server: messages whole and streamed, tools, counts, and its errors."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial

import pytest
from scripted import ANSWER, CALL, CITY, TURNS, answer_of_turns, chatml_model, script
from servers import server_of

from edgemoe.serve.guard import Access
from edgemoe.serve.limits import Limits

anthropic = pytest.importorskip("anthropic")
pytest.importorskip("llguidance")

KEY = "sk-local"
TOOLS = [{"name": name, "description": "x", "input_schema": CITY} for name in ("weather", "tides")]
QUESTION = [{"role": "user", "content": "Oslo?"}]
MESSAGES = "/v1/messages"


@pytest.fixture(scope="module")
def keyed(tiny_store) -> Iterator[object]:
    with server_of(chatml_model(tiny_store), Access(key=KEY), most=8) as one:
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


def test_turns_keep_every_token(messages, wants):
    """Ten turns of calls and results: each prompt has the model's own spelling, and nothing is computed twice."""
    prompts, before = wants(answer_of_turns), None
    said: list[dict] = [*QUESTION]
    for turn in range(TURNS + 1):
        # A stop sequence that does not come leaves the answer whole.
        done = messages.create(**BODY | {"messages": said, "tools": TOOLS, "stop_sequences": ["zzz"]})
        if before:
            prompt = before.usage.input_tokens + before.usage.cache_read_input_tokens
            assert done.usage.cache_read_input_tokens == prompt + before.usage.output_tokens - 1
            assert prompts[-1].count('"name":"weather",  "arguments"') == turn
        before = done
        said.append({"role": "assistant", "content": done.content})
        calls = [block for block in done.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"} for call in calls]
        said += [{"role": "user", "content": results}] if results else []
    assert blocks_of(done) == [{"type": "text", "text": "It is sunny."}]
    assert done.stop_reason == "end_turn"


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


@pytest.mark.parametrize("stream", [False, True])
def test_how_a_message_ends(keyed, messages, wants, stream):
    """A stop sequence by its text, the limit, the context, and the model's own end."""
    wants("one two three")
    ends = [
        ({}, "one two three", ("end_turn", None)),
        ({"stop_sequences": ["zzz", " three"]}, "one two", ("stop_sequence", " three")),
        ({"max_tokens": 3}, None, ("max_tokens", None)),
    ]
    for fields, text, end in ends:
        done = messages.create(**BODY | fields) if not stream else streamed(messages, **BODY | fields)
        assert text is None or done.content[0].text == text
        assert (done.stop_reason, done.stop_sequence) == end
    wants("x" * 5000)
    fields = BODY | {"max_tokens": 10**6}
    done = streamed(messages, **fields) if stream else messages.create(**fields, timeout=60)
    assert done.stop_reason == "model_context_window_exceeded"


def streamed(create, **fields: object):
    with create.stream(**fields) as stream:
        return stream.get_final_message()


@pytest.mark.parametrize(
    ("choice", "names"),
    [({"type": "any"}, {"weather", "tides"}), ({"type": "tool", "name": "tides"}, {"tides"})],
)
def test_a_call_is_made_whatever_the_model_wants(messages, wants, choice, names):
    """any and tool are enforced, as required and a function's name are in a chat."""
    wants("It is sunny.")
    done = messages.create(
        **BODY | {"tools": TOOLS, "tool_choice": choice | {"disable_parallel_tool_use": True}}
    )
    (call,) = done.content
    assert call.name in names
    assert isinstance(call.input["city"], str)


def test_one_call_at_most_and_none(messages, wants):
    """disable_parallel_tool_use ends the answer behind a call; none leaves the tools out of the prompt."""
    prompts = wants(f"{CALL}\n{CALL}")
    both = messages.create(**BODY | {"tools": TOOLS})
    one = messages.create(
        **BODY | {"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    )
    assert (len(both.content), len(one.content)) == (2, 1)
    none = messages.create(**BODY | {"tools": TOOLS, "tool_choice": {"type": "none"}})
    assert [block.type for block in none.content] == ["text"]
    assert "tools:" not in prompts[-1]


def test_thinking_and_the_form_of_the_answer(messages, wants):
    """disabled reaches the chat template; a schema is enforced."""
    prompts = wants("yes")
    messages.create(**BODY | {"thinking": {"type": "disabled"}})
    assert prompts[-1].endswith("<think>\n\n</think>\n\n")
    messages.create(**BODY | {"thinking": {"type": "adaptive"}})
    assert prompts[-1].endswith("assistant\n")
    form = {"type": "json_schema", "schema": CITY | {"additionalProperties": False}}
    done = messages.create(**BODY | {"output_config": {"format": form, "effort": "low"}})
    assert json.loads(done.content[0].text).keys() == {"city"}


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


WRONG = [
    ({"messages": []}, "messages"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"tempereture": 1}, "no tempereture"),
    ({"top_k": 1.5}, "top_k"),
    ({"mcp_servers": [{}]}, "no mcp_servers"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text.text"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}]}, "text.y"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}
            ]
        },
        "'tool_use'",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "a",
                            "content": [{"type": "image", "source": {}}],
                        }
                    ],
                }
            ]
        },
        "'image'",
    ),
    ({"messages": [*QUESTION, {"role": "assistant", "content": "The"}]}, "cannot be continued"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "rename 'weather'"),
    ({"tools": [{"name": "a b", "input_schema": CITY}]}, "pattern"),
    ({"tool_choice": {"type": "any"}}, "no 'tools'"),
    ({"tool_choice": {"type": "tool"}, "tools": TOOLS}, "expected a name"),
    ({"tool_choice": {"type": "tool", "name": "x"}, "tools": TOOLS}, "no 'x'"),
    ({"messages": [{"role": "user", "content": "Oslo " * 2000}]}, "context"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "'not'"),
]


@pytest.mark.parametrize(("fields", "words"), WRONG)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_named(keyed, fields, words, stream):
    """Status 400 with Anthropic's error object, before a stream begins; nothing is left behind."""
    body = {**BODY, "stream": stream, **fields}
    found = keyed.client.post(MESSAGES, json={k: v for k, v in body.items() if v is not None})
    error = found.json()
    assert (found.status_code, error["type"], error["error"]["type"]) == (
        400,
        "error",
        "invalid_request_error",
    )
    assert words in error["error"]["message"]
    assert not keyed.serving.queue.jobs


def test_errors_have_the_clients_types(keyed, messages, monkeypatch):
    """A wrong key, an endpoint that is none, a full queue, a model that loads, and another method."""
    with (
        anthropic.Anthropic(base_url=keyed.url, api_key="x", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError) as refused,
    ):
        client.messages.create(**BODY)
    assert refused.value.body["error"]["type"] == "authentication_error"
    assert keyed.client.get(MESSAGES).json()["type"] == "error"
    missing = keyed.client.post(f"{MESSAGES}/batches", json={}).json()
    assert missing["error"]["type"] == "not_found_error"
    monkeypatch.setattr(keyed.serving.queue, "most", 0)
    with pytest.raises(anthropic.RateLimitError) as full:
        messages.create(**BODY)
    assert full.value.body["error"]["type"] == "rate_limit_error"
    monkeypatch.undo()
    monkeypatch.setattr(keyed.serving, "model", None)
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        body = BODY if path == MESSAGES else {"model": "x", "messages": QUESTION}
        loading = keyed.client.post(path, json=body)
        assert (loading.status_code, loading.json()["error"]["type"]) == (503, "overloaded_error")


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


def test_pings_keep_a_stream_alive_and_an_error_ends_it(keyed, messages, monkeypatch):
    """A slow prompt sends pings behind message_start; a time limit is an error event, which the client raises."""
    model = keyed.serving.model
    limits = Limits(ping_seconds=0.1, progress_seconds=0.05)
    monkeypatch.setattr(keyed.serving, "limits", limits)
    model.engine.watch(lambda layer, chosen: time.sleep(0.2))
    try:
        raw = keyed.client.post(MESSAGES, json=BODY | {"max_tokens": 2, "stream": True}).text
        names = [part.partition("\n")[0] for part in raw.strip().split("\n\n")]
        assert names[0] == "event: message_start"
        assert names[1] == "event: ping"
        assert names[-1] == "event: message_stop"
        monkeypatch.setattr(keyed.serving, "limits", Limits(answer_seconds=0.3))
        with pytest.raises(anthropic.APIStatusError) as late:
            list(messages.create(**BODY | {"stream": True}))
        assert late.value.body["error"]["type"] == "timeout_error"
    finally:
        model.engine.watch(lambda layer, chosen: None)
        keyed.idle()
