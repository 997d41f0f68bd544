"""Tools over HTTP, with OpenAI's own client: calls whole and streamed, their results, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial

import pytest
from imported_later import imported_later
from scripted import ANSWER, CALL, CHATML, chatml_model, script
from servers import server_of

openai = imported_later("openai")
pytest.importorskip("llguidance")

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str, **more: object) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": CITY, **more}}


TOOLS = [tool("weather"), tool("tides")]
QUESTION = [{"role": "user", "content": "Oslo?"}]
SUNNY = {"role": "tool", "content": "sunny"}


@pytest.fixture(scope="module")
def tooled(tiny_store) -> Iterator[object]:
    with server_of(chatml_model(tiny_store), limit=8) as one:
        yield one


@pytest.fixture
def create(tooled) -> Iterator[object]:
    """Creates a chat of the question with the tools."""
    with openai.OpenAI(base_url=f"{tooled.url}/v1", api_key="x", max_retries=0) as client:

        def one(**fields: object):
            body = {"model": "tiny", "messages": QUESTION, "tools": TOOLS} | fields
            return client.chat.completions.create(**{k: v for k, v in body.items() if v is not None})

        yield one
    tooled.idle()


@pytest.fixture
def wants(tooled, monkeypatch):
    """Has the model want an answer, or one for each prompt."""
    return partial(script, monkeypatch, tooled.serving.model.tokenizer)


def called(message) -> list[tuple[str, dict]]:
    calls = message.tool_calls or []
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


OSLO = [("weather", {"city": "Oslo"})]


@pytest.mark.e2e
def test_a_call_whole_and_streamed(create, wants):
    """Reasoning, text and call apart, with the same parts in both; the prompt has the tools as they were sent."""
    prompts = wants(ANSWER)
    (choice,) = create().choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    assert choice.message.reasoning_content == "hm"
    assert called(choice.message) == OSLO
    assert all(json.dumps(each) in prompts[0] for each in TOOLS)
    chunks = [chunk.choices[0] for chunk in create(stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "Let me see."
    assert "".join(getattr(chunk.delta, "reasoning_content", None) or "" for chunk in chunks) == "hm"
    (piece,) = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert (piece.index, piece.type) == (0, "function")
    assert (piece.function.name, json.loads(piece.function.arguments)) == OSLO[0]
    assert piece.id != choice.message.tool_calls[0].id
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]


def test_the_clients_helper_joins_a_streamed_call(tooled, wants):
    """Its final completion has both calls; log probabilities are of every token."""
    wants(f"{CALL}\n{CALL.replace('weather', 'tides')}")
    with (
        openai.OpenAI(base_url=f"{tooled.url}/v1", api_key="x") as client,
        client.chat.completions.stream(model="x", messages=QUESTION, tools=TOOLS, logprobs=True) as stream,
    ):
        for _ in stream:
            pass
        final = stream.get_final_completion()
    (choice,) = final.choices
    assert [call.function.name for call in choice.message.tool_calls] == ["weather", "tides"]
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [OSLO[0][1]] * 2
    assert len(choice.logprobs.content) > 20


def test_a_changed_call_is_rendered_by_the_template(create, wants):
    """Other arguments under the same id, or an id that this server has not given: as the client has sent them."""
    prompts = wants(lambda prompt: "yes" if "<tool_response>" in prompt else CALL)
    sent = create().choices[0].message.model_dump(exclude_none=True)
    for name, value in (("arguments", '{"city": "Rome"}'), ("id", "call_1")):
        changed = json.loads(json.dumps(sent))
        call = changed["tool_calls"][0]
        (call if name == "id" else call["function"])[name] = value
        create(messages=[*QUESTION, changed, SUNNY | {"tool_call_id": call["id"]}])
        city = "Rome" if name == "arguments" else "Oslo"
        assert f'{{"name": "weather", "arguments": {{"city": "{city}"}}}}' in prompts[-1]


@pytest.mark.e2e
def test_a_required_call_may_follow_reasoning(create, wants):
    """A grammar holds it to the form of its calls; a call of that form passes."""
    wants(ANSWER.replace("Let me see.\n", "").replace(",  ", ", ").replace('":', '": '))
    (answer,) = create(tool_choice="required", parallel_tool_calls=False, max_tokens=200).choices
    assert answer.finish_reason == "tool_calls"
    assert called(answer.message) == OSLO
    assert answer.message.reasoning_content == "hm"


@pytest.mark.e2e
def test_a_strict_tool_keeps_its_parameters(create, wants):
    """With tool_choice auto the text is free, and a call is not."""
    tools = [tool("weather", strict=True)]
    wants("It is sunny.")
    assert create(tools=tools).choices[0].message.content == "It is sunny."
    wants(f"Let me see.\n{CALL.replace('city', 'town')}")
    message = create(tools=tools, max_tokens=300).choices[0].message
    assert message.content.startswith("Let me see.")
    ((name, arguments),) = called(message)
    assert name == "weather"
    assert arguments.keys() <= {"city", "days"}


def test_the_answer_ends_with_its_one_call(tooled, create, wants):
    """With parallel_tool_calls false the second call is not computed."""
    wants(f"{CALL}\n{CALL}")
    computed = tooled.serving.new_tokens
    (choice,) = create(parallel_tool_calls=False).choices
    tooled.idle()
    one = len(tooled.serving.model.tokenizer(CALL)["input_ids"])
    assert (len(choice.message.tool_calls), choice.finish_reason) == (1, "tool_calls")
    assert tooled.serving.new_tokens - computed <= one + 1  # the token after the call shows its end


@pytest.mark.parametrize("stream", [False, True])
def test_half_a_call_goes_out_as_text(create, wants, stream):
    """max_tokens ends the answer within a call: its text is content, and finish_reason is length."""
    wants(ANSWER)
    done = create(max_tokens=40, stream=stream)
    choices = [chunk.choices[0] for chunk in done] if stream else done.choices
    parts = [choice.delta if stream else choice.message for choice in choices]
    text = "".join(part.content or "" for part in parts)
    assert text.startswith('Let me see.\n<tool_call>\n{"name":"w')
    assert ANSWER.endswith(text.partition("Let me")[2]) is False
    assert text in ANSWER
    assert not any(part.tool_calls for part in parts)
    assert choices[-1].finish_reason == "length"


def test_choices_have_calls_of_their_own(create, wants):
    """Three answers, with an id for each call."""
    wants(CALL)
    done = create(n=3)
    assert [called(choice.message) for choice in done.choices] == [OSLO] * 3
    assert len({choice.message.tool_calls[0].id for choice in done.choices}) == 3


def test_without_tools_nothing_is_a_call(create, wants):
    """tool_choice none leaves the tools out of the prompt, and the model's tags are text."""
    prompts = wants(CALL)
    for fields in ({"tool_choice": "none"}, {"tools": None}):
        (choice,) = create(**fields).choices
        assert (choice.message.content, choice.finish_reason) == (CALL, "stop")
        assert "tools:" not in prompts[-1]


def test_the_template_has_the_variables_of_a_request(create, wants):
    """reasoning_effort and chat_template_kwargs reach it with the tools; they cannot take the place of the tools."""
    prompts = wants("yes")
    kwargs = {"enable_thinking": False, "tools": [tool("other")]}
    create(extra_body={"chat_template_kwargs": kwargs})
    assert prompts[-1].endswith("<think>\n\n</think>\n\n")
    assert '"other"' not in prompts[-1]
    assert '"tides"' in prompts[-1]


@pytest.mark.e2e
def test_parameters_that_no_grammar_enforces_are_named(tooled):
    """A strict tool with them is status 400, with the field and the reason; no request is left."""
    body = {"messages": QUESTION, "tools": [tool("a", parameters={"not": {}}, strict=True)]}
    response = tooled.client.post("/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools")
    assert "got 'not'" in error["message"]
    assert not tooled.serving.queue.jobs


def test_parameters_that_no_grammar_enforces_are_fine_where_none_does(create, wants):
    """With auto, and without strict, they are the model's matter."""
    wants(CALL)
    tools = [tool("weather", parameters={"type": "object", "not": {"required": ["x"]}})]
    assert called(create(tools=tools).choices[0].message) == OSLO


def test_a_model_without_tools_says_so(tiny_store):
    """Its chat template writes none, and its tokenizer declares no form of calls."""
    with server_of(chatml_model(tiny_store, CHATML[CHATML.index("{%- for m in") :])) as server:
        response = server.client.post("/v1/chat/completions", json={"messages": QUESTION, "tools": TOOLS})
        assert response.status_code == 400
        assert "leaves tools out" in response.json()["error"]["message"]


@pytest.mark.e2e
def test_a_broken_response_template_is_the_matter_of_tools(tiny_store):
    """A chat is text then; one with tools is refused with the reason."""
    model = chatml_model(tiny_store)
    model.tokenizer.response_template = {"fields": {}}
    with server_of(model) as server:
        body = {"messages": QUESTION, "max_tokens": 2}
        assert server.client.post("/v1/chat/completions", json=body).status_code == 200
        response = server.client.post("/v1/chat/completions", json=body | {"tools": TOOLS})
        assert response.status_code == 400
        assert "response_template" in response.json()["error"]["message"]


def test_tokens_of_messages_with_tools(tooled, create, wants):
    """/tokenize counts what a chat with the same tools has as its prompt."""
    wants("yes")
    found = tooled.client.post("/tokenize", json={"messages": QUESTION, "tools": TOOLS}).json()
    assert found["count"] == create().usage.prompt_tokens
