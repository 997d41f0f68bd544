"""The place of one model in a server: how it is opened, whether it is loaded, and which requests use or await it."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from edgemoe.errors import DamagedData, DoesNotFit
from edgemoe.machine.process import return_free_memory
from edgemoe.serve.errors import FAILED, ApiError
from edgemoe.serve.job import Queue
from edgemoe.serve.serving import About, Serving

if TYPE_CHECKING:
    from edgemoe.api.model import Model

State = Literal["unloaded", "loading", "loaded", "unloading"]


class Memory(NamedTuple):
    """Bytes of the two memories that limits are for: --vram-limit and --dram-limit."""

    vram: int
    dram: int = 0

    def holds(self, needs: Iterable[Memory]) -> bool:
        """Whether these bytes are enough for all needs together."""
        listed = list(needs)
        return self.vram >= sum(each.vram for each in listed) and self.dram >= sum(
            each.dram for each in listed
        )


ALONE = Memory(sys.maxsize)
"""The needs of a model that stays loaded with no other one."""


class Checked(NamedTuple):
    """A model that can run.

    Args:
        needs: the bytes of the limits that it takes once it is loaded.
        about: its files and its context; None: they are known once it is loaded.
    """

    needs: Memory
    about: About | None = None


@dataclass(frozen=True)
class Source:
    """Opens the model of one name, any number of times. All but `answered` are called on threads of their own.

    Args:
        load: opens the model, and puts what must be closed on the stack.
        check: refuses a model that cannot run, and says what it takes of the limits; called once for each model where a
            server has several, before the first one is loaded.
        answered: notes an answer.
        unloading: keeps what a later `load` can use, before an open model is closed that may be opened again.
    """

    load: Callable[[ExitStack], Model]
    check: Callable[[], Checked] = lambda: Checked(Memory(0))
    answered: Callable[[], None] = lambda: None
    unloading: Callable[[Model], None] = lambda model: None


@dataclass(eq=False)
class Waiting:
    """A request that waits until its model is loaded, or a client's order to load it.

    Args:
        number: counts up over all models.
        turn: done once the model is loaded, or cannot be.
        uses: whether it uses the model then.
    """

    number: int
    turn: asyncio.Future[None]
    uses: bool = True

    @classmethod
    def begun(cls, number: int, *, uses: bool = True) -> Waiting:
        """Begins to wait in the event loop that runs."""
        return cls(number, asyncio.get_running_loop().create_future(), uses)


class Hold:
    """The use of a loaded model by one request.

    Args:
        serving: the model.
        end: called at the first `release`.
        deadline: time of the event loop at which the request's answers end by an error; None: no limit.
    """

    def __init__(self, serving: Serving, end: Callable[[], None], deadline: float | None = None) -> None:
        self.serving, self._end, self.deadline = serving, end, deadline
        self._ended = False

    def release(self) -> None:
        """Ends the use. Idempotent."""
        if not self._ended:
            self._ended = True
            self._end()


class Slot:
    """One model of a server. For the event loop's thread, but for `open` and `close`.

    Args:
        serving: the model as requests see it.
        source: opens it.

    Attributes:
        state: whether it is loaded.
        needs: the bytes that it takes of the limits; 0 where no other model shares them.
        users: number of requests that use it.
        waiting: requests that wait until it is loaded.
        places: a bound on these.
        last_use: time of its loading, or of the end of its last request, by the clock of Models.
        keep_seconds: seconds after the last use until it is unloaded; None: it stays.
        dismissed: it is unloaded as soon as no request uses it.
        leaving: no further request begins to use it before it is unloaded: it is dismissed, or others need its memory.
        failed: whether its last loading failed.
    """

    def __init__(self, serving: Serving, source: Source) -> None:
        self.serving, self.source = serving, source
        self.state: State = "unloaded"
        self.needs, self.users = Memory(0), 0
        self.waiting, self.places = list[Waiting](), Queue(serving.queue.limit)
        self.last_use = 0.0
        self.keep_seconds: float | None = None
        self.dismissed = self.leaving = self.failed = False
        self._opened = ExitStack()

    @property
    def name(self) -> str:
        """The name that clients see."""
        return self.serving.name

    @property
    def takes_requests(self) -> bool:
        """Whether a request may begin to use it now."""
        return self.state == "loaded" and not self.leaving

    @property
    def unfinished(self) -> int:
        """Number of requests that are under way or wait until the model is loaded."""
        return len(self.serving.queue.jobs) + sum(one.uses for one in self.waiting)

    @property
    def first_waiting(self) -> int | None:
        """The number of the request that waits longest; None: none waits."""
        return min((each.number for each in self.waiting), default=None)

    def open(self) -> None:
        """Loads the model; whatever was opened is closed where that fails.

        Raises:
            as Source.load.
        """
        self._opened = ExitStack()
        try:
            model = self.source.load(self._opened)
            model.keep_warm()
            self.serving.open(model)
        except BaseException:
            self.end()
            raise

    def close(self, model: Model | None) -> None:
        """Closes the model that `serving` has given back; Source.unloading keeps some of its state."""
        try:
            if model is not None:
                self.source.unloading(model)
        finally:
            self.end()

    def end(self) -> None:
        """Closes the model and what it was opened with. Idempotent."""
        self._opened.close()

    def admit(self) -> None:
        """Lets every request that waits use the model, which is loaded."""
        for one in self.waiting:
            if not one.turn.done():
                self.users += one.uses
                one.turn.set_result(None)
        self.waiting.clear()

    def cancel_orders(self) -> None:
        """Ends the orders to load it; requests wait on."""
        for one in self.waiting:
            if not one.uses:
                one.turn.cancel()
        self.waiting = [one for one in self.waiting if one.uses]

    def fail(self, error: ApiError) -> None:
        """Ends every request that waits."""
        for one in self.waiting:
            if not one.turn.done():
                one.turn.set_exception(error)
        self.waiting.clear()

    def load_error(self, error: BaseException) -> ApiError:
        """The error of a request whose model cannot be loaded; only the log has texts that may name files."""
        if isinstance(error, (DamagedData, DoesNotFit)):
            return ApiError.of(error)
        logging.getLogger("edgemoe.serve").error(
            "%s: it cannot be loaded: %s", self.name, error, exc_info=error
        )
        message = f"expected the model {self.name!r} to load, got an error: the server's log has the rest"
        return ApiError(500, message, kind=FAILED, code="model_failed")


def return_memory() -> None:
    """Frees the objects of a closed model, which refer to each other, and gives their memory back to the system."""
    gc.collect()
    return_free_memory()


def victims_of(target: Slot, slots: Iterable[Slot], capacity: Memory) -> list[Slot]:
    """The loaded models that leave so that the capacity holds another one: idle ones first, then by their last use."""
    loaded = [slot for slot in slots if slot.state == "loaded"]
    loaded.sort(key=lambda slot: (slot.users > 0, slot.last_use))
    leaving = 0
    while leaving < len(loaded) and not capacity.holds(each.needs for each in (target, *loaded[leaving:])):
        leaving += 1
    return loaded[:leaving]
