"""Clients in turn: one client's requests keep no other one waiting for all of them, and no other one out."""

from __future__ import annotations

import threading
from collections import defaultdict
from types import SimpleNamespace

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from servers import a_model, server_of

from edgemoe.engine.arrivals import Arrivals
from edgemoe.serve.errors import ApiError
from edgemoe.serve.job import Queue

BODY = {"prompt": "fox " * 10, "max_tokens": 4, "logit_bias": {"70": 1000}}
"""Four tokens 'f': the bias lets no answer end before its limit."""


def take(arrivals: Arrivals[SimpleNamespace], count: int) -> list[str]:
    return [arrivals.take().name for _ in range(count)]


def send(arrivals: Arrivals[SimpleNamespace], *names: str) -> None:
    """Adds requests that are named by their client's letter and a number."""
    for name in names:
        arrivals.add(SimpleNamespace(client=name[0], name=name))


def test_a_flood_waits_for_the_others_between_its_own():
    """By hand: a's second request comes after b's first, a client that comes later after the waiting ones."""
    arrivals = Arrivals()
    send(arrivals, "a1", "a2", "a3", "a4", "b1")
    assert take(arrivals, 2) == ["a1", "b1"]
    send(arrivals, "c1", "b2", "c2")
    assert take(arrivals, 6) == ["a2", "c1", "b2", "a3", "c2", "a4"]
    assert (len(arrivals), arrivals.first()) == (0, None)


@given(st.lists(st.one_of(st.sampled_from("abc"), st.none(), st.integers(0, 9)), max_size=40))
def test_between_two_requests_of_a_client_comes_one_of_each_other_at_most(moves):
    """Random arrivals, turns (None) and requests that are given up: no client passes another one twice."""
    arrivals, waiting, numbers = Arrivals(), list[SimpleNamespace](), defaultdict[str, int](int)
    passed = defaultdict[str, list[str]](list)  # client that waits -> the clients that went before it
    for move in moves:
        if isinstance(move, str):
            request = SimpleNamespace(client=move, number=numbers[move])
            numbers[move] += 1
            arrivals.add(request)
            waiting.append(request)
        elif move is None and waiting:
            expected, request = arrivals.first(), arrivals.take()
            assert expected is request
            waiting.remove(request)
            assert all(other.number > request.number for other in waiting if other.client == request.client)
            for client in {other.client for other in waiting} - {request.client}:
                passed[client].append(request.client)
                assert len(passed[client]) == len(set(passed[client]))
            passed[request.client].clear()
        elif waiting and move is not None:
            left = waiting.pop(move % len(waiting))
            arrivals.remove(left)
            arrivals.remove(left)
        still = {other.client for other in waiting}
        for client in numbers.keys() - still:
            passed[client].clear()
        assert len(arrivals) == len(waiting)
        assert {id(request) for request in arrivals} == {id(request) for request in waiting}


def test_a_client_without_requests_gets_a_place_in_a_full_queue():
    """The flood's next one is refused; other clients get one place each, as many as the queue has."""
    queue = Queue(2)
    queue.enter("a")
    queue.enter("a")
    with pytest.raises(ApiError, match="2 requests that run or wait, of 2 places"):
        queue.enter("a")
    queue.enter("b")
    with pytest.raises(ApiError):
        queue.enter("b")
    queue.enter("c")
    with pytest.raises(ApiError):
        queue.enter("d")
    queue.leave("c")
    queue.enter("d")


@pytest.mark.e2e
def test_one_request_beside_a_flood_is_answered_second(tiny_store):
    """Over HTTP, from another address: after the request that runs, before the five others that came earlier."""
    with server_of(a_model(tiny_store, parallel=1), limit=6) as server:
        gate, ended, model = threading.Event(), list[str](), server.serving.model
        model.engine.watch(lambda layer, chosen: gate.wait(30))

        def send(address: str) -> None:
            transport = httpx.HTTPTransport(local_address=address)
            with httpx.Client(base_url=server.url, transport=transport, timeout=60) as client:
                assert client.post("/v1/completions", json=BODY).status_code == 200
            ended.append(address)

        flood, other = "127.0.0.1", ".".join(["127", "0", "0", "2"])
        threads = [threading.Thread(target=send, args=(flood,)) for _ in range(6)]
        for thread in threads:
            thread.start()
        server.wait(lambda: model.status().waiting == 5)
        threads.append(threading.Thread(target=send, args=(other,)))
        threads[-1].start()
        server.wait(lambda: model.status().waiting == 6)
        gate.set()
        for thread in threads:
            thread.join(60)
        assert sorted(ended) == [flood] * 6 + [other]
        assert ended.index(other) <= 2  # its thread may note its end a little later than the next one's
