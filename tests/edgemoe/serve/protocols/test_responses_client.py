"""OpenAI's own client against /v1/responses: whole and streamed, tools, forms, and its errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial

import pytest
from imported_later import imported_later
from scripted import ANSWER, CITY, chatml_model, script
from servers import server_of

openai = imported_later("openai")
pytest.importorskip("llguidance")

TOOLS = [
    {"type": "function", "name": name, "description": "x", "parameters": CITY, "strict": False}
    for name in ("weather", "tides")
]
RESPONSES = "/v1/responses"
BODY = {"model": "any", "input": "Oslo?", "max_output_tokens": 200}


@pytest.fixture(scope="module")
def served(tiny_store) -> Iterator[object]:
    with server_of(chatml_model(tiny_store), limit=8) as one:
        yield one


@pytest.fixture
def responses(served) -> Iterator[object]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
        yield client.responses
    served.idle()


@pytest.fixture
def wants(served, monkeypatch):
    """Has the model want an answer, or one for each prompt."""
    return partial(script, monkeypatch, served.serving.model.tokenizer)


def parts(response) -> list[tuple]:
    """The items of a response, without ids."""
    said = {
        "reasoning": lambda item: item.content[0].text,
        "message": lambda item: item.content[0].text,
        "function_call": lambda item: (item.name, json.loads(item.arguments)),
    }
    return [(item.type, said[item.type](item)) for item in response.output]


PARTS = [
    ("reasoning", "hm"),
    ("message", "Let me see."),
    ("function_call", ("weather", {"city": "Oslo"})),
]


@pytest.mark.e2e
def test_a_response_whole_and_streamed(responses, wants):
    """Reasoning, text and call as items, the same in both; instructions and a developer's message are one system."""
    prompts = wants(ANSWER)
    said = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Oslo?"}]
    fields = BODY | {"tools": TOOLS, "instructions": "Be short.", "input": said, "metadata": {"a": "b"}}
    whole = responses.create(**fields)
    assert parts(whole) == PARTS
    assert (whole.status, whole.model, whole.metadata, whole.store) == ("completed", "any", {"a": "b"}, False)
    assert [tool.name for tool in whole.tools] == ["weather", "tides"]
    assert "<|im_start|>system\nBe short.\n\nBe kind.<|im_end|>" in prompts[0]
    function = {"name": "tides", "description": "x", "parameters": CITY, "strict": False}
    assert '"strict": false' in prompts[0]
    assert json.dumps(function)[1:60] in prompts[0]
    with responses.stream(**fields) as stream:
        *_, last = stream
    final = last.response
    assert parts(final) == PARTS
    assert prompts[0] == prompts[1]
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert 0 < final.usage.output_tokens_details.reasoning_tokens < 5


def test_events_come_in_order(served, wants):
    """Each item is added, grows and is done before the next; numbers count up; names are as in the data."""
    wants(ANSWER)
    raw = served.client.post(RESPONSES, json=BODY | {"tools": TOOLS, "stream": True})
    assert raw.headers["content-type"].startswith("text/event-stream")
    pairs = [part.split("\n") for part in raw.text.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {event['type']}" for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    order = []
    for event in events:
        step = (event["type"].removeprefix("response."), event.get("output_index"))
        order += [step] if order[-1:] != [step] else []
    text = [
        "output_item.added",
        "content_part.added",
        "{}.delta",
        "{}.done",
        "content_part.done",
        "output_item.done",
    ]
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert order == [
        ("created", None),
        ("in_progress", None),
        *((step.format("reasoning_text"), 0) for step in text),
        *((step.format("output_text"), 1) for step in text),
        *((step, 2) for step in call),
        ("completed", None),
    ]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    added = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    assert added == [item["id"] for item in done]
    places = {event["item_id"] for event in events if "item_id" in event}
    assert places == set(added)


def test_items_become_messages(responses, wants):
    """Items of one answer are one message; texts in parts are joined; a call of another server is written anew."""
    prompts = wants("yes")
    said = [
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": text} for text in "ab"],
        },
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "See.", "annotations": []}]},
        {"type": "function_call", "call_id": "x", "name": "tides", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "x", "output": [{"type": "input_text", "text": "high"}]},
        {"type": "message", "role": "user", "content": "And?"},
    ]
    responses.create(**BODY | {"input": said, "tools": TOOLS, "reasoning": {"effort": "none"}})
    call = '<tool_call>\n{"name": "tides", "arguments": {"city": "Rome"}}\n</tool_call>'
    answer = f"<|im_start|>assistant\n<think>\nhm\n</think>\n\nSee.\n{call}<|im_end|>\n"
    result = "<|im_start|>user\n<tool_response>\nhigh\n</tool_response><|im_end|>\n<|im_start|>user\nAnd?<|im_end|>"
    assert f"user\na\nb<|im_end|>\n{answer}{result}" in prompts[0]
    assert prompts[0].endswith("<think>\n\n</think>\n\n")  # effort none is enable_thinking false


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_is_incomplete(responses, wants, stream):
    """By max_output_tokens: the status of the response and of its last item, and the reason."""
    wants("one two three four five")
    done = responses.create(**BODY | {"max_output_tokens": 5, "stream": stream})
    if stream:
        *_, end = done
        assert end.type == "response.incomplete"
        done = end.response
    assert (done.status, done.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.status for item in done.output] == ["incomplete"]
    assert "one two three".startswith(done.output_text)
    assert done.usage.output_tokens == 5


def test_a_prompt_beyond_the_context_has_the_code_that_agents_compact_on(responses):
    """context_length_exceeded, as the client raises it."""
    with pytest.raises(openai.BadRequestError) as refused:
        responses.create(**BODY | {"input": "Oslo " * 2000, "stream": True})
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.e2e
def test_an_object_of_any_keys(responses, wants):
    """The form is enforced, and the response repeats it."""
    wants("It is sunny.")
    done = responses.create(**BODY | {"text": {"format": {"type": "json_object"}}})
    assert done.text.format.type == "json_object"
    assert isinstance(json.loads(done.output_text), dict)


def test_an_error_within_a_stream_has_a_code(served, responses, wants):
    """The last event is response.failed, as the client has it."""
    wants("one two three " * 30)
    with served.limited(answer_seconds=0.05):
        *_, failed = responses.create(**BODY | {"stream": True})
    assert (failed.type, failed.response.error.code) == ("response.failed", "server_error")
