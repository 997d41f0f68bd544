"""Texts of errors that clients get: about their request, never about files of the server."""

from __future__ import annotations

import pytest

from edgemoe import errors
from edgemoe.api.model import Model
from edgemoe.api.prompt import Prompts
from edgemoe.serve.errors import ApiError

PATH = "/models/one/config.json"
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
FORMED = CHAT | {"response_format": {"type": "json_object"}}


def kinds(of: type[errors.EdgemoeError]) -> list[type[errors.EdgemoeError]]:
    return [of, *(kind for below in of.__subclasses__() for kind in kinds(below))]


def test_texts_of_other_errors_than_those_of_requests_stay_in_the_log(caplog):
    """Every kind of error that can name a file becomes a text without it, below 500 unless the store is damaged."""
    of_requests = {errors.UserError, errors.ContextExceeded, errors.TemplateFailed}
    for kind in {*kinds(errors.EdgemoeError)} - of_requests:
        caplog.clear()
        more = {"minimum": 1} if kind is errors.DoesNotFit else {}
        found = ApiError.of(kind(f"values in {PATH}", "others", "look", **more))
        assert PATH not in str(found)
        assert PATH in caplog.text
        assert (found.status == 500) == issubclass(kind, errors.DamagedData)


def refuse(*_: object, **__: object) -> object:
    raise errors.ModelRefused(f"a tokenizer in {PATH} that works", "another one", f"look at {PATH}")


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("part", "path", "body"),
    [
        ((Model, "submit"), "/v1/chat/completions", CHAT | {"stream": True}),
        ((Model, "grammars"), "/v1/chat/completions", FORMED),
        (("edgemoe.api.chat_prompt.encode_chat",), "/v1/messages", CHAT | {"model": "x"}),
        ((Prompts, "encode"), "/tokenize", {"messages": CHAT["messages"]}),
        (("edgemoe.serve.ollama.models.contents_of",), "/api/show", {"model": "tiny"}),
    ],
)
def test_no_path_reaches_a_client(server, monkeypatch, caplog, part, path, body):
    """Whatever part of a model refuses a request: a 400 without a path, which the log has."""
    monkeypatch.setattr(*part, refuse)
    response = server.client.post(path, json=body)
    assert response.status_code == 400, response.text
    assert "the server's log has the rest" in response.text
    assert "/models/" not in response.text
    assert PATH in caplog.text
