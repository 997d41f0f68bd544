"""The peak that answers and metrics of a server show: no request adds to it beyond what the limits reserve."""

from __future__ import annotations

import re

import pytest

from edgemoe.serve.app import protocols_of, routes_of

pytestmark = pytest.mark.e2e

CHAT = [{"role": "user", "content": "a b"}]
BODIES = {
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 2},
    "/v1/completions": {"prompt": "a b", "max_tokens": 2},
    "/v1/responses": {"input": "a b", "max_output_tokens": 2},
    "/v1/messages": {"messages": CHAT, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": CHAT},
    "/api/chat": {"messages": CHAT, "stream": False},
    "/api/generate": {"prompt": "a b", "stream": False},
    "/api/show": {},
    "/tokenize": {"content": "a b"},
    "/detokenize": {"tokens": [3, 4]},
}
"""Bodies of the endpoints that answer; others get an empty one, which they refuse or ignore."""

COMPUTING = {
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
    "/api/generate",
}


def test_no_endpoint_adds_to_the_models_peak(server, monkeypatch):
    """Each endpoint of each protocol, while the process grows by 16 MB for each request.

    The peak stays within the limit, and as it is where nothing is computed.
    """
    serving, bodies, answered = server.serving, [], set()
    engine, intake = serving.model.engine, server.models.intake
    known = engine.plan.dense_bytes + engine.memory.expert_bytes
    read = type(intake.parsing).run

    async def greedy(self, work, *given, **more):
        bodies.append(b"x" * (16 << 20))
        return await read(self, work, *given, **more)

    def shown() -> float:
        return float(re.search(r"memory_peak_bytes\{.*\} (.*)", server.client.get("/metrics").text)[1])

    monkeypatch.setattr(type(intake.parsing), "run", greedy)
    routes = routes_of(server.models, protocols_of(server.models))
    for route in (each for each in routes if each.path != "/models/unload"):
        for method in route.methods - {"HEAD", "OPTIONS"}:
            before, body = shown(), {"model": "tiny"} | BODIES.get(route.path, {})
            answer = server.client.request(method, route.path, json=body)
            if answer.status_code == 200:
                answered.add(route.path)
            assert known <= shown() <= engine.plan.limit_bytes(None), route.path
            assert shown() == before or route.path in COMPUTING, route.path
    assert answered >= BODIES.keys()
    assert len(bodies) >= len(BODIES)


def test_an_answers_peak_is_of_the_limit_next_to_it(server):
    """An answer's peak has all blocks of experts, and is within the limit that it names."""
    body = server.client.post("/v1/completions", json={"prompt": "a b", "max_tokens": 2}).json()
    cost = body["edgemoe"]
    engine = server.serving.model.engine
    assert cost["limit_bytes"] == engine.plan.limit_bytes(None)
    assert engine.memory.expert_bytes < cost["peak_vram_bytes"] <= cost["limit_bytes"]
