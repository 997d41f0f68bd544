"""A running chat: its conversation, and how answers are printed and counted."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

from edgemoe.chat.conversation import Conversation
from edgemoe.console.input import in_colour
from edgemoe.console.printable import printable
from edgemoe.console.sizes import format_size
from edgemoe.engine.engine import Engine
from edgemoe.engine.generate import Answer


def stats_line(answer: Answer) -> str:
    """Describes the cost of an answer in one line."""

    def percent(fraction: float | None) -> str:
        return "-" if fraction is None else f"{100 * fraction:.0f} %"

    per_token = "-" if answer.ssd_bytes_per_token is None else f"{answer.ssd_bytes_per_token / 1e6:.1f}"
    levels = " ".join(f"{level}:{count}" for level, count in answer.levels.items() if count)
    reused = f" ({answer.reused} above their schedule)" if answer.reused else ""
    on_cpu = f", {answer.cpu_experts} experts on the CPU" if answer.cpu_experts else ""
    retried = f", {answer.read_retries} read retries" if answer.read_retries else ""
    retention = ""
    if answer.effective_retention is not None and answer.effective_retention < 1:
        retention = f", {100 * answer.effective_retention:.0f} % at the highest level"
    return (
        f"{short_stats(answer)}, "
        f"hits VRAM {percent(answer.hit_rate['vram'])} DRAM {percent(answer.hit_rate['dram'])}, "
        f"{per_token} MB/token from SSD, in all {format_size(answer.bytes_read['ssd'])} from SSD and "
        f"{format_size(answer.bytes_read['dram'])} from DRAM{retried}, "
        f"levels {levels or '-'}{reused}{on_cpu}{retention}{_cost(answer)}, "
        f"peak {format_size(answer.peak_vram_bytes)} of {format_size(answer.vram_limit_bytes)} "
        f"(whole process {format_size(answer.peak_process_bytes)})"
    )


def _cost(answer: Answer) -> str:
    """Bits and predicted KL, where levels go by damage."""
    if answer.bits is None or answer.predicted_kl is None:
        return ""
    return f", {answer.bits:.2f} bits a weight for a predicted KL of {answer.predicted_kl:.2g}"


def short_stats(answer: Answer) -> str:
    """Describes the times and token counts of an answer."""
    tpot = "-" if answer.tpot_s is None else f"{1000 * answer.tpot_s:.0f} ms"
    return (
        f"TTFT {answer.ttft_s:.2f} s, TPOT {tpot}, {answer.new_tokens} tokens "
        f"({answer.cached_tokens} of {answer.prompt_tokens} prompt tokens reused)"
    )


@dataclass
class Totals:
    """Sums over a chat's answers, whose number has no bound."""

    answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0

    def add(self, answer: Answer) -> None:
        """Counts an answer."""
        self.answers += 1
        self.prompt_tokens += answer.prompt_tokens
        self.cached_tokens += answer.cached_tokens
        self.new_tokens += answer.new_tokens


class Chat:
    """The state of a chat that slash commands act on.

    Args:
        engine: of the conversation.
        conversation: answers the turns.
        as_json: prints answers as JSON lines.
        short: prints only times and token counts after an answer; /stats prints the full cost.
        answered: called after every answer.
    """

    def __init__(
        self,
        engine: Engine,
        conversation: Conversation,
        *,
        as_json: bool,
        short: bool,
        answered: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine, self.conversation, self._answered = engine, conversation, answered
        self._as_json, self._short = as_json, short
        self.totals = Totals()
        self.last: Answer | None = None
        """The last answer."""
        self.cancelled: str | None = None
        """The last question, if its answer was cancelled."""

    def ask(self, prompt: str) -> None:
        """Answers a turn on stdout. Ctrl-C drops the turn and keeps it for `regenerate`."""
        self.cancelled = None
        try:
            self._show(self.conversation.ask(prompt, self._stream))
        except KeyboardInterrupt:
            self.cancelled = prompt
            raise

    def regenerate(self) -> None:
        """Answers the cancelled question, or answers the last question again and replaces its answer."""
        if self.cancelled is not None:
            self.ask(self.cancelled)
            return
        if self.conversation.sampling.temperature == 0 and self.conversation.messages:
            self.say("at temperature 0 the answer stays the same; /set temperature 0.7 changes that")
        self._show(self.conversation.regenerate(self._stream))

    def say(self, text: str) -> None:
        """Prints a line for people on stderr."""
        print(text, file=sys.stderr, flush=True)

    def _stream(self, piece: str) -> None:
        if not self._as_json:
            print(printable(piece) if sys.stdout.isatty() else piece, end="", flush=True)

    def _show(self, answer: Answer) -> None:
        self.last = answer
        self.totals.add(answer)
        self._answered()
        if self._as_json:
            print(json.dumps(answer.as_json()), flush=True)
            return
        print(flush=True)
        cost = short_stats(answer) if self._short else stats_line(answer)
        self.say(f"\x1b[2m{cost}\x1b[0m" if self._short and in_colour(sys.stderr) else cost)
