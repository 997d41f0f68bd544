"""Large requests and many of them: bodies together, texts far beyond the context, and threads that read them."""

from __future__ import annotations

import socket
import threading

import pytest

from edgemoe.errors import ContextExceeded
from edgemoe.serve.request import fields
from edgemoe.serve.text_limit import TextLimit

pytestmark = pytest.mark.e2e

MESSAGES = [{"role": "user", "content": "fox"}]
COMPLETION = {"prompt": "fox", "max_tokens": 1}


def begin(server, size: int) -> socket.socket:
    """A connection that has sent `size` bytes of a body of 10,000."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10000\r\n\r\n"
    connection.sendall(head + b"x" * size)
    return connection


def test_bodies_together_are_bounded(server):
    """The largest unfinished body gives way to a whole one, and smaller unfinished ones stay."""
    with server.limited(bodies_bytes=3000), begin(server, 2000) as large, begin(server, 900) as small:
        server.wait(lambda: sum(each.size for each in server.models.intake.bodies._held) == 2900)
        assert server.client.post("/v1/completions", json=COMPLETION | {"user": "x" * 800}).status_code == 200
        assert large.recv(100).startswith(b"HTTP/1.1 503 ")
        assert [each.size for each in server.models.intake.bodies._held] == [900]
        small.sendall(b"x" * 9100)
        assert small.recv(100).startswith(b"HTTP/1.1 503 ")
    server.wait(lambda: not server.models.intake.bodies._held)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 50_000}]}),
        ("/v1/chat/completions", {"messages": MESSAGES, "chat_template_kwargs": {"a": ["x" * 50_000]}}),
        ("/v1/completions", {"prompt": ["fox", "x" * 50_000]}),
        ("/v1/completions", {"prompt": "fox", "suffix": "x" * 50_000}),
        (
            "/v1/messages/count_tokens",
            {"model": "x", "messages": [{"role": "user", "content": "x" * 50_000}]},
        ),
        ("/api/generate", {"model": "x", "prompt": "x" * 50_000, "raw": True}),
        ("/tokenize", {"prompt": "x" * 50_000}),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 50_000}]}),
        ("/detokenize", {"tokens": [5] * 129}),
    ],
)
def test_a_prompt_far_beyond_the_context_is_not_tokenized(server, monkeypatch, path, body):
    """400, while the tokenizer refuses to be called."""
    monkeypatch.setattr(server.serving.model, "tokenizer", None)
    refused = server.client.post(path, json=body)
    assert refused.status_code == 400
    assert "characters" in refused.text or "token ids" in refused.text


def test_the_longest_text_that_the_context_may_hold(server):
    """A text of the longest token alone reaches the bound, and has as many tokens as the context."""
    tokenizer = server.serving.model.tokenizer
    longest = max(tokenizer.get_vocab(), key=len)
    limit = TextLimit(tokenizer, 128)
    limit.require(longest * 128)
    limit.require([{"a": longest * 127}])
    limit.require_chat([{"role": "assistant", "content": longest}] * 128, {})
    with pytest.raises(ContextExceeded, match=f"at most {128 * len(longest)} characters"):
        limit.require(longest * 128, "x")


def test_tokenizing_has_a_queue(server, monkeypatch):
    """Where it is full, /tokenize, /detokenize and the count of Anthropic's tokens are 429, and answers are not."""
    monkeypatch.setattr(server.serving.tokenizing, "limit", 0)
    counted = {"model": "x", "messages": MESSAGES}
    bodies = {
        "/tokenize": {"prompt": "fox"},
        "/detokenize": {"tokens": [5]},
        "/v1/messages/count_tokens": counted,
    }
    for path, body in bodies.items():
        refused = server.client.post(path, json=body)
        assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
    assert server.client.post("/v1/completions", json=COMPLETION).status_code == 200
    assert server.serving.tokenizing.taken == 0


def test_bodies_are_read_on_threads_of_their_own(server, monkeypatch):
    """No body is parsed on the event loop."""
    parse, names = fields.parsed, []

    def note(body: bytes) -> object:
        names.append(threading.current_thread().name)
        return parse(body)

    monkeypatch.setattr(fields, "parsed", note)
    bodies = {
        "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
        "/v1/messages": {"model": "x", "messages": MESSAGES, "max_tokens": 1},
        "/v1/responses": {"model": "x", "input": "fox", "max_output_tokens": 1},
        "/api/chat": {"model": "x", "messages": MESSAGES, "stream": False, "options": {"num_predict": 1}},
        "/api/show": {"model": "tiny"},
        "/tokenize": {"prompt": "fox"},
        "/detokenize": {"tokens": [5]},
    }
    for path, body in bodies.items():
        assert server.client.post(path, json=body).status_code == 200, path
    assert len(names) == len(bodies)
    assert {name.rsplit("_", 1)[0] for name in names} <= {"edgemoe-bodies", "edgemoe-prompts"}


def test_codings_of_bodies(server):
    """A compressed body is 415; a byte order mark is left out; a body that is too long is 413 after all of it came."""
    path = "/v1/completions"
    compressed = server.client.post(path, content=b"x", headers={"content-encoding": "gzip"})
    assert (compressed.status_code, "gzip" in compressed.text) == (415, True)
    marked = b'\xef\xbb\xbf{"prompt": "fox", "max_tokens": 1}'
    assert server.client.post(path, content=marked).status_code == 200
    with server.limited(body_bytes=1000):
        assert server.client.post(path, content=b"x" * 20_000_000).status_code == 413


@pytest.mark.parametrize(
    "name", ["self", "prompt", "messages", "tokenizer", "template", "special", "tools", "a"]
)
def test_template_variables_have_any_name(server, name):
    """A name of one of the server's own arguments is a variable of the template like any other."""
    body = {"messages": MESSAGES, "chat_template_kwargs": {name: None}, "max_tokens": 1}
    for path in ("/tokenize", "/v1/chat/completions"):
        assert server.client.post(path, json=body).status_code == 200
