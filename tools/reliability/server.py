"""Sends malformed requests, or the load of several clients, to `edgemoe serve`, started here or elsewhere.

    python -m tools.reliability.server malformed [--requests 10000] [--url URL]
    python -m tools.reliability.server load [--clients 8] [--seconds 600] [--url URL]

malformed: half of them bodies with wrong fields, cut, flipped or of other encodings, half of them bytes on a socket
that are no HTTP. A 500, a request without an end within 30 s, or a good request that is not answered behind them is a
failure. load: each client asks questions of the demo's tasks, streamed, one after the other; the report has the times
to the first token and between tokens, and the server's memory at the begin and the end. Exit code 0: no failure.
Without --url a server is started, by default of the demo model, under --vram-limit.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from statistics import quantiles
from subprocess import Popen
from urllib.parse import urlsplit

import psutil

from edgemoe.console.sizes import format_size, parse_size
from edgemoe.evaluate.tasks import training_tasks
from tools.checkout import ROOT, child_environment
from tools.command_line import make_parser, positive
from tools.reliability.malformed import GOOD, a_body, a_request, exchange
from tools.reliability.soak import memory_cgroup

CHAT = "/v1/chat/completions"

PATIENCE = 30.0
"""Seconds in which a request must have come to its end."""


@contextmanager
def server(given: argparse.Namespace) -> Iterator[tuple[str, int, psutil.Process | None]]:
    """Yields host, port and process of the server; starts one where no --url is given."""
    if given.url:
        parts = urlsplit(given.url)
        yield parts.hostname or "127.0.0.1", parts.port or 80, None
        return
    options = {
        "--model": given.model,
        "--context": 512,
        "--port": given.port,
        "--vram-limit": given.vram_limit,
        "--parallel": given.parallel,
        "--queue": given.queue,
    }
    words = [str(word) for pair in options.items() for word in pair]
    command = [sys.executable, "-m", "edgemoe", "serve", *words]
    with ExitStack() as stack:
        if given.cgroup_limit:
            group = stack.enter_context(memory_cgroup(parse_size(given.cgroup_limit)))
            command = ["/bin/sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$0" "$@"', *command]
        process = stack.enter_context(Popen(command, cwd=ROOT, env=child_environment()))
        stack.callback(process.wait)
        stack.callback(process.terminate)
        _wait(given.port)
        yield "127.0.0.1", given.port, psutil.Process(process.pid)


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


def malformed(given: argparse.Namespace) -> list[str]:
    """Sends malformed requests, and after each hundred a good one; returns what went wrong."""
    random, statuses, wrong = Random(given.seed), Counter[str](), list[str]()
    with server(given) as (host, port, process):
        for number in range(given.requests):
            status: int | None
            if number % 2:
                path, raw = a_body(random)
                status = post(host, port, path, raw)[0]
            else:
                raw = a_request(random)
                status = exchange(port, raw, patience=PATIENCE)
            statuses[str(status)] += 1
            if status is not None and status >= 500:
                wrong.append(f"request {number}: {status} for {raw[:200]!r}")
            if number % 100 == 99 and post(host, port, CHAT, json.dumps(GOOD[CHAT]).encode())[0] != 200:
                wrong.append(f"the good request after {number} was not answered")
        print(
            f"{given.requests} malformed requests: {dict(sorted(statuses.items()))}; closed without a response: None"
        )
        if process:
            print(f"resident {format_size(process.memory_info().rss)}, files {process.num_fds()}")
    return wrong


@dataclass
class Load:
    """What clients have measured, in seconds."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    tokens: int = 0


def load(given: argparse.Namespace) -> list[str]:
    """Runs clients beside each other for some time; returns what went wrong."""
    found, end = Load(), time.monotonic() + given.seconds
    questions = [turn.question for task in islice(training_tasks(given.seed), 400) for turn in task.turns]
    with server(given) as (host, port, process):
        threads = [
            threading.Thread(target=_client, args=(host, port, questions, Random(i), found, end))
            for i in range(given.clients)
        ]
        for thread in threads:
            thread.start()
        time.sleep(min(given.seconds / 6, 60))
        early = process.memory_info().rss if process else 0
        for thread in threads:
            thread.join()
        late = process.memory_info().rss if process else 0
        print(f"{given.clients} clients, {given.seconds} s: {dict(found.statuses)}, {found.tokens} tokens")
        for name, times in (("TTFT", found.first), ("ITL", found.between)):
            if len(times) < 2:
                return [f"{len(times)} times of {name}"]
            cuts = quantiles(times, n=100)
            print(f"{name} p50 {1000 * cuts[49]:.1f} ms, p99 {1000 * cuts[98]:.1f} ms ({len(times)})")
        if process:
            print(f"resident {format_size(early)} after a sixth, {format_size(late)} at the end")
    return [f"{n} times {status}" for status, n in found.statuses.items() if status not in ("200", "429")]


def _client(host: str, port: int, questions: list[str], random: Random, found: Load, end: float) -> None:
    """Asks one question after the other; waits as long as a 429 says."""
    while time.monotonic() < end:
        text = " ".join(random.choices(questions, k=random.choice((1, 1, 3))))
        message = {"role": "user", "content": text}
        body = {"messages": [message], "max_tokens": random.randint(8, 64), "stream": True}
        connection = http.client.HTTPConnection(host, port, timeout=600)
        start = time.perf_counter()
        connection.request("POST", CHAT, json.dumps(body).encode())
        response = connection.getresponse()
        if response.status == 200:
            _read(response, start, found)
        else:
            found.statuses[str(response.status)] += 1
            time.sleep(float(response.getheader("retry-after", "1")) * random.random())
        connection.close()


def _read(response: http.client.HTTPResponse, start: float, found: Load) -> None:
    before, line = None, b""
    for line in response:
        if b'"content":"' in line and b'"role"' not in line:
            now = time.perf_counter()
            (found.first if before is None else found.between).append(now - (before or start))
            before, found.tokens = now, found.tokens + 1
        if b'"error"' in line:
            found.statuses["error in a stream"] += 1
            return
    found.statuses["200"] += 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one of the two."""
    parser = make_parser("tools.reliability.server", __doc__)
    parser.add_argument("what", choices=("malformed", "load"))
    parser.add_argument("--url", help="a server that runs; without it one is started")
    parser.add_argument("--port", type=positive, default=8791, help="of the server that is started")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--vram-limit", default="45MB")
    parser.add_argument(
        "--cgroup-limit", help="memory of a cgroup for the server, page cache included; needs root"
    )
    parser.add_argument("--parallel", type=positive, default=4)
    parser.add_argument("--queue", type=positive, default=8)
    parser.add_argument("--requests", type=positive, default=10_000)
    parser.add_argument("--clients", type=positive, default=8)
    parser.add_argument("--seconds", type=positive, default=600)
    parser.add_argument("--seed", type=positive, default=1)
    given = parser.parse_args(argv)
    wrong = malformed(given) if given.what == "malformed" else load(given)
    print(*(wrong or ["no failure"]), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
