"""An engine that takes long: clients that leave, streams that wait, a queue that is full, and a disk that fails."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import httpx
import pytest
from servers import a_model, server_of

from edgemoe.engine.engine import Engine
from edgemoe.errors import ReadFailed
from edgemoe.kv.step import Step
from edgemoe.serve.limits import Limits
from edgemoe.storage.store.reader import RecordReader

LONG = "fox " * 25
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
BIAS = {"70": 1000}
"""A bias with which an answer never ends before its limit."""


@pytest.fixture
def slow(tiny_store) -> Iterator[object]:
    """A server of two sequences, one more in the queue, whose layers sleep as long as `pause` says."""
    model = a_model(tiny_store, parallel=2)
    model._scheduler.loop._chunk = 4
    with server_of(model, limit=3) as server:
        server.pause = 0.0
        model.engine.watch(lambda layer, chosen: time.sleep(server.pause))
        yield server


def body(stream: bool, **fields: object) -> dict[str, object]:
    return {"prompt": LONG, "max_tokens": 60, "stream": stream, "logit_bias": BIAS} | fields


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def gone_after(server, seconds: float, **fields: object) -> None:
    """Sends a request, and leaves after some seconds."""
    deadline = time.monotonic() + seconds
    with (
        suppress(httpx.ReadTimeout),
        server.client.stream("POST", COMPLETE, json=body(**fields), timeout=seconds) as response,
    ):
        for _ in response.iter_raw():
            if time.monotonic() > deadline:
                break
    assert time.monotonic() > deadline, "the answer came before the client left"


@pytest.mark.e2e
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("state", ["prompt", "decoding"])
def test_a_client_that_leaves_ends_its_request(slow, stream, state):
    """Within two seconds, in its prompt and in its answer, with nothing left of its KV; the next one is answered."""
    used = slow.serving.model.engine.budget.used_bytes
    slow.pause = 0.2 if state == "prompt" else 0.0
    model, reached = slow.serving.model, []

    def note(layer: int, choice: object) -> None:
        states = [future.progress.state for job in slow.serving.queue.jobs for future in job.futures]
        reached.extend(states)
        time.sleep(0.2 if state == "prompt" or states == ["decoding"] else 0)

    model.engine.watch(note)
    gone_after(slow, 0.7, stream=stream)
    left = time.monotonic()
    slow.idle()
    assert time.monotonic() - left < 2
    assert state in reached
    model.engine.watch(lambda layer, chosen: None)
    assert slow.client.post(COMPLETE, json=body(stream=False, max_tokens=2)).status_code == 200
    slow.wait(lambda: model.engine.budget.used_bytes == used)
    assert (
        'edgemoe:request_failures_total{model_name="tiny",status="499"} 1' in slow.client.get("/metrics").text
    )


@pytest.mark.e2e
def test_a_client_that_leaves_the_queue(slow):
    """A request that waits for its KV is gone with its client, before the others end."""
    slow.pause = 0.1
    others = [in_thread(lambda: gone_after(slow, 1.5, stream=False)) for _ in range(2)]
    slow.wait(lambda: slow.serving.model.status().running == 2 and len(slow.serving.queue.jobs) == 2)
    gone_after(slow, 0.3, stream=False)
    slow.wait(lambda: len(slow.serving.queue.jobs) == 2, 2)
    for other in others:
        other.join()
    slow.idle()


@pytest.mark.e2e
def test_headers_role_and_comments_come_before_the_prompt_has_run(slow):
    """A stream begins at once; comments come by the clock; progress grows to the whole prompt."""
    slow.pause = 0.03
    slow.models.intake.limits = Limits(ping_seconds=0.1, progress_seconds=0.05)
    messages = [{"role": "user", "content": LONG}]
    fields = {"messages": messages, "max_tokens": 2, "stream": True, "logit_bias": BIAS}
    for progress in (False, True):
        start, times = time.monotonic(), []
        with slow.client.stream("POST", CHAT, json=fields | {"return_progress": progress}) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            parts = []
            for line in response.iter_lines():
                times.append(time.monotonic() - start)
                parts.append(line)
        chunks = [json.loads(p[6:]) for p in parts if p.startswith("data: {")]
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        assert times[0] < times[-1] / 2
        done = [c["prompt_progress"] for c in chunks if "prompt_progress" in c]
        if progress:
            assert len(done) > 3
            assert [each["processed"] for each in done] == sorted({each["processed"] for each in done})
            assert {each["total"] for each in done} == {len(slow.serving.model.encode(messages))}
        else:
            assert done == []
            assert parts.count(": ping") > 3


@pytest.mark.e2e
def test_a_full_queue_is_429_with_advice(slow):
    """The fourth of two running and one waiting is refused, with Retry-After; health and models answer meanwhile."""
    slow.pause = 0.1
    others = [in_thread(lambda i=i: gone_after(slow, 1.5, stream=bool(i))) for i in range(3)]
    slow.wait(lambda: len(slow.serving.queue.jobs) == 3)
    refused = slow.client.post(COMPLETE, json=body(False))
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert int(refused.headers["retry-after"]) >= 1
    start = time.monotonic()
    assert slow.client.get("/v1/models").status_code == slow.client.get("/health").status_code == 200
    assert time.monotonic() - start < 1
    for other in others:
        other.join()
    slow.idle()
    slow.pause = 0
    assert slow.client.post(COMPLETE, json=body(False, max_tokens=1)).status_code == 200


@pytest.mark.e2e
def test_a_request_has_a_time_limit(slow):
    """504, or an error at the end of the stream; its KV is free, and clients of OpenAI do not send it again."""
    slow.models.intake.limits, slow.pause = Limits(answer_seconds=0.5), 0.1
    whole = slow.client.post(COMPLETE, json=body(False))
    assert (whole.status_code, whole.json()["error"]["code"]) == (504, "timeout")
    assert whole.headers["x-should-retry"] == "false"
    streamed = slow.client.post(COMPLETE, json=body(True))
    assert streamed.status_code == 200
    assert json.loads(streamed.text.strip().split("\n\n")[-1][6:])["error"]["code"] == "timeout"
    slow.wait(lambda: slow.serving.model.status().memory["kv"] == 0)


def fail(*_: object) -> int:
    raise ReadFailed("bytes of expert 3", "an error of the disk", "check the disk")


@pytest.mark.e2e
@pytest.mark.parametrize("stream", [False, True])
def test_a_disk_error_ends_one_answer(slow, monkeypatch, caplog, stream):
    """A read that fails within an answer: an error event, or 500, without a path; the next request is answered."""
    engine = slow.serving.model.engine
    want = slow.client.post(COMPLETE, json=body(False, max_tokens=8)).json()["choices"]

    begin, decodes = Engine.begin, []

    def breaking(self: Engine, one: Step, **how: bool) -> object:
        decodes.extend([one] if one.decodes else [])
        if len(decodes) == 3:
            monkeypatch.setattr(RecordReader, "read", fail)
            engine.forget_experts()
        return begin(self, one, **how)

    monkeypatch.setattr(Engine, "begin", breaking)
    found = slow.client.post(COMPLETE, json=body(stream, max_tokens=8))
    monkeypatch.undo()
    if stream:
        parts = found.text.strip().split("\n\n")
        error = json.loads(parts[-1][6:])["error"]
        assert found.status_code == 200
        assert all(json.loads(part[6:])["choices"] for part in parts[:-1])
    else:
        error = found.json()["error"]
        assert found.status_code == 500
    assert (error["type"], error["code"]) == ("server_error", "damaged_data")
    assert "the server's log has the rest" in error["message"]
    assert "expert 3" not in error["message"]
    assert "an error of the disk" in caplog.text
    slow.idle()
    assert slow.client.post(COMPLETE, json=body(False, max_tokens=8)).json()["choices"] == want


@pytest.mark.e2e
def test_a_storm_of_cancels_leaves_nothing(slow):
    """Thirty clients that leave at once, in the queue and while they run: the budget and the queue are as before."""
    slow.pause, used = 0.02, slow.serving.model.engine.budget.used_bytes

    def call(i: int) -> None:
        with suppress(httpx.TimeoutException):
            slow.client.post(COMPLETE, json=body(False, n=1 + i % 2), timeout=0.05 + 0.02 * (i % 7))

    threads = [in_thread(lambda i=i: call(i)) for i in range(30)]
    for thread in threads:
        thread.join()
    slow.wait(lambda: slow.serving.model.engine.budget.used_bytes == used)
    slow.idle()
    assert not slow.serving.model.engine.vram.residents.leases
    slow.pause = 0
    assert slow.client.post(COMPLETE, json=body(False, max_tokens=1)).status_code == 200


@pytest.mark.e2e
def test_a_retry_and_a_next_turn_compute_the_rest(tiny_store):
    """A client that left in its prompt, comes back, and goes on: usage, timings and metrics count what was kept."""
    model = a_model(tiny_store, keep=True)
    model._scheduler.loop._chunk = 4
    with server_of(model) as server:
        model.engine.watch(lambda layer, chosen: time.sleep(0.05))
        gone_after(server, 0.5, stream=True)
        server.idle()
        model.engine.watch(lambda layer, chosen: None)
        retry = server.client.post(COMPLETE, json=body(False, max_tokens=4)).json()
        prompt = model.encode(LONG)
        cached = retry["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == retry["timings"]["cache_n"] == retry["edgemoe"]["cached_tokens"]
        assert cached % 4 == 0
        assert 0 < cached < len(prompt)
        more = [*prompt, *model.encode(retry["choices"][0]["text"])]
        turn = server.client.post(COMPLETE, json=body(False, prompt=more, max_tokens=1)).json()
        assert turn["timings"]["cache_n"] >= len(prompt)
        hits = cached + turn["timings"]["cache_n"]
        server.idle()
        assert (
            f'vllm:prefix_cache_hits_total{{model_name="tiny"}} {hits}.0'
            in server.client.get("/metrics").text
        )
        used = server.client.post(COMPLETE, json=body(False, prompt=LONG, n=3, seed=1, max_tokens=2)).json()
        assert len(used["choices"]) == 3
        assert model.status().memory["kept"] > 0


@pytest.mark.e2e
def test_an_unknown_error_is_500_and_logged(slow, monkeypatch, caplog):
    """The text of an error that is none of edgemoe's stays in the log."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(type(slow.serving.model), "submit", broken)
    # The server closes the connection after such an error, and the next request must not be on its way in it.
    found = slow.client.post(COMPLETE, json=body(False), headers={"connection": "close"})
    monkeypatch.undo()
    assert found.status_code == 500
    assert "secret" not in found.text
    assert "secret" in caplog.text
    assert slow.client.post(COMPLETE, json=body(False, max_tokens=1)).status_code == 200
