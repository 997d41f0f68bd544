"""Chats that are streamed one after another while something else happens to a server."""

from __future__ import annotations

import http.client
import json
import threading
import time
from typing import Any, Self

from tools.reliability.started_server import PATIENCE

CHAT = "/v1/chat/completions"

MOST_SECONDS = 2.0
"""Most seconds to the first token of a chat."""

_PAUSE_SECONDS = 0.5
"""Time between two chats."""


class FirstTokens:
    """Streams chats on a thread, and measures the time to their first tokens.

    Args:
        host: the server's host.
        port: the server's port.

    Attributes:
        seconds: time to the first token of each chat.
        wrong: chats that failed or took too long.
    """

    def __init__(self, host: str, port: int) -> None:
        self._address, self._done = (host, port), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.seconds, self.wrong = list[float](), list[str]()

    def summary(self) -> dict[str, Any]:
        """The number of chats, and the median and the largest of their seconds."""
        times = sorted(self.seconds) or [0.0]
        return {
            "chats": len(self.seconds),
            "median": round(times[len(times) // 2], 3),
            "most": round(times[-1], 3),
        }

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(_PAUSE_SECONDS):
            try:
                seconds = self._first_token()
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.wrong.append(f"chat {len(self.seconds)}: {error}")
                continue
            self.seconds.append(seconds)
            if seconds > MOST_SECONDS:
                self.wrong.append(f"chat {len(self.seconds)}: a first token after {seconds:.2f} s")

    def _first_token(self) -> float:
        message = {"role": "user", "content": "What is the capital of Norway?"}
        body = json.dumps({"messages": [message], "max_tokens": 4, "stream": True}).encode()
        connection = http.client.HTTPConnection(*self._address, timeout=PATIENCE)
        try:
            start = time.monotonic()
            connection.request("POST", CHAT, body)
            response = connection.getresponse()
            for line in response:
                if b'"content":"' in line and b'"role"' not in line:
                    return time.monotonic() - start
            raise ValueError(f"expected a first token, got status {response.status} and none")
        finally:
            connection.close()
