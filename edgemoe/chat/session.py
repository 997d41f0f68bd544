"""One chat while it runs: its conversation, and how answers are shown and counted."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

from edgemoe.chat.conversation import Conversation
from edgemoe.console.input import in_colour, printable
from edgemoe.console.sizes import format_size
from edgemoe.engine.engine import Engine
from edgemoe.engine.generate import Answer


def stats_line(answer: Answer) -> str:
    """What an answer cost, for people."""

    def percent(share: float | None) -> str:
        return "-" if share is None else f"{100 * share:.0f} %"

    per_token = "-" if answer.ssd_bytes_per_token is None else f"{answer.ssd_bytes_per_token / 1e6:.1f}"
    levels = " ".join(f"{level}:{count}" for level, count in answer.levels.items() if count)
    reused = f" ({answer.reused} above their schedule)" if answer.reused else ""
    below = f", {answer.cpu_experts} experts on the CPU" if answer.cpu_experts else ""
    retention = ""
    if answer.effective_retention is not None and answer.effective_retention < 1:
        retention = f", {100 * answer.effective_retention:.0f} % at the highest level"
    return (
        f"{short_stats(answer)}, "
        f"hits VRAM {percent(answer.hit_rate['vram'])} DRAM {percent(answer.hit_rate['dram'])}, "
        f"{per_token} MB/token from SSD, in all {format_size(answer.bytes_read['ssd'])} from SSD and "
        f"{format_size(answer.bytes_read['dram'])} from DRAM, levels {levels or '-'}{reused}{below}{retention}, "
        f"peak {format_size(answer.peak_vram_bytes)} of {format_size(answer.vram_limit_bytes)} "
        f"(whole process {format_size(answer.peak_process_bytes)})"
    )


def short_stats(answer: Answer) -> str:
    """Its times and tokens alone."""
    tpot = "-" if answer.tpot_s is None else f"{1000 * answer.tpot_s:.0f} ms"
    return (
        f"TTFT {answer.ttft_s:.2f} s, TPOT {tpot}, {answer.new_tokens} tokens "
        f"({answer.cached_tokens} of {answer.prompt_tokens} prompt tokens reused)"
    )


@dataclass
class Totals:
    """Of all answers of a chat. Tokens."""

    answers: int = 0
    new_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def add(self, answer: Answer) -> None:
        """Counts one more."""
        self.answers += 1
        self.new_tokens += answer.new_tokens
        self.prompt_tokens += answer.prompt_tokens
        self.cached_tokens += answer.cached_tokens


class Chat:
    """What commands act on.

    Args:
        engine: that runs.
        conversation: on it.
        as_json: answers are JSON lines.
        short: what an answer cost is told in short, for /stats tells all of it.
    """

    def __init__(self, engine: Engine, conversation: Conversation, *, as_json: bool, short: bool) -> None:
        self.engine, self.conversation = engine, conversation
        self._as_json, self._short = as_json, short
        self.last: Answer | None = None
        self.totals = Totals()
        self.cancelled: str | None = None
        """The last question, if its answer was cancelled."""

    def ask(self, prompt: str) -> None:
        """Answers a turn on stdout. On Ctrl-C the turn is dropped, and kept for `regenerate`."""
        self.cancelled = None
        try:
            self._show(self.conversation.ask(prompt, self._stream))
        except KeyboardInterrupt:
            self.cancelled = prompt
            raise

    def regenerate(self) -> None:
        """Answers the cancelled question, or else the last one, in the place of its answer."""
        if self.cancelled is not None:
            self.ask(self.cancelled)
            return
        if self.conversation.sampling.temperature == 0 and self.conversation.messages:
            self.say("at temperature 0 the same answer is to be expected; /set temperature 0.7 for another")
        self._show(self.conversation.regenerate(self._stream))

    def say(self, text: str) -> None:
        """For people, not part of any answer."""
        print(text, file=sys.stderr, flush=True)

    @property
    def _stream(self) -> Callable[[str], None]:
        terminal = sys.stdout.isatty()

        def show(piece: str) -> None:
            if not self._as_json:
                print(printable(piece) if terminal else piece, end="", flush=True)

        return show

    def _show(self, answer: Answer) -> None:
        self.last = answer
        self.totals.add(answer)
        if self._as_json:
            print(json.dumps(answer.as_json()), flush=True)
            return
        print(flush=True)
        cost = short_stats(answer) if self._short else stats_line(answer)
        self.say(f"\x1b[2m{cost}\x1b[0m" if self._short and in_colour(sys.stderr) else cost)
