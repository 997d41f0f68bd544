"""The endpoints that are refused by name: adapters, embeddings, pictures, and what one model has no use for."""

from __future__ import annotations

import pytest

from edgemoe.serve.refused import REFUSED


@pytest.mark.e2e
def test_an_endpoint_that_is_refused_says_why(server):
    """Status 501 in the error object of the path's protocol, for each method."""
    for path, why in REFUSED.items():
        for method in ("GET", "POST", "DELETE"):
            found = server.client.request(method, path, json={"model": "x", "input": "y"})
            error = found.json()["error"]
            message = error if path.startswith("/api/") else error["message"]
            assert found.status_code == 501
            assert path in message
            assert why in message


def test_embeddings_and_adapters_are_called_so():
    """The words by which people look for them."""
    for path in ("/v1/embeddings", "/api/embed", "/api/embeddings"):
        assert "embeddings" in REFUSED[path]
    for path in ("/v1/load_lora_adapter", "/lora-adapters"):
        assert "LoRA" in REFUSED[path]
