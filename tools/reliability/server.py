"""Sends malformed requests, or the load of several clients, to `edgemoe serve`, started here or elsewhere.

    python -m tools.reliability.server malformed [--requests 10000] [--url URL] [--json]
    python -m tools.reliability.server load [--clients 8] [--minutes 10] [--model A --model B] [--url URL] [--json]

malformed: a quarter of them bodies with wrong fields, cut, flipped or of other encodings, a quarter bodies with big
parts (deep, wide, long, many digits, schemas), half of them bytes on a socket that are no HTTP. A chat is streamed
meanwhile, again and again. A failure is a 500, a refusal after more than a second (a schema: after its limit of
computing), a request without an end within 30 s, a good request that is not answered after each hundred, a chat whose
first token takes more than 2 s, and resident memory that grows by 5 % between the second and the last sixth. Late
requests are sent again at the end, when nothing else is sent, and count as failures if they are late again.

load: each client asks questions of the demo's tasks, streamed, one after the other; the report has the times to the
first token and between tokens, and the slope of the server's resident memory after a first sixth. With several models
each question goes to one at random, so that a limit which holds one of them makes them change places; the report counts
the changes, and memory that grows by more than 1 % from the second sixth of the run to the last one is a failure.

Exit code 0: no failure. Without --url a server is started, by default of the demo model, under --vram-limit.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from statistics import fmean, linear_regression, quantiles
from typing import Any

from edgemoe.console.sizes import format_size
from tools.command_line import make_parser, positive
from tools.reliability.sent_requests import Report, malformed
from tools.reliability.started_server import post, server
from tools.training.tasks import training_tasks

CHAT = "/v1/chat/completions"

GROWTH = 0.01
"""Growth of the mean of resident memory that counts as flat, where models change places."""


@dataclass
class Load:
    """Times that clients have measured, in seconds.

    Args:
        models: the names of the models, of which each question goes to one.
    """

    models: Sequence[str] = ()
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    tokens: int = 0

    @property
    def wrong(self) -> list[str]:
        """The ends of requests that are failures."""
        return [f"{n} times {status}" for status, n in self.statuses.items() if status not in ("200", "429")]


def load(options: argparse.Namespace) -> Report:
    """Runs clients at the same time."""
    questions = [turn.question for task in islice(training_tasks(options.seed), 400) for turn in task.turns]
    with server(options) as (host, port, process):
        listed = json.loads(post(host, port, "/v1/models", None)[1])["data"]
        found, start = Load([model["id"] for model in listed]), time.monotonic()
        end = start + 60 * options.minutes
        threads = [
            threading.Thread(target=_client, args=(host, port, questions, Random(i), found, end))
            for i in range(options.clients)
        ]
        for thread in threads:
            thread.start()
        resident = list[tuple[float, int]]()
        while any(thread.is_alive() for thread in threads):
            if process:
                resident.append((time.monotonic() - start, process.memory_info().rss))
            time.sleep(options.minutes / 12)  # 720 samples
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - start
        loadings = _loadings(host, port)
    report = _report(found, options.clients, seconds, resident)
    if len(found.models) > 1:
        report.figures["loadings"] = loadings
        report.lines.append(f"loadings by model: {loadings}")
        report.wrong.extend(_growth([size for _, size in resident]))
    return report


def _loadings(host: str, port: int) -> dict[str, int]:
    """How often each model of a server has been loaded."""
    lines = post(host, port, "/metrics", None)[1].decode().splitlines()
    counts = [line for line in lines if line.startswith("edgemoe:model_loadings_total{")]
    return {line.split('"')[1]: int(float(line.split()[-1])) for line in counts}


def _growth(resident: Sequence[int]) -> list[str]:
    """The failure where resident bytes grew by more than GROWTH from the second to the last sixth; empty: none.

    Models differ in size: a median would depend on which model was loaded more often.
    """
    sixth = len(resident) // 6
    if not sixth:
        return []
    before, after = fmean(resident[sixth : 2 * sixth]), fmean(resident[-sixth:])
    grown = after / before - 1
    return [f"resident memory grew by {100 * grown:.1f} %"] if grown > GROWTH else []


def _report(load: Load, clients: int, seconds: float, resident: Sequence[tuple[float, int]]) -> Report:
    """The clients' measurements, and the slope of (seconds, resident bytes) after the first sixth."""
    report: dict[str, Any] = {
        "clients": clients,
        "seconds": round(seconds, 1),
        "statuses": dict(load.statuses),
        "tokens": load.tokens,
    }
    lines = [f"{clients} clients, {seconds:.0f} s: {dict(load.statuses)}, {load.tokens} tokens"]
    wrong = load.wrong
    for name, times in (("TTFT", load.first), ("ITL", load.between)):
        if len(times) < 2:
            wrong.append(f"{len(times)} times of {name}")
            continue
        cuts = quantiles(times, n=100)
        p50, p99 = 1000 * cuts[49], 1000 * cuts[98]
        report[f"{name.lower()}_ms"] = {"p50": round(p50, 2), "p99": round(p99, 2), "count": len(times)}
        lines.append(f"{name} p50 {p50:.1f} ms, p99 {p99:.1f} ms ({len(times)})")
    later = [(at / 60, size) for at, size in resident if at >= seconds / 6]
    if len(later) > 1:
        slope = round(linear_regression(*zip(*later, strict=True)).slope)
        (_, first), (_, last) = later[0], later[-1]
        report["resident_bytes"] = {"after_a_sixth": first, "end": last, "slope_per_minute": slope}
        report["resident_samples"] = [(round(at, 1), size) for at, size in resident]  # seconds, bytes
        per_minute = f"{'-' if slope < 0 else ''}{format_size(abs(slope))}"
        lines.append(
            f"resident {format_size(first)} after a sixth, {format_size(last)} at the end, {per_minute} per minute"
        )
    return Report(report, lines, wrong)


def _client(host: str, port: int, questions: list[str], random: Random, load: Load, end: float) -> None:
    """Asks one question after the other; a connection that fails or times out is counted."""
    while time.monotonic() < end:
        text = " ".join(random.choices(questions, k=random.choice((1, 1, 3))))
        message = {"role": "user", "content": text}
        body = {"messages": [message], "max_tokens": random.randint(8, 64), "stream": True}
        body |= {"model": random.choice(load.models)} if load.models else {}
        connection = http.client.HTTPConnection(host, port, timeout=600)
        try:
            _ask(connection, json.dumps(body).encode(), random, load)
        except (OSError, http.client.HTTPException) as error:
            load.statuses[type(error).__name__] += 1
            time.sleep(0.1)
        finally:
            connection.close()


def _ask(connection: http.client.HTTPConnection, body: bytes, random: Random, load: Load) -> None:
    """Sends one question and reads its answer; waits as long as a 429 says."""
    start = time.perf_counter()
    connection.request("POST", CHAT, body)
    response = connection.getresponse()
    if response.status == 200:
        _read(response, start, load)
    else:
        load.statuses[str(response.status)] += 1
        time.sleep(float(response.getheader("retry-after", "1")) * random.random())


def _read(response: http.client.HTTPResponse, start: float, load: Load) -> None:
    before, line = None, b""
    for line in response:
        if b'"content":"' in line and b'"role"' not in line:
            now = time.perf_counter()
            (load.first if before is None else load.between).append(now - (before or start))
            before, load.tokens = now, load.tokens + 1
        if b'"error"' in line:
            load.statuses["error in a stream"] += 1
            return
    load.statuses["200"] += 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one of the two."""
    parser = make_parser("tools.reliability.server", __doc__)
    parser.add_argument("what", choices=("malformed", "load"))
    parser.add_argument("--url", help="a server that runs; without it one is started")
    parser.add_argument("--port", type=positive, default=8791, help="of the server that is started")
    parser.add_argument("--model", action="append", help="several times for several models; by default demo")
    parser.add_argument("--vram-limit", default="45MB")
    parser.add_argument(
        "--cgroup-limit", help="memory of a cgroup for the server, page cache included; needs root"
    )
    parser.add_argument(
        "--context", type=positive, default=512, help="of the server that is started, in tokens"
    )
    parser.add_argument("--parallel", type=positive, default=4)
    parser.add_argument("--queue", type=positive, default=8)
    parser.add_argument("--requests", type=positive, default=10_000)
    parser.add_argument("--clients", type=positive, default=8)
    parser.add_argument("--minutes", type=float, default=10, help="of the load")
    parser.add_argument("--seed", type=positive, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(argv)
    given.model = given.model or ["demo"]
    report = malformed(given) if given.what == "malformed" else load(given)
    if given.json:
        print(json.dumps(report.figures | {"wrong": report.wrong}))
    else:
        print(*report.lines, *(report.wrong or ["no failure"]), sep="\n")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
