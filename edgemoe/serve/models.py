"""The models of a server: which are loaded, which requests use or await them, and when they are unloaded.

Every endpoint asks here for the model of its request (`hold`), which stays until the request has ended. A request for
a model that is not loaded waits. The one that waits longest decides which model is loaded next: the least recently used
ones leave until the limits hold it, each after its running answers, and take no further requests meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

from starlette.requests import ClientDisconnect, Request

from edgemoe.serve.errors import UNAVAILABLE, ApiError, not_loaded
from edgemoe.serve.intake import Intake, client_of
from edgemoe.serve.job import ENDING, Job
from edgemoe.serve.limits import Limits
from edgemoe.serve.metrics import Metrics
from edgemoe.serve.own_thread import on_own_thread
from edgemoe.serve.serving import Serving
from edgemoe.serve.slot import Hold, Memory, Slot, Source, Waiting, return_memory, victims_of

_log = logging.getLogger("edgemoe.serve")

_SLICE_SECONDS = 0.2
"""Time between two looks whether the client of a waiting request is still there."""


class Models:
    """The models of a server. For the event loop's thread, `close` excepted.

    Args:
        slots: the models, at least one; the first is loaded by `start`, and answers requests that name none.
        intake: state that all models share.
        metrics: figures of all models.
        capacity: returns the bytes that all loaded models may take together; called once, after every Source.check. A
            server of one model does not call it.
        idle_seconds: seconds after its last request until a model is unloaded; None: it stays.
        clock: returns the time in seconds.

    Attributes:
        started: whether the first model has been loaded.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        intake: Intake,
        metrics: Metrics,
        *,
        capacity: Callable[[], Memory] = lambda: Memory(0),
        idle_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slots, self.intake, self.metrics = list(slots), intake, metrics
        self.idle_seconds, self.started = idle_seconds, False
        self._measure, self._capacity, self._clock = capacity, Memory(0), clock
        self._numbers = count()
        self._worker: asyncio.Task[None] | None = None
        for slot in self.slots:
            slot.keep_seconds = idle_seconds

    async def start(self) -> None:
        """Checks the models where there are several, and loads the first one.

        Raises:
            the error of Source.check or Source.load.
        """
        if len(self.slots) > 1:
            for slot in self.slots:
                slot.needs, slot.serving.about = await on_own_thread(slot.source.check)
            self._capacity = await on_own_thread(self._measure)
        await self._load(self.slots[0])
        self.started = True

    @property
    def jobs(self) -> list[Job]:
        """The requests of all models that are under way."""
        return [job for slot in self.slots for job in slot.serving.queue.jobs]

    @property
    def latest(self) -> Slot:
        """The loaded model that was used last; the first model where none is loaded."""
        loaded = [slot for slot in self.slots if slot.state == "loaded"]
        return max(loaded, key=lambda slot: (slot.users > 0, slot.last_use), default=self.slots[0])

    def of_request(self, name: str | None) -> Slot:
        """The model of a request: the only one whatever the name is, and of several the first for a request without.

        Raises:
            ApiError: several models are served, and none has this name.
        """
        return self.slots[0] if len(self.slots) == 1 or not name else self.named(name)

    def named(self, name: str) -> Slot:
        """The model with a name; ollama's clients add `:latest`.

        Raises:
            ApiError: none has it.
        """
        for slot in self.slots:
            if slot.name in (name, name.removesuffix(":latest")):
                return slot
        served = ", ".join(repr(slot.name) for slot in self.slots[:8])
        message = (
            f"expected one of the models {served}, got {name[:200]!r}, which is not found: see GET /v1/models"
        )
        raise ApiError(404, message, param="model", code="model_not_found")

    async def hold(self, request: Request, slot: Slot, keep_seconds: float | None = None) -> Hold:
        """Waits until a model is loaded, and keeps it until the hold is released.

        Args:
            request: the client's request.
            slot: its model.
            keep_seconds: seconds for which the model stays after the request, infinite for ever; None: idle_seconds.

        Raises:
            ApiError: the server starts or ends, too many requests wait, or the model cannot be loaded.
            ClientDisconnect: the client has left.
            TimeoutError: the server's limit on the time of a request is over.
        """
        if not self.started:
            raise not_loaded()
        deadline = self.intake.limits.deadline()
        if slot.takes_requests:
            if not slot.users:  # the time of an idle model may have been over
                slot.dismissed = False
            slot.users += 1
        else:
            await self._wait(request, slot, deadline)
        forever = keep_seconds == float("inf")
        slot.keep_seconds = None if forever else self.idle_seconds if keep_seconds is None else keep_seconds
        return Hold(slot.serving, lambda: self._release(slot), deadline)

    async def _wait(self, request: Request, slot: Slot, deadline: float | None) -> None:
        """Waits until a request may use a model, which counts it among its users then."""
        client, one = client_of(request), Waiting.begun(next(self._numbers))
        slot.places.enter(client)
        slot.waiting.append(one)
        try:
            self._go_on()
            async with asyncio.timeout_at(deadline):
                while not (await asyncio.wait({one.turn}, timeout=_SLICE_SECONDS))[0]:
                    if await request.is_disconnected():
                        raise ClientDisconnect
            one.turn.result()
        except BaseException:
            if one.turn.done() and not one.turn.cancelled() and one.turn.exception() is None:
                self._release(slot)
            raise
        finally:
            slot.places.leave(client)
            if one in slot.waiting:
                slot.waiting.remove(one)
                self._go_on()  # the models that were to leave for it may stay

    def _release(self, slot: Slot) -> None:
        slot.users -= 1
        slot.last_use = self._clock()
        if not slot.users:
            slot.dismissed = slot.dismissed or slot.keep_seconds == 0
            self._go_on()

    def load(self, slot: Slot) -> None:
        """Has a model loaded, in its turn; a failure is logged, and noted in the slot.

        Raises:
            ApiError: the server starts.
        """
        if not self.started:
            raise not_loaded()
        if slot.dismissed:  # what dismissed it holds no longer
            slot.dismissed, slot.keep_seconds, slot.last_use = False, self.idle_seconds, self._clock()
        if slot.state != "loaded" or slot.leaving:
            one = Waiting.begun(next(self._numbers), uses=False)
            one.turn.add_done_callback(lambda turn: turn.cancelled() or turn.exception())
            slot.waiting.append(one)
            self._go_on()

    def unload(self, slot: Slot) -> None:
        """Has a model unloaded, after the answers that run. A request that comes later loads it again.

        Raises:
            ApiError: the server starts.
        """
        if not self.started:
            raise not_loaded()
        slot.dismissed = slot.state in ("loading", "loaded")
        slot.cancel_orders()
        self._go_on()

    def remaining(self, slot: Slot) -> float | None:
        """Seconds until a model that no request uses is unloaded; None: it stays."""
        if slot.keep_seconds is None:
            return None
        since = self._clock() if slot.users else slot.last_use
        return max(since + slot.keep_seconds - self._clock(), 0.0)

    def tick(self) -> None:
        """Dismisses the models whose time is over. To be called about once a second."""
        for slot in self.slots:
            if slot.state == "loaded" and not slot.users and self.remaining(slot) == 0:
                slot.dismissed = True
        self._go_on()

    def break_off(self) -> None:
        """Ends every request by an error: the server ends."""
        for slot in self.slots:
            slot.fail(ApiError(503, ENDING, kind=UNAVAILABLE))
        for job in self.jobs:
            job.cancel()

    def close(self) -> None:
        """Closes every model. Called after the event loop has ended."""
        for slot in self.slots:
            slot.end()

    def _go_on(self) -> None:
        """Has the worker do what there is to do: one model is loaded or unloaded at a time."""
        if self.started and (self._worker is None or self._worker.done()):
            self._worker = asyncio.get_running_loop().create_task(self._work())

    async def _work(self) -> None:
        while (step := self._next()) is not None:
            await step

    def _next(self) -> Coroutine[Any, Any, object] | None:
        """Decides which models leave, lets requests use the others, and returns the next loading or unloading."""
        unloaded = [slot for slot in self.slots if slot.state == "unloaded" and slot.waiting]
        target = min(unloaded, key=lambda slot: slot.first_waiting or 0, default=None)
        victims = victims_of(target, self.slots, self._capacity) if target else []
        for slot in self.slots:
            slot.leaving = slot.dismissed or slot in victims
            if slot.takes_requests:
                slot.admit()
        for slot in self.slots:
            if slot.leaving and slot.state == "loaded" and not slot.users:
                return self._unload(slot)
        return self._load(target) if target and not victims else None

    async def _load(self, slot: Slot) -> None:
        """Loads a model. Where that fails, each request that waits for it gets the error; so does `start`."""
        slot.state, slot.dismissed = "loading", False
        start = self._clock()
        try:
            await on_own_thread(slot.open)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            slot.state, slot.failed = "unloaded", True
            slot.fail(slot.load_error(error) if self.started else not_loaded())
            if not self.started:
                raise
        if slot.state == "unloaded":  # here, where nothing refers to the error and its traceback
            await on_own_thread(return_memory)
            return
        slot.state, slot.failed, slot.last_use = "loaded", False, self._clock()
        slot.admit()  # before others that wait have it leave again
        if self.started:
            _log.info("%s: loaded in %.2f s", slot.name, slot.last_use - start)

    async def _unload(self, slot: Slot) -> None:
        slot.state, slot.dismissed, slot.keep_seconds = "unloading", False, self.idle_seconds
        try:
            await on_own_thread(partial(slot.close, slot.serving.close()))
            _log.info("%s: unloaded", slot.name)
        except Exception as error:
            _log.exception("%s: an error while it was unloaded", slot.name, exc_info=error)
        await on_own_thread(return_memory)
        slot.state = "unloaded"


def models_of(
    sources: Mapping[str, Source], limit: int, limits: Limits | None = None, **options: Any
) -> Models:
    """The models of a server, none of which is loaded.

    Args:
        sources: name -> opens the model.
        limit: requests of each model at once, waiting ones included.
        limits: times and sizes of one request; None: the defaults.
        options: further arguments of Models.
    """
    intake, metrics = Intake(limits or Limits()), Metrics()
    shared: dict[str, Any] = {"limit": limit, "intake": intake, "metrics": metrics}
    slots = [
        Slot(Serving(name, **shared, answered=source.answered), source) for name, source in sources.items()
    ]
    return Models(slots, intake, metrics, **options)
