"""The chat command: one prompt, turns piped in, or a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from edgemoe.conversation import Conversation
from edgemoe.engine import Engine
from edgemoe.generate import Answer
from edgemoe.settings import RunSettings, parse_levels
from edgemoe.sizes import format_size
from storage.errors import UserError


def stats_line(answer: Answer) -> str:
    """What an answer cost, for people."""

    def percent(share: float | None) -> str:
        return "-" if share is None else f"{100 * share:.0f} %"

    tpot = "-" if answer.tpot_s is None else f"{1000 * answer.tpot_s:.0f} ms"
    per_token = "-" if answer.ssd_bytes_per_token is None else f"{answer.ssd_bytes_per_token / 1e6:.1f}"
    levels = " ".join(f"{level}:{count}" for level, count in answer.levels.items() if count)
    reused = f" ({answer.reused} above their schedule)" if answer.reused else ""
    retention = ""
    if answer.effective_retention is not None and answer.effective_retention < 1:
        retention = f", {100 * answer.effective_retention:.0f} % at the highest level"
    return (
        f"TTFT {answer.ttft_s:.2f} s, TPOT {tpot}, {answer.new_tokens} tokens "
        f"({answer.cached_tokens} of {answer.prompt_tokens} prompt tokens reused), "
        f"hits VRAM {percent(answer.hit_rate['vram'])} DRAM {percent(answer.hit_rate['dram'])}, "
        f"{per_token} MB/token from SSD, in all {format_size(answer.bytes_read['ssd'])} from SSD and "
        f"{format_size(answer.bytes_read['dram'])} from DRAM, levels {levels or '-'}{reused}{retention}, "
        f"peak {format_size(answer.peak_vram_bytes)} of {format_size(answer.vram_limit_bytes)} "
        f"(whole process {format_size(answer.peak_process_bytes)})"
    )


def run_chat(engine: Engine, conversation: Conversation, prompt: str | None, *, as_json: bool) -> None:
    """Answers `prompt`, or every line of stdin as a turn of one conversation.

    A line `/set NAME VALUE` changes a setting for the turns after it.
    """
    interactive = prompt is None and sys.stdin.isatty()
    for turn in [prompt] if prompt is not None else _turns(interactive):
        try:
            if turn.split()[:1] == ["/set"]:
                _set(engine, turn.split()[1:], forgiving=interactive)
            else:
                _answer(conversation, turn, as_json=as_json)
        except KeyboardInterrupt:
            if not interactive:
                raise
            print("\n(cancelled)", file=sys.stderr)


def _turns(interactive: bool) -> Iterator[str]:
    """Lines typed or piped in, empty ones left out, until the end of input."""
    while True:
        try:
            line = input("> " if interactive else "")
        except EOFError:
            if interactive:
                print()
            return
        if line.strip():
            yield line


def _set(engine: Engine, words: list[str], *, forgiving: bool) -> None:
    """`levels 4/2` or `retention 0.9`; says what holds from now on. Mistakes at a terminal end nothing."""
    try:
        engine.configure(changed(engine.settings, words))
    except UserError as error:
        if not forgiving:
            raise
        print(error, file=sys.stderr)
    print(f"set: {engine.settings.name}", file=sys.stderr, flush=True)


def changed(settings: RunSettings, words: list[str]) -> RunSettings:
    """Settings with one changed, as typed after /set.

    Raises:
        UserError: it is neither levels nor retention, the value is no such thing, or it would change nothing.
    """
    try:
        name, value = words
        if name == "levels":
            return settings.with_(levels=parse_levels(value), exact=False)
        if name == "retention":
            if len(settings.levels) == 1:
                raise UserError(
                    f"/set retention {value} was wanted",
                    f"there is one level for all, {settings.levels[0]}",
                    "/set levels 4/2 or another pair first",
                )
            return settings.with_(retention=float(value))
    except ValueError:
        pass
    raise UserError(
        "/set levels 4/2 or /set retention 0.9 was wanted", f"got /set {' '.join(words)}", "Try again"
    )


def _answer(conversation: Conversation, prompt: str, *, as_json: bool) -> None:
    def show(piece: str) -> None:
        if not as_json:
            print(piece, end="", flush=True)

    answer = conversation.ask(prompt, show)
    if as_json:
        print(json.dumps(answer.as_json()), flush=True)
    else:
        print(flush=True)
        print(stats_line(answer), file=sys.stderr, flush=True)
