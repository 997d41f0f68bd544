"""Shows on a terminal how far the model has read a prompt, once that takes longer than a second."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from edgemoe.console.input import obeys_escapes

AFTER = 1.0
"""Seconds of silence before the first line."""

_EVERY = 0.2
"""Seconds between two lines."""

Read = Callable[[], tuple[int, int]]
"""Returns (tokens read, tokens of the prompt); cached tokens count in neither."""


@contextmanager
def prefilling(read: Read) -> Iterator[Callable[[], None]]:
    """Shows tokens, rate and time left in one line on stderr while the block runs; nothing where that is no terminal.

    The line goes when the prompt is read, and at the end of the block.

    Args:
        read: called in a thread of its own.

    Yields:
        a function that removes the line, for what else is printed in the block; idempotent.
    """
    if not obeys_escapes(sys.stderr):
        yield lambda: None
        return
    ended = threading.Event()
    thread = threading.Thread(target=_show, args=(read, ended), name="prefill-progress", daemon=True)

    def end() -> None:
        ended.set()
        if thread.ident is not None and thread.is_alive():
            thread.join()

    thread.start()
    try:
        yield end
    finally:
        end()


def _show(read: Read, ended: threading.Event) -> None:
    with suppress(OSError):  # the terminal is gone
        _draw(read, ended)


def _draw(read: Read, ended: threading.Event) -> None:
    start, wait, shown = time.monotonic(), AFTER, False
    while not ended.wait(wait):
        done, total = read()
        if done >= total > 0:
            break
        wait, shown = _EVERY, True
        print(
            f"\r\x1b[2K{prefill_line(done, total, time.monotonic() - start)}",
            end="",
            file=sys.stderr,
            flush=True,
        )
    if shown:
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def prefill_line(count: int, total: int, seconds: float) -> str:
    """Describes how far a prompt is.

    >>> prefill_line(1024, 4096, 4.0)
    'prompt: 1,024 of 4,096 tokens, 256 tok/s, 12 s left'
    >>> prefill_line(0, 600, 2.5), prefill_line(512, 90_000, 100.0)
    ('prompt: 0 of 600 tokens, 2 s', 'prompt: 512 of 90,000 tokens, 5.1 tok/s, 291 min left')
    """
    text = f"prompt: {count:,} of {total:,} tokens"
    if not count:
        return f"{text}, {seconds:.0f} s"
    rate, left = count / seconds, seconds * (total - count) / count
    time_left = f"{left:.0f} s" if left < 120 else f"{left / 60:.0f} min"
    return f"{text}, {rate:.{0 if rate >= 10 else 1}f} tok/s, {time_left} left"
