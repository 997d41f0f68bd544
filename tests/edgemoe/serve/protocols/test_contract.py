"""Promises of all protocols: equal answers, counts, ends, refusals and cancellations, in the words of each."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice

import pytest
from dialects import DIALECTS, Dialect, Said
from scripted import ANSWER, CALL, CITY, TURNS, answer_of_turns, chatml_model, script
from servers import server_of

from edgemoe.serve.guard import Access

pytest.importorskip("llguidance")

KEY = "sk-local"
TOOLS = [("weather", CITY), ("tides", CITY)]
BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@pytest.fixture(scope="module")
def served(tiny_store) -> Iterator[object]:
    with server_of(chatml_model(tiny_store), Access(key=KEY), limit=8) as one:
        one.client.headers["x-api-key"] = KEY
        yield one


@pytest.fixture(params=DIALECTS)
def dialect(request, served) -> Iterator[Dialect]:
    """A protocol's client, whose test leaves no request in the server."""
    yield DIALECTS[request.param]
    served.idle()


@pytest.fixture
def wants(served, monkeypatch):
    """Has the model want an answer, or one for each prompt; returns the text of every prompt."""
    return partial(script, monkeypatch, served.serving.model.tokenizer)


def post(served, dialect: Dialect, said=None, stream: bool = False, **fields: object):
    body = dialect.body(dialect.question("Oslo?") if said is None else said, stream, **fields)
    return served.client.post(dialect.path, json=body)


def read(served, dialect: Dialect, stream: bool = False, **fields: object) -> Said:
    """The parts of the answer to a question."""
    response = post(served, dialect, stream=stream, **fields)
    assert response.status_code == 200, response.text
    if stream:
        assert response.headers["content-type"] == dialect.stream_type
        return dialect.streamed(response.text)
    return dialect.whole(response.json())


@BOTH
def test_an_answer_has_its_parts_and_counts(served, dialect, wants, stream):
    """Reasoning, text and call apart; every token of the prompt and of the answer is counted once."""
    prompts = wants(ANSWER)
    said = read(served, dialect, stream, tools=TOOLS)
    tokenizer = served.serving.model.tokenizer
    new = len(tokenizer(ANSWER)["input_ids"]) + 1  # the token that ends it
    assert (said.thought, said.text) == ("hm", "Let me see.")
    assert said.calls == [("weather", {"city": "Oslo"})]
    assert said.end == dialect.ends["calls"]
    assert (said.usage[0], said.usage[2]) == (len(tokenizer(prompts[0])["input_ids"]), new)
    assert all(json.dumps(name) in prompts[0] for name, _ in TOOLS)


@BOTH
def test_several_calls_are_parts_of_their_own(served, dialect, wants, stream):
    """Two calls of one answer, in their order."""
    wants(f"{CALL}\n{CALL.replace('weather', 'tides')}")
    said = read(served, dialect, stream, tools=TOOLS)
    assert said.calls == [("weather", {"city": "Oslo"}), ("tides", {"city": "Oslo"})]


@pytest.mark.e2e
def test_turns_keep_every_token(served, dialect, wants):
    """Ten turns of calls that the client sends back: each prompt has the model's spelling, computed once."""
    prompts, before = wants(answer_of_turns), None
    said = dialect.question(f"{dialect.path}?")  # no other protocol has begun so
    for turn in range(TURNS + 1):
        served.idle()
        kept = kept_tokens(served)
        response = post(served, dialect, said, tools=TOOLS)
        served.idle()
        answer = dialect.whole(response.json())
        if before:
            found = kept_tokens(served) - kept
            assert found == before[0] + before[2] - 1  # but for the token that ended it
            assert answer.usage[1] in (None, found)
            assert prompts[-1].count('"name":"weather",  "arguments"') == turn
            assert prompts[-1].count("<think>\nhm\n</think>") == turn
        before = answer.usage
        said += dialect.answered(response.json(), "sunny")
    assert (answer.text, answer.calls) == ("It is sunny.", [])


def kept_tokens(served) -> int:
    lines = served.client.get("/metrics").text.splitlines()
    return int(sum(float(n.split()[-1]) for n in lines if n.startswith("vllm:prefix_cache_hits_total{")))


@BOTH
def test_how_an_answer_ends(served, dialect, wants, stream):
    """By itself, at a stop text, at the limit of tokens, and at the end of the context."""
    wants("one two three")
    assert read(served, dialect, stream).end == dialect.ends["own"]
    if "stop" in dialect.ends:
        said = read(served, dialect, stream, stop=" three")
        assert (said.text, said.end) == ("one two", dialect.ends["stop"])
    cut = read(served, dialect, stream, limit=3)
    assert (cut.end, cut.usage[2]) == (dialect.ends["limit"], 3)
    assert "one two three".startswith(cut.text)


@pytest.mark.e2e
def test_an_answer_ends_with_the_context(served, dialect, wants):
    """The prompt and the answer have all of its tokens, and the last one, which needs no place."""
    wants("x" * 5000)
    said = read(served, dialect, said=dialect.question("x" * 1200), limit=10**6)
    tokens = served.serving.model.engine.plan.context + 1
    assert (said.end, said.usage[0] + said.usage[2]) == (dialect.ends["context"], tokens)


@pytest.mark.e2e
def test_calls_can_be_required_and_forbidden(served, dialect, wants):
    """A call is made whatever the model wants, of the named tool, one at most; none leaves tools out of the prompt."""
    if not dialect.forces_calls:
        pytest.skip("this protocol has no choice of tools")
    prompts = wants("It is sunny.")
    for choice, names in (("required", {"weather", "tides"}), ("tides", {"tides"})):
        ((name, arguments),) = read(served, dialect, tools=TOOLS, choice=choice, one_call=True).calls
        assert name in names
        assert isinstance(arguments["city"], str)
    assert read(served, dialect, tools=TOOLS, choice="none").text == "It is sunny."
    assert "tools:" not in prompts[-1]
    wants(f"{CALL}\n{CALL}")
    assert len(read(served, dialect, tools=TOOLS, one_call=True).calls) == 1


@pytest.mark.e2e
@BOTH
def test_the_form_of_an_answer_is_enforced(served, dialect, wants, stream):
    """JSON of the schema, whatever the model wants."""
    wants("It is sunny.")
    said = read(served, dialect, stream, schema=CITY | {"additionalProperties": False})
    assert json.loads(said.text).keys() == {"city"}


def test_reasoning_can_be_turned_off(served, dialect, wants):
    """The chat template ends it before the answer."""
    prompts = wants("yes")
    read(served, dialect, thinking=False)
    read(served, dialect)
    assert prompts[0].endswith("<think>\n\n</think>\n\n")
    assert prompts[1].endswith("assistant\n")


@BOTH
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param({"limit": 1.5}, "got 1.5", id="field"),
        pytest.param({"tools": [TOOLS[0], TOOLS[0]]}, "rename 'weather'", id="request"),
        pytest.param({"schema": {"not": {}}}, "'not'", id="grammar", marks=pytest.mark.e2e),
        pytest.param({"said": "Oslo " * 2000}, "context", id="context"),
        pytest.param({"said": []}, None, id="empty"),
    ],
)
def test_a_refusal_comes_before_the_stream(served, dialect, stream, fields, words):
    """Status 400 with the protocol's error object, wherever it is decided; no request is left."""
    fields = dict(fields)
    said = fields.pop("said", None)
    if said == [] and dialect is DIALECTS["ollama"]:
        pytest.skip("a request without messages loads the model")
    said = dialect.question(said) if said else said
    response = post(served, dialect, said, stream, **fields)
    message, kind = dialect.error(response.json())
    assert (response.status_code, kind) == (400, dialect.kinds[400])
    assert (words or dialect.prompt) in message
    assert not served.serving.queue.jobs


def test_errors_of_every_status_are_in_the_protocols_words(served, dialect, monkeypatch):
    """A wrong key, a strange host, a path or method that is none, a long body, a full queue, a model that loads."""
    serving, body = served.serving, dialect.body(dialect.question("Oslo?"))

    def found(status: int, method: str = "POST", path: str = dialect.path, **more: object) -> None:
        response = served.client.request(method, path, json=body, **more)
        assert response.status_code == status
        assert dialect.error(response.json())[1] == dialect.kinds[status]

    found(401, headers={"x-api-key": "x"})
    found(403, headers={"host": "evil.example"})
    found(404, path=f"{dialect.path}/none")
    found(405, "PUT")
    with served.limited(body_bytes=10):
        found(413)
    monkeypatch.setattr(serving.queue, "limit", 0)
    found(429)
    monkeypatch.undo()
    monkeypatch.setattr(serving, "model", None)
    found(503)


@pytest.fixture
def slowed(served) -> Iterator[object]:
    """Has each layer take a while: `slowed.pause` seconds; `slowed.layers` counts them."""
    engine, served.pause, served.layers = served.serving.model.engine, 0.0, 0

    def note(layer: int, choice: object) -> None:
        served.layers += 1
        time.sleep(served.pause)

    engine.watch(note)
    yield served
    engine.watch(lambda layer, chosen: None)
    served.idle()


@pytest.mark.e2e
def test_a_stream_shows_that_it_lives_and_how_it_fails(slowed, dialect):
    """Signs of life come before the first token; a time limit ends the stream in an error, or is 504."""
    slowed.pause = 0.2
    with slowed.limited(ping_seconds=0.1, progress_seconds=0.05):
        assert dialect.ping in post(slowed, dialect, stream=True, limit=1).text
    with slowed.limited(answer_seconds=0.3):
        assert "time limit" in dialect.failed(post(slowed, dialect, stream=True).text)
        late = post(slowed, dialect)
    message, kind = dialect.error(late.json())
    assert (late.status_code, kind) == (504, dialect.kinds[504])
    assert "time limit" in message


def test_a_client_that_leaves_ends_its_request(slowed, dialect, wants):
    """Its place is free, and the answer is computed no further."""
    tokens = len(slowed.serving.model.tokenizer("one two three " * 90)["input_ids"])
    wants("one two three " * 90)
    slowed.idle()
    slowed.pause, computed = 0.002, slowed.layers
    body = dialect.body(dialect.question("Oslo?"), True)
    with slowed.client.stream("POST", dialect.path, json=body) as response:
        lines = (line for line in response.iter_lines() if line)
        assert len(list(islice(lines, 20))) == 20  # more than come before the first token
    slowed.idle()
    assert slowed.serving.model.status().running == 0
    assert slowed.layers - computed < tokens / 2
