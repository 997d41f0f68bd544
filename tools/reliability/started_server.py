"""A server under test: the one at --url, or one that is started here."""

from __future__ import annotations

import argparse
import http.client
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from subprocess import Popen
from urllib.parse import urlsplit

import psutil

from edgemoe.console.sizes import parse_size
from tools.checkout import ROOT, child_environment
from tools.reliability.watch import entering, memory_cgroup

PATIENCE = 30.0
"""Seconds in which a request must have come to its end."""


@contextmanager
def server(arguments: argparse.Namespace) -> Iterator[tuple[str, int, psutil.Process | None]]:
    """Yields host, port and process of the server; starts one where no --url is given."""
    if arguments.url:
        parts = urlsplit(arguments.url)
        yield parts.hostname or "127.0.0.1", parts.port or 80, None
        return
    options = {
        "--context": arguments.context,
        "--port": arguments.port,
        "--vram-limit": arguments.vram_limit,
        "--parallel": arguments.parallel,
        "--queue": arguments.queue,
    }
    models = [("--model", model) for model in arguments.model]
    words = [str(word) for pair in (*models, *options.items()) for word in pair]
    command = [sys.executable, "-m", "edgemoe", "serve", *words]
    with ExitStack() as stack:
        if arguments.cgroup_limit:
            group = stack.enter_context(memory_cgroup(parse_size(arguments.cgroup_limit)))
            command = entering(group, command)
        process = stack.enter_context(Popen(command, cwd=ROOT, env=child_environment()))
        stack.callback(process.wait)
        stack.callback(process.terminate)
        _wait(arguments.port)
        yield "127.0.0.1", arguments.port, psutil.Process(process.pid)


def _wait(port: int) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            if post("127.0.0.1", port, "/health", None)[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise TimeoutError("expected a server that answers within 300 s, got none: see its messages")


def post(host: str, port: int, path: str, body: bytes | None) -> tuple[int, bytes]:
    """Sends one request, a GET without a body; returns status and body of the response."""
    connection = http.client.HTTPConnection(host, port, timeout=PATIENCE)
    try:
        connection.request("GET" if body is None else "POST", path, body)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
