"""Malformed requests as they are sent, and what is wrong with what comes of them."""

from __future__ import annotations

import argparse
import http.client
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean
from typing import Any

from edgemoe.console.sizes import format_size
from tools.reliability.first_tokens import CHAT, FirstTokens
from tools.reliability.malformed import GOOD, a_big_body, a_body, a_request, exchange
from tools.reliability.started_server import PATIENCE, post, server

REFUSED_SECONDS = 1.0
"""Most seconds of a refusal."""

SCHEMA_SECONDS = 12.0
"""Most seconds of the refusal of a form of answers: its limit on computing, on a busy machine."""

_FORMS = b'"json_schema"', b'"guided_choice"', b'"guided_regex"'
"""Texts that a body with a form of answers has."""

MOST_GROWTH = 1.05
"""Resident memory of the last sixth, as a multiple of the second one."""


@dataclass(frozen=True)
class Sent:
    """A malformed request, and what came of it.

    Args:
        path: the endpoint of a body; None: `raw` is all that goes through a socket.
        raw: the bytes that are sent.
        status: status code of the response; None: the connection was closed without one.
        seconds: time until the end of the response.
        error: why there is no end; "": there is one.
    """

    path: str | None
    raw: bytes
    status: int | None = None
    seconds: float = 0
    error: str = ""

    @property
    def failed(self) -> bool:
        """Whether the server failed, or did not end."""
        return bool(self.error) or (self.status is not None and self.status >= 500)

    @property
    def late(self) -> bool:
        """Whether it was refused after too long a time."""
        most = SCHEMA_SECONDS if any(name in self.raw for name in _FORMS) else REFUSED_SECONDS
        return self.failed or (self.status not in (None, 200) and self.seconds > most)

    def send(self, host: str, port: int) -> Sent:
        """Sends it; returns it with what came of it."""
        start, status, error = time.monotonic(), None, ""
        try:
            if self.path is None:
                status = exchange(port, self.raw, patience=PATIENCE)
            else:
                status = post(host, port, self.path, self.raw)[0]
        except (OSError, http.client.HTTPException) as failure:
            error = repr(failure)
        return replace(self, status=status, seconds=time.monotonic() - start, error=error)

    def __str__(self) -> str:
        """The line for people."""
        return f"{self.error or self.status} after {self.seconds:.2f} s for {self.path} {self.raw[:200]!r}"


def malformed_request(random: Random, number: int) -> Sent:
    """A malformed request: bytes on a socket, or for every other number a body."""
    if number % 2:
        return Sent(*(a_big_body(random) if number % 4 == 3 else a_body(random)))
    return Sent(None, a_request(random))


def sent_alone(request: Sent, host: str, port: int) -> Sent:
    """Sends a late request up to three times, until it is not late: other work may have held it up."""
    for _ in range(3):
        request = request.send(host, port)
        if not request.late:
            break
    return request


@dataclass(frozen=True)
class Report:
    """Measurements as JSON and as lines for people, and the errors."""

    figures: dict[str, Any]
    lines: list[str]
    wrong: list[str]


def malformed(options: argparse.Namespace) -> Report:
    """Sends malformed requests, and after each hundred a good one, next to chats; at the end the late ones again."""
    random, statuses, wrong = Random(options.seed), Counter[str](), list[str]()
    slowest, resident, late = 0.0, list[int](), list[tuple[int, Sent]]()
    with server(options) as (host, port, process):
        with FirstTokens(host, port) as chats:
            for number in range(options.requests):
                sent = malformed_request(random, number).send(host, port)
                statuses[str(sent.status)] += 1
                slowest = max(slowest, sent.seconds if sent.status != 200 else 0)
                if sent.failed:
                    wrong.append(f"request {number}: {sent}")
                elif sent.late:
                    late.append((number, sent))
                if number % 100 == 99:
                    if post(host, port, CHAT, json.dumps(GOOD[CHAT]).encode())[0] != 200:
                        wrong.append(f"the good request after {number} was not answered")
                    resident += [process.memory_info().rss] if process else []
        again = [(number, sent_alone(sent, host, port)) for number, sent in late]
        alone = [f"request {number}, also alone: {sent}" for number, sent in again if sent.late]
        files = process.num_fds() if process else None
    found = {"requests": options.requests, "statuses": dict(sorted(statuses.items())), "files": files}
    found |= {"slowest_refusal_s": round(slowest, 3), "late": len(late), "late_alone": len(alone)}
    found |= {"first_tokens_s": chats.summary(), "resident_bytes": resident}
    sizes = " and ".join(format_size(size) for size in resident[:: max(len(resident) - 1, 1)])
    lines = [
        f"{options.requests} malformed requests: {found['statuses']}; closed without a response: None",
        f"slowest refusal {slowest:.2f} s; {len(late)} came late, {len(alone)} of them also when sent again alone",
        f"first tokens of chats next to them: {found['first_tokens_s']}",
        f"resident {sizes} after the first hundred and the last, files {files}",
    ]
    return Report(found, lines, wrong + alone + chats.wrong + _grown(resident))


def _grown(resident: Sequence[int]) -> list[str]:
    """The errors in the resident bytes after each hundred requests; empty: none."""
    sixth = len(resident) // 6
    if not sixth:
        return []
    before, after = fmean(resident[sixth : 2 * sixth]), fmean(resident[-sixth:])
    return [f"resident memory grew by {after / before - 1:.1%}"] if after > MOST_GROWTH * before else []
