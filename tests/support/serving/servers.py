"""Servers of a test, on threads of this process, with a client."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from counted_engine import CountedEngine

from edgemoe.api.model import Model
from edgemoe.engine.sampling import Sampling
from edgemoe.kv.prefix_cache import PrefixCache
from edgemoe.models.store_model import StoreModel
from edgemoe.models.tokenizer import load_tokenizer
from edgemoe.policy.settings import RunSettings
from edgemoe.serve.guard import Access
from edgemoe.serve.models import Models, models_of
from edgemoe.serve.server import Address, Server
from edgemoe.serve.slot import Source

GREEDY = Sampling(0, 1, 0, 1, 0, 6, frozenset({2}))


def a_model(
    store: Path,
    *,
    context: int = 128,
    parallel: int = 4,
    level: int = 8,
    keep: bool = False,
    kv: Path | None = None,
    **changes: Any,
) -> Model:
    """A model in memory, greedy by default; `changes` are settings, by default every expert is at one level.

    `kv` is the directory of a prefix cache.
    """
    settings = RunSettings(**{"levels": (level,), "exact": True, "readers": 4} | changes)
    opened = StoreModel.open(store)
    plan = opened.plan(vram_limit=None, settings=settings, context=context, parallel=parallel)
    disk = PrefixCache.open(kv, 1 << 30, opened.shape.kv) if kv else None
    return Model(
        CountedEngine(opened, plan, settings),
        load_tokenizer(store),
        GREEDY,
        keep=keep or kv is not None,
        disk=disk,
    )


class TestServer:
    """A server that runs.

    Attributes:
        port: the port that it listens at.
        models: its models.
        serving: the first model.
        client: a client for its address.
        lines: the lines that it has printed for people.
    """

    __test__ = False

    def __init__(self, models: Models, access: Access) -> None:
        listening = Address(port=0).listen()
        self.port, self.lines = listening.getsockname()[1], list[str]()
        self.models, self.serving = models, models.slots[0].serving
        self.server = Server(models, access, self.lines.append)
        self._thread = threading.Thread(target=self.server.serve_models, args=(listening,))
        self._thread.start()
        # Without verify=False each client reads all certificates of the machine.
        # The server closes connections that are idle for 5 s: the client leaves them before, not at the same moment.
        limits = httpx.Limits(keepalive_expiry=2)
        self.client = httpx.Client(
            base_url=self.url, timeout=60, trust_env=False, verify=False, limits=limits
        )
        self.wait(lambda: models.started)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait(self, until, seconds: float = 30) -> None:
        """Waits until a condition holds."""
        deadline = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < deadline, "the condition does not come to hold"
            time.sleep(0.005)

    def idle(self) -> None:
        """Waits until no request is under way, here and in the model."""
        self.wait(lambda: not self.serving.queue.jobs)
        self.wait(lambda: not self.serving.model._scheduler.active)

    @contextmanager
    def limited(self, **changes: float) -> Iterator[None]:
        """Other limits of a request inside the block."""
        intake = self.models.intake
        before = intake.limits
        intake.limits = replace(before, **changes)
        yield
        intake.limits = before

    def close(self) -> None:
        self.client.close()
        self.server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()


@contextmanager
def server_of(model: Model, access: Access | None = None, *, limit: int = 8) -> Iterator[TestServer]:
    """Serves a model inside the block, which ends it and closes the model."""
    source = Source(lambda opened: opened.enter_context(model))
    with running(models_of({"tiny": source}, limit), access) as server:
        yield server


@contextmanager
def running(models: Models, access: Access | None = None) -> Iterator[TestServer]:
    """Serves models inside the block, which ends it and closes them."""
    server = TestServer(models, access or Access())
    try:
        yield server
    finally:
        server.close()
