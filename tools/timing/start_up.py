"""Measures how long commands take to answer, and a chat to its first prompt, on the demo model in a cache of its own.

    python -m tools.timing.start_up [--runs 5]

Prints the least wall time of all runs, and the processor time of that run. The first run of each command is not
counted: it fills the page cache.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from resource import RUSAGE_CHILDREN, getrusage

import pexpect

from tools.checkout import child_environment
from tools.command_line import make_parser, positive

_PROMPT = r"\x1b\[\?2004h"
"""The line editor's escape sequence when it waits for a turn."""

COMPLETED = "edgemoe chat -m d"
"""The line whose last word a shell completes."""

COMMANDS = {
    "--version": "-m edgemoe --version",
    "models": "-m edgemoe models",
    "inspect": "-m edgemoe inspect demo",
    "rm": "-m edgemoe rm demo",
    "a name by Tab": "-m edgemoe",
    "an option by Tab": "-m edgemoe",
    "import torch": "-c 'import torch'",
    "plan": "-m edgemoe plan",
    "chat, to its prompt": "-m edgemoe chat",
}
"""Measured commands, and the arguments of Python."""


def measure(name: str, home: str) -> tuple[float, float]:
    """Runs a command once; returns the seconds until its answer or prompt, and its processor time to its end."""
    variables = {
        "HOME": home,
        "XDG_CACHE_HOME": home,
        "XDG_STATE_HOME": home,
        "XDG_CONFIG_HOME": home,
        "TERM": "xterm",
    }
    if name.endswith("by Tab"):
        line = COMPLETED if name.startswith("a name") else "edgemoe chat --d"
        variables |= {"_EDGEMOE_COMPLETE": "complete_bash", "COMP_WORDS": line}
        variables["COMP_CWORD"] = str(len(line.split()) - 1)
    before, start = _children(), time.monotonic()
    process = pexpect.spawn(
        f'"{sys.executable}" {COMMANDS[name]}',
        env=child_environment(**variables, PROMPT_TOOLKIT_NO_CPR="1"),
        timeout=300,
    )
    if name == "rm":
        process.sendline("n")
    if "prompt" in name:
        process.expect(_PROMPT)
    else:
        process.expect(pexpect.EOF)
    wall = time.monotonic() - start
    if "prompt" in name:
        process.send("/bye\r")
        process.expect(pexpect.EOF)
    process.close()
    return wall, _children() - before


def _children() -> float:
    """Processor seconds of all children that have ended."""
    used = getrusage(RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def least(once: Callable[[], tuple[float, float]], runs: int) -> tuple[float, float]:
    """Calls `once` a first time, then `runs` times; returns the result with the least wall time of these."""
    once()
    return min(once() for _ in range(runs))


def main() -> int:
    """Runs the tool; returns its exit code."""
    parser = make_parser("tools.timing.start_up", __doc__)
    parser.add_argument("--runs", type=positive, default=5)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as home:
        measure("chat, to its prompt", home)  # converts the demo
        print(f"{'':<22}wall s  processor s   (load {os.getloadavg()[0]:.1f})")
        for name in COMMANDS:
            wall, used = least(lambda name=name: measure(name, home), runs)  # type: ignore[misc]
            print(f"{name:<22}{wall:>6.2f}  {used:>11.2f}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
