"""A server of the tiny model; its tests need the extra `serve`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

EXTRA = ("starlette", "uvicorn", "pydantic", "prometheus_client", "llguidance", "httpx")
collect_ignore_glob = [] if all(map(find_spec, EXTRA)) else ["test_*.py", "*/test_*.py"]


@pytest.fixture(scope="module")
def server(tiny_store) -> Iterator[object]:
    """A server whose tests leave no request in it."""
    from servers import a_model, server_of

    with server_of(a_model(tiny_store)) as one:
        yield one
