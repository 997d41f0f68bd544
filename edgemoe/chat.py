"""The chat command: one prompt, turns piped in, or a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from edgemoe.conversation import Conversation
from edgemoe.generate import Answer
from edgemoe.sizes import format_size


def stats_line(answer: Answer) -> str:
    """What an answer cost, for people."""

    def percent(share: float | None) -> str:
        return "-" if share is None else f"{100 * share:.0f} %"

    tpot = "-" if answer.tpot_s is None else f"{1000 * answer.tpot_s:.0f} ms"
    per_token = "-" if answer.ssd_bytes_per_token is None else f"{answer.ssd_bytes_per_token / 1e6:.1f}"
    levels = " ".join(f"{level}:{count}" for level, count in answer.levels.items() if count)
    return (
        f"TTFT {answer.ttft_s:.2f} s, TPOT {tpot}, {answer.new_tokens} tokens "
        f"({answer.cached_tokens} of {answer.prompt_tokens} prompt tokens reused), "
        f"hits VRAM {percent(answer.hit_rate['vram'])} DRAM {percent(answer.hit_rate['dram'])}, "
        f"{per_token} MB/token from SSD, levels {levels or '-'}, "
        f"peak {format_size(answer.peak_vram_bytes)} of {format_size(answer.vram_limit_bytes)} "
        f"(whole process {format_size(answer.peak_process_bytes)})"
    )


def run_chat(conversation: Conversation, prompt: str | None, *, as_json: bool) -> None:
    """Answers `prompt`, or every line of stdin as a turn of one conversation."""
    interactive = prompt is None and sys.stdin.isatty()
    for turn in [prompt] if prompt is not None else _turns(interactive):
        try:
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
