"""Attacks `edgemoe serve` by single requests and by connections, and prints what each costs.

    python -m tools.reliability.attacks [--only TEXT] [--json]

A server of the demo model is started for all attacks. While one runs, GET /health is sent ten times a second; after it
a chat must be answered. Each row has the status of the attack, its seconds, the slowest /health, and how much resident
memory had grown at its peak and at its end. The last row is SIGTERM with clients that hold connections. Exit code 0: no
500, each /health within a second, and an end within 5 s.
"""

from __future__ import annotations

import argparse
import json
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial

import psutil

from edgemoe.console.sizes import format_size
from tools.command_line import make_parser, positive
from tools.reliability.malformed import GOOD
from tools.reliability.started_server import post, server

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "fox"}
MILLION = 1_000_000
HEAD = "POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"

_PATTERNS = [{"type": "string", "pattern": f".*a.{{{10 * i}}}b.*"} for i in range(1, 40)]
ENDLESS = {"name": "x", "schema": {"allOf": _PATTERNS}}

REQUESTS: dict[str, tuple[str, Callable[[], object]]] = {
    "completion: a million wrong prompts": ("/v1/completions", lambda: {"prompt": ["a", *[1] * MILLION]}),
    "chat: a million wrong messages": (CHAT, lambda: {"messages": [1] * MILLION}),
    "responses: a million wrong items": ("/v1/responses", lambda: {"model": "x", "input": [1] * MILLION}),
    "messages: a million wrong turns": (
        "/v1/messages",
        lambda: {"model": "x", "max_tokens": 1, "messages": [1] * MILLION},
    ),
    "messages: a million wrong system parts": (
        "/v1/messages",
        lambda: {"model": "x", "max_tokens": 1, "messages": [USER], "system": [1] * MILLION},
    ),
    "messages: 300,000 unknown fields": ("/v1/messages", lambda: {str(i): 1 for i in range(300_000)}),
    "ollama: 8,000 messages with unknown fields": (
        "/api/chat",
        lambda: {"model": "x", "messages": [USER | {"a": 1}] * 8_000},
    ),
    "detokenize: a million texts": ("/detokenize", lambda: {"tokens": ["a"] * MILLION}),
    "detokenize: 260,000 ids": ("/detokenize", lambda: {"tokens": [5] * 260_000}),
    "tokenize: 8 MB": ("/tokenize", lambda: {"prompt": "word " * 1_600_000}),
    "chat: 8 MB": (CHAT, lambda: {"messages": [USER | {"content": "word " * 1_600_000}]}),
    "chat: 8 MB of escapes": (CHAT, lambda: {"messages": [USER | {"content": "\n" * 4_000_000}]}),
    "completion: 20 MB": ("/v1/completions", lambda: {"prompt": "x" * 20_000_000}),
    "chat: 8,000 messages": (CHAT, lambda: {"messages": [USER] * 8_000}),
    "chat: a stop string of 1 MB": (CHAT, lambda: {"messages": [USER], "stop": "x" * MILLION}),
    "ollama: a stop string of 1 MB": (
        "/api/generate",
        lambda: {"model": "x", "prompt": "fox", "options": {"stop": "x" * MILLION}},
    ),
    "chat: a model name of 1 MB": (CHAT, lambda: {"messages": [USER], "model": "x" * MILLION}),
    "chat: a seed of 4,000 digits": (CHAT, lambda: {"messages": [USER], "seed": 10**4000}),
    "chat: a schema that compiles for minutes": (
        CHAT,
        lambda: {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": ENDLESS}},
    ),
}
"""Name -> path, and what makes the body."""


@dataclass
class Row:
    """One attack: its status, and what it cost."""

    name: str
    status: str = ""
    seconds: float = 0.0
    health_seconds: float = 0.0
    grown_bytes: int = 0
    kept_bytes: int = 0

    def line(self) -> str:
        """The row for people."""
        grown, kept = (format_size(max(size, 0)) for size in (self.grown_bytes, self.kept_bytes))
        return f"| {self.name} | {self.status} | {self.seconds:.2f} | {self.health_seconds:.2f} | {grown} | {kept} |"


@contextmanager
def measured(row: Row, host: str, port: int, process: psutil.Process) -> Iterator[None]:
    """Fills a row with what the block costs the server, and asks a chat after it."""
    done, before = threading.Event(), process.memory_info().rss

    def watch() -> None:
        while not done.wait(0.1):
            start = time.monotonic()
            status, _ = post(host, port, "/health", None)
            seconds = time.monotonic() - start if status == 200 else 999.0
            row.health_seconds = max(row.health_seconds, seconds)
            row.grown_bytes = max(row.grown_bytes, process.memory_info().rss - before)

    watching, start = threading.Thread(target=watch), time.monotonic()
    watching.start()
    try:
        yield
        row.seconds = time.monotonic() - start
        time.sleep(0.2)
    finally:
        done.set()
        watching.join()
    status, _ = post(host, port, CHAT, json.dumps(GOOD[CHAT]).encode())
    row.status += "" if status == 200 else f", then a chat: {status}"
    row.kept_bytes = process.memory_info().rss - before


def connected(stack: ExitStack, host: str, port: int, message: bytes) -> socket.socket:
    """A connection that has sent bytes, as far as the server takes them at once."""
    one = stack.enter_context(socket.create_connection((host, port), timeout=5))
    one.settimeout(0.2)
    try:
        one.sendall(message)
    except OSError:
        return one
    return one


def unfinished(host: str, port: int, process: psutil.Process) -> str:
    """A hundred bodies of 8 MB, each without its last byte."""
    raw = (HEAD % ("/v1/completions", 8_000_000)).encode() + b"x" * 7_999_999
    with ExitStack() as stack:
        for _ in range(100):
            connected(stack, host, port, raw)
        time.sleep(1)
    return "held"


def idle(host: str, port: int, process: psutil.Process) -> str:
    """520 connections without a request."""
    with ExitStack() as stack:
        for _ in range(520):
            connected(stack, host, port, b"")
        time.sleep(1)
    return "held"


def without_descriptors(host: str, port: int, process: psutil.Process) -> str:
    """100 connections to a process that may open five files more."""
    soft, hard = process.rlimit(psutil.RLIMIT_NOFILE)
    process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + 5, hard))
    try:
        with ExitStack() as stack:
            for _ in range(100):
                connected(stack, host, port, b"")
            time.sleep(2)
    finally:
        process.rlimit(psutil.RLIMIT_NOFILE, (soft, hard))
    return "held"


def silent(host: str, port: int, process: psutil.Process) -> str:
    """Twenty clients that ask for the page a thousand times, and read nothing."""
    with ExitStack() as stack:
        for _ in range(20):
            connected(stack, host, port, b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 1000)
        time.sleep(2)
    return "held"


CONNECTIONS = {
    "100 unfinished bodies of 8 MB": unfinished,
    "520 idle connections": idle,
    "no file descriptor left": without_descriptors,
    "20 clients that read nothing": silent,
}


def send(path: str, make: Callable[[], object], host: str, port: int, process: psutil.Process) -> str:
    """Sends one request, and returns its status."""
    return str(post(host, port, path, _long(make()))[0])


def _long(value: object) -> bytes:
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(value).encode()
    finally:
        sys.set_int_max_str_digits(before)


def ended(host: str, port: int, process: psutil.Process) -> Row:
    """SIGTERM, while clients hold connections and read nothing of long answers."""
    long = {"prompt": "fox", "max_tokens": 400, "n": 8, "stream": True, "logit_bias": {"70": 1000}}
    body = json.dumps(long).encode()
    with ExitStack() as stack:
        connected(stack, host, port, (HEAD % ("/v1/completions", len(body))).encode() + body)
        connected(stack, host, port, b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 1000)
        connected(stack, host, port, (HEAD % (CHAT, 1000)).encode() + b"{")
        start = time.monotonic()
        process.terminate()
        psutil.wait_procs([process], timeout=30)
        return Row("SIGTERM", "ended", time.monotonic() - start)


def run(options: argparse.Namespace) -> list[Row]:
    """Attacks a server that is started here."""
    attacks = {name: partial(send, *attack) for name, attack in REQUESTS.items()} | CONNECTIONS
    rows = list[Row]()
    with server(options) as (host, port, process):
        assert process is not None
        post(host, port, CHAT, json.dumps(GOOD[CHAT]).encode())
        for name, attack in attacks.items():
            if options.only in name:
                rows.append(Row(name))
                with measured(rows[-1], host, port, process):
                    rows[-1].status = attack(host, port, process)
        return [*rows, ended(host, port, process)]


def wrong(rows: Sequence[Row]) -> list[str]:
    """The errors in the rows."""
    found = [
        f"{row.name}: {row.status}" for row in rows if row.status.startswith("50") or "then" in row.status
    ]
    found += [
        f"{row.name}: /health took {row.health_seconds:.2f} s" for row in rows if row.health_seconds > 1
    ]
    return found + ([f"SIGTERM took {rows[-1].seconds:.1f} s"] if rows[-1].seconds > 5 else [])


def main(argv: Sequence[str] | None = None) -> int:
    """Attacks a server, and prints a table."""
    parser = make_parser("tools.reliability.attacks", __doc__)
    parser.add_argument("--only", default="", help="attacks whose name has this text")
    parser.add_argument("--port", type=positive, default=8792)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    defaults = {"url": None, "model": "demo", "vram_limit": "45MB", "context": 512, "parallel": 2, "queue": 8}
    parser.set_defaults(cgroup_limit=None, **defaults)
    given = parser.parse_args(argv)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    rows = run(given)
    failures = wrong(rows)
    if given.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "wrong": failures}))
    else:
        print(
            "| attack | status | seconds | slowest /health, s | memory at most | memory kept |",
            "|---|---|---|---|---|---|",
            sep="\n",
        )
        print(*(row.line() for row in rows), *(failures or ["no failure"]), sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
