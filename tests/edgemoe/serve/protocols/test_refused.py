"""What every protocol refuses by its name: adapters, embeddings, images, and what one model has no use for."""

from __future__ import annotations

import pytest

from edgemoe.serve.refused import REFUSED

QUESTION = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("path", REFUSED)
def test_an_endpoint_that_is_refused_says_why(server, path):
    """Status 501 in the error object of the path's protocol, for each method."""
    for method in ("GET", "POST", "DELETE"):
        found = server.client.request(method, path, json={"model": "x", "input": "y"})
        error = found.json()["error"]
        message = error if path.startswith("/api/") else error["message"]
        assert found.status_code == 501
        assert path in message
        assert REFUSED[path] in message


def test_embeddings_and_adapters_are_called_so():
    """The words by which people look for them."""
    for path in ("/v1/embeddings", "/api/embed", "/api/embeddings"):
        assert "embeddings" in REFUSED[path]
    for path in ("/v1/load_lora_adapter", "/lora-adapters"):
        assert "LoRA" in REFUSED[path]


def image(kind: str) -> list[dict]:
    return [{"role": "user", "content": [{"type": kind, kind: {"url": "data:"}}]}]


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("/v1/chat/completions", {"messages": image("image_url")}, "'image_url'"),
        ("/v1/messages", {"messages": image("image"), "max_tokens": 1}, "'image'"),
        ("/v1/responses", {"input": image("input_image")}, "'input_image'"),
        ("/api/chat", {"messages": [{**QUESTION[0], "images": ["aGk="]}]}, "images"),
        ("/api/generate", {"prompt": "x", "images": ["aGk="]}, "images"),
        *(
            (path, {**body, name: "x"}, f"no {name}")
            for name in ("lora", "lora_request", "adapter", "adapters")
            for path, body in (
                ("/v1/chat/completions", {"messages": QUESTION}),
                ("/v1/completions", {"prompt": "x"}),
                ("/v1/messages", {"messages": QUESTION, "max_tokens": 1}),
                ("/v1/responses", {"input": "x"}),
                ("/api/chat", {"messages": QUESTION}),
                ("/api/generate", {"prompt": "x"}),
            )
        ),
    ],
)
def test_images_and_adapters_are_refused_in_every_protocol(server, path, fields, words):
    """Status 400, with the name of what was sent."""
    found = server.client.post(path, json={"model": "x"} | fields)
    assert found.status_code == 400
    assert words in found.text
