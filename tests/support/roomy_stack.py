"""A stack of Python frames that test functions do not outgrow.

CPython keeps frames in chunks of 16 KB. A call that begins at the end of a chunk maps another one, and its return
unmaps it: where a loop calls functions there, each call costs two system calls and page faults. A test of Triton's
interpreter had 600,000 of them, half of its time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

LOCALS = 3_200
"""Local variables of the frame that asks for the chunk: 26 KB of one of 64 KB."""

_code = f"def roomy(call):\n    if False: {'='.join(f'v{i}' for i in range(LOCALS))} = 0\n    return call()\n"


def _made() -> Callable[[Callable[[], Any]], Any]:
    names: dict[str, Any] = {}
    exec(_code, names)
    return names["roomy"]


roomy = _made()
"""Returns what a function returns, whose calls have room for a hundred frames and more in one chunk."""
