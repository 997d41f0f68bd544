"""The tools that send malformed requests and load, against a server of the tiny model."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from random import Random

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
    """A server whose submissions fail is noticed, also by the good request after a hundred others."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(type(server.serving.model), "submit", broken)
    assert tool.main(["malformed", "--requests", "100", "--url", server.url]) == 1
    out = capsys.readouterr().out
    assert ": 500 after" in out
    assert "the good request after 99 was not answered" in out


@pytest.mark.folders
def test_load_reports_times_and_ends(server, capsys):
    """Two clients for a second: answers, percentiles of both times, no failure; JSON has equal figures."""
    command = ["load", "--clients", "2", "--minutes", "0.02", "--url", server.url]
    assert tool.main(command) == 0
    out = capsys.readouterr().out
    assert "TTFT p50" in out
    assert "ITL p50" in out
    assert "{'200': " in out
    assert tool.main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["statuses"]["200"] > 0
    assert report["wrong"] == []
    for name in ("ttft_ms", "itl_ms"):
        assert 0 < report[name]["p50"] <= report[name]["p99"]


@pytest.mark.folders
def test_load_on_models_that_change_places(tiny_store, capsys):
    """Questions go to both models, each of which is loaded again and again; growth of memory is a failure."""
    from servers import a_model, running

    from edgemoe.serve.models import models_of
    from edgemoe.serve.slot import Checked, Memory, Source

    def source() -> Source:
        return Source(
            lambda opened: opened.enter_context(a_model(tiny_store, context=512)), lambda: Checked(Memory(6))
        )

    models = models_of({"a": source(), "b": source()}, 8, capacity=lambda: Memory(10))
    with running(models) as one:
        assert tool.main(["load", "--clients", "2", "--minutes", "0.02", "--url", one.url, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["statuses"].keys() == {"200"}
    assert min(report["loadings"][name] for name in "ab") >= 1
    assert tool._growth([100] * 12 + [102] * 6) == ["resident memory grew by 2.0 %"]
    assert tool._growth([90] * 3 + [1000] * 12 + [1009] * 3) == []
    assert tool._growth([1, 2]) == []


def test_a_connection_that_fails_is_a_failure():
    """Nothing listens on the port: each try is counted, and is no answer."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    load = tool.Load()
    tool._client("127.0.0.1", port, ["?"], Random(1), load, time.monotonic() + 0.05)
    assert load.statuses == {"ConnectionRefusedError": 1}
    assert load.wrong == ["1 times ConnectionRefusedError"]


def test_the_report_has_percentiles_and_the_slope_of_memory():
    """Times of 1 to 199 ms; 3 MB per minute after a first sixth in which memory fell; a failed request is named."""
    milliseconds = [n / 1000 for n in range(1, 200)]
    found = tool.Load(
        first=milliseconds, between=milliseconds, statuses=Counter({"200": 9, "429": 2, "500": 1})
    )
    resident = [
        (second, 90_000_000 - second * 1_000_000 if second < 20 else second * 50_000) for second in range(120)
    ]
    report = tool._report(found, 4, 120, resident)
    assert report.figures["ttft_ms"] == report.figures["itl_ms"] == {"p50": 100, "p99": 198, "count": 199}
    assert report.figures["resident_bytes"]["slope_per_minute"] == 3_000_000
    assert any("3 MB per minute" in line for line in report.lines)
    assert report.wrong == ["1 times 500"]
    nothing = tool._report(tool.Load(), 4, 120, [])
    assert nothing.wrong == ["0 times of TTFT", "0 times of ITL"]
