"""Malformed requests: never a 500, never a hang, and the next request is served."""

from __future__ import annotations

import json
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgemoe.machine.process import resident_bytes
from tools.reliability.malformed import GOOD, a_big_body, a_body, a_request, exchange

CHAT = "/v1/chat/completions"


@pytest.mark.e2e
def test_the_bodies_to_be_changed_are_right(server):
    """Each one is answered before it is changed."""
    for path, body in GOOD.items():
        assert server.client.post(path, json=body).status_code == 200


@pytest.mark.e2e
def test_two_hundred_malformed_bodies(server):
    """Wrong fields, cut and flipped bytes, other encodings, deep nesting: 200 or 400, as an error object."""
    random, statuses = Random(1), set()
    for _ in range(200):
        path, raw = a_body(random)
        response = server.client.post(path, content=raw)
        statuses.add(response.status_code)
        assert response.status_code == 200 or message_of(response), (path, raw[:300])
    assert statuses <= {200, 400}, statuses
    assert len(statuses) == 2
    server.idle()


def message_of(response) -> str:
    error = response.json()["error"]
    return error if isinstance(error, str) else error["message"]


@pytest.mark.e2e
def test_bodies_with_big_parts(server):
    """Deep, wide and long values, many digits, schemas: an answer or an error object, and no memory stays."""
    random, before = Random(3), 0
    for number in range(60):
        path, raw = a_big_body(random)
        response = server.client.post(path, content=raw)
        assert response.status_code < 500, (path, raw[:300])
        assert response.status_code == 200 or message_of(response), (path, raw[:300])
        before = before or (resident_bytes() if number == 20 else 0)
    assert resident_bytes() - before < 64 << 20
    server.idle()


@pytest.mark.e2e
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(
    st.dictionaries(
        st.sampled_from([*GOOD[CHAT], "prompt"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
            max_leaves=5,
        ),
    )
)
def test_any_json_value_in_any_field(server, fields):
    """Hypothesis's values over a good body: 200 or 400."""
    for path in (CHAT, "/v1/completions"):
        response = server.client.post(
            path, content=json.dumps(GOOD[path] | {"max_tokens": 1} | fields).encode()
        )
        assert response.status_code in (200, 400), response.text


@pytest.mark.e2e
def test_two_hundred_requests_that_are_no_http(server):
    """Raw bytes on sockets: an error of the client, or a closed connection, in time."""
    random = Random(2)
    for _ in range(200):
        raw = a_request(random)
        status = exchange(server.port, raw)
        assert status is None or status < 500, (status, raw[:300])
    server.idle()
    assert server.client.get("/health").status_code == 200
    assert server.client.post(CHAT, json=GOOD[CHAT]).status_code == 200


@pytest.mark.parametrize("raw", [b"\n" * 5000, b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20000 + b"\r\n"])
def test_long_headers(server, raw):
    """Empty lines and twenty thousand headers end in an error of the client or a closed connection."""
    status = exchange(server.port, raw)
    assert status is None or 400 <= status < 500
