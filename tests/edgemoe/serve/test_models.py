"""The models of a server: which is loaded when, who waits for it, and when it is unloaded; decided without a model."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Coroutine
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from edgemoe.errors import DoesNotFit, UserError
from edgemoe.serve import models as models_module
from edgemoe.serve.errors import ApiError
from edgemoe.serve.intake import Intake
from edgemoe.serve.limits import Limits
from edgemoe.serve.metrics import Metrics
from edgemoe.serve.model_object import model_object
from edgemoe.serve.models import Models
from edgemoe.serve.serving import Serving
from edgemoe.serve.slot import ALONE, Checked, Hold, Memory, Slot, Source

FOREVER = float("inf")


class Rig:
    """Models whose loadings and unloadings are only noted, with a clock that a test sets.

    Attributes:
        log: "+NAME" for each loading, "-NAME" for each unloading.
        now: the time in seconds.
        errors: the names of models that cannot be loaded, with their errors.
        absent: the names of clients that have left.
        gates: the names of models whose loading waits until the event is set.
    """

    def __init__(self, sizes: dict[str, int], capacity: int, *, limit: int = 8, **options: Any) -> None:
        self.log, self.now, self.errors = list[str](), 0.0, dict[str, Exception]()
        self.absent, self.gates = set[str](), dict[str, threading.Event]()
        intake, metrics = Intake(Limits(answer_seconds=options.pop("answer_seconds", None))), Metrics()
        rig = self

        class NotedSlot(Slot):
            def open(self) -> None:
                if gate := rig.gates.get(self.name):
                    assert gate.wait(20)
                if error := rig.errors.get(self.name):
                    raise error
                rig.log.append(f"+{self.name}")

            def close(self, model: object) -> None:
                rig.log.append(f"-{self.name}")

        slots = [
            NotedSlot(
                Serving(name, limit=limit, intake=intake, metrics=metrics),
                Source(lambda opened: None, lambda size=size: Checked(Memory(size))),
            )
            for name, size in sizes.items()
        ]
        self.models = Models(
            slots, intake, metrics, capacity=partial(Memory, capacity), clock=lambda: self.now, **options
        )

    def hold(self, name: str, keep: float | None = None, client: str = "x") -> Coroutine[Any, Any, Hold]:
        async def gone() -> bool:
            return client in self.absent

        request = SimpleNamespace(client=SimpleNamespace(host=client), is_disconnected=gone)
        return self.models.hold(request, self.models.of_request(name), keep)

    def begin(self, name: str, **options: Any) -> asyncio.Task[Hold]:
        """Begins to wait for a model."""
        return asyncio.create_task(self.hold(name, **options))

    async def settle(self) -> None:
        """Waits until nothing is loaded or unloaded any more."""
        for _ in range(3):
            await asyncio.sleep(0)
            while self.models._worker and not self.models._worker.done():
                await asyncio.wait({self.models._worker})

    def states(self) -> dict[str, str]:
        return {slot.name: slot.state for slot in self.models.slots}


def run(test: Callable[[Rig], Coroutine[Any, Any, None]], rig: Rig) -> None:
    """Runs a test in an event loop, once the first model is loaded."""

    async def both() -> None:
        await rig.models.start()
        async with asyncio.timeout(20):
            await test(rig)

    asyncio.run(both())


def test_a_running_answer_ends_first_and_requests_wait_in_turn():
    """The other model's request waits for the answer; later requests of either model wait for their model's turn."""

    async def test(rig: Rig) -> None:
        first = await rig.hold("a")
        other = rig.begin("b")
        await rig.settle()
        late = rig.begin("a")
        await rig.settle()
        assert (rig.log, other.done(), late.done()) == (["+a"], False, False)
        first.release()
        await rig.settle()
        assert (rig.log, other.done(), late.done()) == (["+a", "-a", "+b"], True, False)
        (await other).release()
        (await late).release()
        assert rig.log == ["+a", "-a", "+b", "-b", "+a"]

    run(test, Rig({"a": 6, "b": 6}, 10))


def test_models_that_fit_together_stay():
    """Nothing leaves, and their requests run at the same time."""

    async def test(rig: Rig) -> None:
        holds = [await rig.hold(name) for name in ("a", "b", "a", "b")]
        assert (rig.log, set(rig.states().values())) == (["+a", "+b"], {"loaded"})
        for hold in holds:
            hold.release()
            hold.release()  # counts once
        assert [slot.users for slot in rig.models.slots] == [0, 0]

    run(test, Rig({"a": 4, "b": 6}, 10))


def test_the_least_recently_used_idle_model_leaves():
    """One in use stays although it was used before."""

    async def test(rig: Rig) -> None:
        busy = await rig.hold("a")
        for name in "bca":
            rig.now += 1
            (await rig.hold(name)).release()
        busy_too = rig.models.of_request("a")
        assert (busy_too.users, rig.log) == (1, ["+a", "+b", "+c"])
        (await rig.hold("d")).release()
        assert rig.log[3:] == ["-b", "+d"]
        busy.release()

    run(test, Rig(dict.fromkeys("abcd", 3), 9))


def test_a_model_that_exceeds_the_capacity_alone_is_loaded_alone():
    """Free memory may have become less since it was checked; the plan of its loading decides."""

    async def test(rig: Rig) -> None:
        (await rig.hold("b")).release()
        assert rig.log == ["+a", "-a", "+b"]

    run(test, Rig({"a": 1, "b": 20}, 10))


def test_models_on_a_gpu_change_places():
    """They stay with no other model, however much the limits hold."""

    async def test(rig: Rig) -> None:
        for name in "ba":
            (await rig.hold(name)).release()
        assert rig.log == ["+a", "-a", "+b", "-b", "+a"]

    run(test, Rig(dict.fromkeys("ab", ALONE.vram), 10))


@pytest.mark.parametrize(
    ("keep", "idle", "seconds"),
    [(None, None, None), (None, 600, 600), (300, None, 300), (300, 600, 300), (FOREVER, 600, None)],
)
def test_the_idle_clock(keep, idle, seconds):
    """A model leaves `keep_alive` after its last request, by default --idle-unload; the next request loads it again."""

    async def test(rig: Rig) -> None:
        hold = await rig.hold("a", keep)
        rig.now = 10_000
        rig.models.tick()
        await rig.settle()
        assert rig.states()["a"] == "loaded"  # in use
        hold.release()
        slot = rig.models.slots[0]
        assert rig.models.remaining(slot) == seconds
        rig.now += (seconds or 10**9) - 1
        rig.models.tick()
        await rig.settle()
        assert rig.log == ["+a"]
        rig.now += 1
        rig.models.tick()
        await rig.settle()
        assert rig.log == (["+a"] if seconds is None else ["+a", "-a"])
        (await rig.hold("a")).release()
        assert rig.states()["a"] == "loaded"
        assert rig.models.remaining(slot) == idle

    run(test, Rig({"a": 1}, 10, idle_seconds=idle))


def test_no_time_at_all_unloads_after_the_last_answer():
    """`keep_alive` 0 leaves other requests of the model alone."""

    async def test(rig: Rig) -> None:
        one, two = await rig.hold("a"), await rig.hold("a", 0)
        one.release()
        await rig.settle()
        assert rig.log == ["+a"]
        two.release()
        await rig.settle()
        assert rig.log == ["+a", "-a"]

    run(test, Rig({"a": 1}, 10))


def test_orders_to_load_and_to_unload():
    """An order to unload waits for the answers that run; a request after it has the model loaded again."""

    async def test(rig: Rig) -> None:
        models, (a, b) = rig.models, rig.models.slots
        hold = await rig.hold("a")
        models.unload(a)
        after = rig.begin("a")
        await rig.settle()
        assert (rig.log, after.done()) == (["+a"], False)
        hold.release()
        await rig.settle()
        assert rig.log == ["+a", "-a", "+a"]
        (await after).release()
        models.load(b)
        assert model_object(b)["status"] == {"value": "loading"}
        await rig.settle()
        assert rig.log[3:] == ["-a", "+b"]
        assert [model_object(slot)["status"]["value"] for slot in models.slots] == ["unloaded", "loaded"]
        models.load(b)  # it is
        models.unload(a)  # it is not loaded
        await rig.settle()
        assert rig.log[5:] == []
        assert b.users == 0

    run(test, Rig({"a": 6, "b": 6}, 10))


def test_a_model_that_cannot_be_loaded_fails_its_requests_alone():
    """The others are served; the next request tries it again; an order to load it is shown as failed."""

    async def test(rig: Rig) -> None:
        rig.errors["b"] = UserError("a file", "none in /secret/place", "make one")
        with pytest.raises(ApiError, match="'b' to load") as refused:
            await rig.hold("b")
        assert (refused.value.status, refused.value.code) == (500, "model_failed")
        assert "secret" not in str(refused.value)
        rig.errors["b"] = DoesNotFit("4 GB", "3 GB", "give more", minimum=4)
        with pytest.raises(ApiError, match="memory") as refused:
            await rig.hold("b")
        assert (refused.value.status, refused.value.code) == (503, "out_of_memory")
        rig.models.load(rig.models.slots[1])
        await rig.settle()
        assert model_object(rig.models.slots[1])["status"] == {"value": "unloaded", "failed": True}
        (await rig.hold("a")).release()
        rig.errors.clear()
        (await rig.hold("b")).release()
        assert rig.log[-1] == "+b"

    run(test, Rig({"a": 6, "b": 6}, 10))


def test_a_client_that_leaves_while_it_waits_changes_nothing():
    """The model that was to leave stays, and takes requests again."""

    async def test(rig: Rig) -> None:
        hold = await rig.hold("a")
        waiting = rig.begin("b", client="gone")
        await rig.settle()
        late = rig.begin("a")
        await rig.settle()
        assert not late.done()
        rig.absent.add("gone")
        with pytest.raises(ClientDisconnect):
            await waiting
        (await late).release()
        hold.release()
        await rig.settle()
        assert rig.log == ["+a"]

    run(test, Rig({"a": 6, "b": 6}, 10))


def test_each_model_has_a_queue_of_its_own():
    """A full one refuses a client's further requests for this model, not for another one."""

    async def test(rig: Rig) -> None:
        hold = await rig.hold("a")
        waiting = [rig.begin("b"), rig.begin("b")]
        await rig.settle()
        with pytest.raises(ApiError) as full:
            await rig.hold("b")
        assert (full.value.status, full.value.code) == (429, "queue_full")
        other = rig.begin("c")
        await rig.settle()
        assert not other.done()
        hold.release()
        for one in (*waiting, other):
            (await one).release()

    run(test, Rig(dict.fromkeys("abc", 6), 10, limit=2))


def test_a_wait_has_the_limit_of_a_request():
    """The client gets an error, and its model is not loaded for it."""

    async def test(rig: Rig) -> None:
        hold = await rig.hold("a")
        with pytest.raises(TimeoutError):
            await rig.hold("b")
        hold.release()
        await rig.settle()
        assert rig.log == ["+a"]

    run(test, Rig({"a": 6, "b": 6}, 10, answer_seconds=0.01))


def test_the_end_of_the_server_ends_who_waits():
    """By an error that says why."""

    async def test(rig: Rig) -> None:
        hold = await rig.hold("a")
        waiting = rig.begin("b")
        await rig.settle()
        rig.models.break_off()
        with pytest.raises(ApiError, match="the end of the server"):
            await waiting
        hold.release()

    run(test, Rig({"a": 6, "b": 6}, 10))


def test_names():
    """Of one model every name is right; of several the first has requests without a name, and others are 404."""
    one, two = Rig({"a": 1}, 9).models, Rig({"a": 1, "b": 1}, 9).models
    assert [one.of_request(name).name for name in ("a", "gpt-4", None)] == ["a"] * 3
    assert [two.of_request(name).name for name in ("a", "b:latest", "b", None, "")] == [
        "a",
        "b",
        "b",
        "a",
        "a",
    ]
    for models in (one, two):
        with pytest.raises(ApiError) as unknown:
            models.named("c")
        assert (unknown.value.status, unknown.value.code) == (404, "model_not_found")
    with pytest.raises(ApiError, match="'a', 'b', got 'c', which is not found"):
        two.of_request("c")


def test_all_models_are_checked_before_the_first_is_loaded():
    """One that cannot run ends the start; until the start nothing is served."""
    rig = Rig({"a": 1, "b": 1}, 9)

    def refuse() -> Checked:
        raise UserError("a model", "none", "name another")

    b = rig.models.slots[1]
    b.source = Source(lambda opened: None, refuse)

    async def both() -> None:
        for refused in (rig.models.load, rig.models.unload):
            with pytest.raises(ApiError, match="Loading model"):
                refused(b)
        with pytest.raises(ApiError, match="Loading model"):
            await rig.hold("a")
        with pytest.raises(UserError, match="name another"):
            await rig.models.start()

    asyncio.run(both())
    assert (rig.log, rig.models.started) == ([], False)


def test_the_only_model_is_not_checked_first():
    """Its loading refuses it, as it does for every other command."""
    rig = Rig({"a": 1}, 0)
    rig.models.slots[0].source = Source(lambda opened: None, lambda: pytest.fail("checked"))
    asyncio.run(rig.models.start())
    assert rig.log == ["+a"]


@pytest.mark.parametrize("use", ["hold", "load", "none"])
@pytest.mark.parametrize("dismissed", ["tick", "release"])
def test_a_dismissed_model_that_is_used_while_another_one_loads_stays(dismissed, use):
    """A request or an order for it takes back what its clock or `keep_alive` 0 has decided."""

    async def test(rig: Rig) -> None:
        gate = rig.gates["b"] = threading.Event()
        other, a = rig.begin("b"), rig.models.slots[0]
        while rig.states()["b"] != "loading":
            await asyncio.sleep(0)
        if dismissed == "tick":
            rig.now += 10
            rig.models.tick()
        else:
            (await rig.hold("a", 0)).release()
        assert a.dismissed
        if use == "hold":
            (await rig.hold("a", FOREVER)).release()
        elif use == "load":
            rig.models.load(a)
        rig.models.tick()
        gate.set()
        (await other).release()
        await rig.settle()
        assert rig.log == (["+a", "+b", "-a"] if use == "none" else ["+a", "+b"])

    run(test, Rig({"a": 1, "b": 1}, 10, idle_seconds=10))


def test_an_order_to_unload_takes_back_orders_to_load():
    """Requests that wait for the model are served all the same."""

    async def test(rig: Rig) -> None:
        hold, b = await rig.hold("a"), rig.models.slots[1]
        rig.models.load(b)
        await rig.settle()
        rig.models.unload(b)
        assert b.waiting == []
        rig.models.load(b)
        waiting = rig.begin("b")
        await rig.settle()
        rig.models.unload(b)
        assert (len(b.waiting), b.unfinished) == (1, 1)
        waiting.cancel()
        await asyncio.wait({waiting})
        hold.release()
        await rig.settle()
        assert (rig.log, b.unfinished) == (["+a"], 0)

    run(test, Rig({"a": 6, "b": 6}, 10))


def test_the_time_of_a_request_begins_once():
    """Its answer ends at the time that its wait had too."""

    async def test(rig: Rig) -> None:
        time = asyncio.get_running_loop().time
        hold, before = await rig.hold("a"), time()
        waiting = rig.begin("b")
        await rig.settle()
        after = time()
        hold.release()
        deadline = (await waiting).deadline
        assert deadline is not None
        assert before <= deadline - 1000 <= after

    run(test, Rig({"a": 6, "b": 6}, 10, answer_seconds=1000))


class Held:
    """An object that a failed loading refers to."""


def test_a_failed_loading_gives_its_memory_back(monkeypatch, caplog):
    """Nothing refers to what it had opened when memory goes back to the system, also without the garbage collector."""
    held, noted = list[weakref.ref[Held]](), list[bool]()

    def fail() -> None:
        weights = Held()
        held.append(weakref.ref(weights))
        raise DoesNotFit("4 GB", "3 GB", "give more", minimum=4)

    async def test(rig: Rig) -> None:
        monkeypatch.setattr(rig.models.slots[1], "open", fail)
        monkeypatch.setattr(models_module, "return_memory", lambda: noted.append(held[-1]() is None))
        with pytest.raises(ApiError, match="memory"):
            await rig.hold("b")
        await rig.settle()

    caplog.set_level(logging.CRITICAL, "edgemoe")  # pytest keeps a log's errors
    gc.disable()
    try:
        run(test, Rig({"a": 1, "b": 1}, 10))
    finally:
        gc.enable()
    assert noted == [True]


def test_a_model_is_closed_although_its_state_cannot_be_kept():
    """Its files and memory are given back, and the error is raised."""

    def refuse(model: object) -> None:
        raise OSError("no space")

    closed, slot = list[str](), Slot(Serving("a", limit=1), Source(lambda opened: None, unloading=refuse))
    slot._opened.callback(closed.append, "a")
    with pytest.raises(OSError, match="no space"):
        slot.close(SimpleNamespace())
    assert closed == ["a"]
