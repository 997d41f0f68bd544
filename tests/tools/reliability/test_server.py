"""The tools that send malformed requests and load, against a server of the tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tools.reliability import server as tool

EXTRA = ("starlette", "uvicorn", "pydantic", "prometheus_client", "httpx")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not all(map(find_spec, EXTRA)), reason="the extra serve is not installed"),
]


@pytest.fixture
def server(tiny_store) -> Iterator[object]:
    from servers import a_model, server_of

    with server_of(a_model(tiny_store, context=512)) as one:
        yield one


def test_malformed_requests_are_counted(server, capsys):
    """Every request has a status or a closed connection, and a sound server is no failure."""
    assert tool.main(["malformed", "--requests", "100", "--url", server.url]) == 0
    out = capsys.readouterr().out
    assert out.startswith("100 malformed requests: {")
    assert "'400': " in out
    assert out.endswith("no failure\n")


def test_a_500_and_an_unanswered_request_are_failures(server, capsys, monkeypatch):
    """A server whose submissions fail is found out, by the good request behind a hundred too."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(type(server.serving.model), "submit", broken)
    assert tool.main(["malformed", "--requests", "100", "--url", server.url]) == 1
    out = capsys.readouterr().out
    assert ": 500 for" in out
    assert "the good request after 99 was not answered" in out


def test_load_reports_times_and_ends(server, capsys):
    """Two clients for a second: answers, percentiles of both times, no failure."""
    command = ["load", "--clients", "2", "--seconds", "1", "--url", server.url]
    assert tool.main(command) == 0
    out = capsys.readouterr().out
    assert "TTFT p50" in out
    assert "ITL p50" in out
    assert "{'200': " in out
