"""response_format over HTTP: answers that are JSON of a schema, and each way in which there is none."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from imported_later import imported_later
from scripted import chatml_model, script
from servers import server_of

from edgemoe.grammar.matcher import Grammar
from edgemoe.machine.process import resident_bytes
from edgemoe.serve import connections

openai = imported_later("openai")
pytest.importorskip("llguidance")


QUESTION = [{"role": "user", "content": "Oslo?"}]
CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def schema(value: object) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": value, "strict": True}}


@pytest.fixture(scope="module")
def formed(tiny_store) -> Iterator[object]:
    with server_of(chatml_model(tiny_store), limit=8) as one:
        yield one


@pytest.fixture
def create(formed) -> Iterator[object]:
    with openai.OpenAI(base_url=f"{formed.url}/v1", api_key="x", max_retries=0) as client:

        def one(form: dict, **fields: object):
            return client.chat.completions.create(
                model="x", **{"messages": QUESTION, "max_tokens": 60, "response_format": form} | fields
            )

        yield one
    formed.idle()


def post(server, form: dict, **fields: object):
    """Posts a chat whose answer begins without reasoning."""
    body = {"messages": QUESTION, "max_tokens": 60, "response_format": form} | fields
    body["chat_template_kwargs"] = {"enable_thinking": False}
    return server.client.post("/v1/chat/completions", json=body)


@pytest.mark.e2e
def test_an_answer_is_one_of_the_choices_or_matches(formed, monkeypatch):
    """The model wants prose, and may reason first: the content has the form, under each of its names."""
    script(monkeypatch, formed.serving.model.tokenizer, "It is sunny.")
    choices, pattern = ["Oslo", "Rome"], "[A-Z][a-z]{2,4}/[0-9]{2}"
    for form in (
        {"guided_choice": choices},
        {"structured_outputs": {"choice": choices}},
        {"guided_regex": pattern},
        {"regex": pattern},
    ):
        for more in ({}, {"chat_template_kwargs": {"enable_thinking": False}}):
            body = {"messages": QUESTION, "max_tokens": 100, **form, **more}
            (choice,) = formed.client.post("/v1/chat/completions", json=body).json()["choices"]
            found = choice["message"]["content"]
            assert found in choices or re.fullmatch(pattern, found), (form, found)
            assert choice["finish_reason"] == "stop"


@pytest.mark.e2e
def test_an_answer_has_its_schema_whole_and_streamed(formed, create, monkeypatch):
    """The model wants prose, with a bias to it; it answers with JSON, and ends where the grammar does."""
    tokenizer = formed.serving.model.tokenizer
    script(monkeypatch, tokenizer, "It is sunny.")
    fields = {"logit_bias": {str(tokenizer("I")["input_ids"][0]): 1000.0}}
    (choice,) = create(schema(CITY), **fields).choices
    found = json.loads(choice.message.content)
    assert (found.keys(), found["city"] in ("Oslo", "Rome"), choice.finish_reason) == (
        {"city", "days"},
        True,
        "stop",
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in create(schema(CITY), stream=True, **fields)]
    assert "".join(pieces) == choice.message.content


@pytest.mark.e2e
def test_an_object_of_any_keys(create, formed, monkeypatch):
    """An answer that is JSON passes; the model may think first, and the text has none of that."""
    script(
        monkeypatch, formed.serving.model.tokenizer, lambda prompt: '<think>hm</think>\n{"city": [1, 2.5]}'
    )
    (choice,) = create({"type": "json_object"}).choices
    assert json.loads(choice.message.content) == {"city": [1, 2.5]}
    assert choice.message.reasoning_content == "hm"


@pytest.mark.e2e
def test_a_prompt_that_has_begun_to_think(create, formed, monkeypatch):
    """The JSON comes after the end of the reasoning; where the template has ended it, at once."""
    script(monkeypatch, formed.serving.model.tokenizer, 'hm</think>{"a": 1}')
    for kwargs, thought in (({"thinking_begun": True}, "hm"), ({"enable_thinking": False}, None)):
        body = {"chat_template_kwargs": kwargs}
        (choice,) = create({"type": "json_object"}, extra_body=body, max_tokens=30).choices
        assert getattr(choice.message, "reasoning_content", None) == thought
        assert choice.message.content.startswith("{")


def test_text_is_text(create, formed, monkeypatch):
    """The answer is as without the field."""
    script(monkeypatch, formed.serving.model.tokenizer, "It is sunny.")
    assert create({"type": "text"}).choices[0].message.content == "It is sunny."


@pytest.mark.e2e
def test_several_schemas_at_once(formed):
    """Hot answers side by side, several to a prompt, each with the matcher of its own schema."""
    schemas = [{"type": "array", "items": {"const": i}, "minItems": 1, "maxItems": 3} for i in range(4)]

    def one(i: int) -> None:
        for choice in post(formed, schema(schemas[i]), n=3, temperature=1.5, seed=i).json()["choices"]:
            assert choice["finish_reason"] == "stop"
            found = json.loads(choice["message"]["content"])
            assert 1 <= len(found) <= 3
            assert set(found) == {i}

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(4)))
    formed.idle()


@pytest.mark.e2e
def test_max_tokens_ends_json_in_its_middle(formed):
    """The reason is length, as for other answers."""
    form = schema({"type": "string", "minLength": 50})
    (choice,) = post(formed, form, max_tokens=5).json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"][0]) == ("length", '"')


@pytest.mark.e2e
def test_what_is_not_enforced_is_refused(formed):
    """Status 400 with the field and the reason; its place in the queue is free."""
    response = post(formed, schema({"type": "array", "uniqueItems": True}))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "response_format")
    assert "'uniqueItems'" in error["message"]
    assert formed.serving.queue.taken == 0


@pytest.fixture
def slow(monkeypatch):
    """Compiling waits for the second event, and sets the first."""
    begun, go_on = threading.Event(), threading.Event()
    compile_ = Grammar.__init__

    def wait(self, *arguments):
        begun.set()
        assert go_on.wait(30)
        compile_(self, *arguments)

    monkeypatch.setattr(Grammar, "__init__", wait)
    yield begun, go_on
    go_on.set()


@pytest.mark.e2e
def test_a_schema_that_compiles_too_long_is_refused(formed, slow):
    """The request ends at its time, and so does one whose turn has not come; others go on meanwhile."""
    with formed.limited(compile_seconds=0.2):
        response = post(formed, schema({"const": 0}))
        later = post(formed, schema({"const": 1}))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "response_format")
    assert "within 0.2 s" in response.json()["error"]["message"]
    assert (later.status_code, later.headers["retry-after"]) == (503, "5")
    assert not slow[1].is_set()
    assert post(formed, {"type": "text"}, max_tokens=2).status_code == 200
    formed.wait(lambda: formed.serving.queue.taken == 0)  # just after the answer


@pytest.mark.e2e
def test_a_client_that_leaves_while_its_schema_compiles(formed, slow, monkeypatch):
    """Nothing is computed for it, and its place in the queue is free at once."""
    begun, go_on = slow
    monkeypatch.setattr(connections, "PROBE_SECONDS", 0.05)
    body = json.dumps({"messages": QUESTION, "response_format": schema({"const": "left"})}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    status = formed.serving.model.status()
    with socket.create_connection(("127.0.0.1", formed.port)) as one:
        one.sendall(head.encode() + body)
        assert begun.wait(30)
    formed.wait(lambda: formed.serving.queue.taken == 0)
    assert not go_on.is_set()
    after = formed.serving.model.status()
    assert after.use == status.use
    assert after.running == after.waiting == 0


@pytest.mark.e2e
def test_chats_go_on_while_hostile_schemas_compile(formed):
    """Each schema ends at its time; none takes a thread of chats, or memory of the server."""
    endless = [
        schema({"allOf": [{"type": "string", "pattern": f".*a.{{{i * 10 + j}}}b.*"} for i in range(1, 40)]})
        for j in range(6)
    ]
    post(formed, schema(CITY))
    before = resident_bytes()
    with formed.limited(compile_seconds=1.0), ThreadPoolExecutor(6) as pool:
        hostile = [pool.submit(post, formed, form) for form in endless]
        start = time.monotonic()
        assert post(formed, {"type": "text"}, max_tokens=2).status_code == 200
        assert time.monotonic() - start < 2
        assert not all(one.done() for one in hostile)
        assert sorted({one.result().status_code for one in hostile}) == [400, 503]
    assert resident_bytes() - before < 64 << 20
    formed.idle()


@pytest.mark.e2e
def test_a_schema_that_becomes_too_complex_ends_its_request_alone(formed):
    """A stream that has begun ends in an error; another one goes on."""
    parts = [
        {"properties": {f"p{i}": {"type": "null"} for i in range(n, n + 500)}} for n in range(0, 2500, 500)
    ]
    many = {"allOf": parts, "type": "object"}
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(post, formed, schema(CITY))
        lines = post(formed, schema(many), stream=True).text.strip().split("\n\n")
        assert "items" in json.loads(lines[-1].removeprefix("data: "))["error"]["message"]
        assert json.loads(other.result().json()["choices"][0]["message"]["content"]).keys() == {
            "city",
            "days",
        }
    formed.idle()
