"""Counts the Python calls, functions and files of edgemoe's packages that a decode token passes.

    python -m tools.timing.count_calls [--model DIR] [--vram-limit 20MB] [--levels 8/4/2/0] [--missing N] [--top N]

Calls of all threads count: the engine's and the readers'. Generated functions (of dataclasses) and other packages do
not. A line for tokens with missing experts, one for tokens with everything resident, one for tokens with as many
missing experts as `--missing` says, or the nearest number, one for the token with most calls, and one for the median of
the third line's tokens, whose functions `--top` lists and whose files `--files` lists.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import AutoTokenizer

from edgemoe.console.sizes import parse_size
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.kv.step import Segment, Step
from edgemoe.models.demo import DEMO
from edgemoe.models.resolve import resolve_store
from edgemoe.policy.settings import RunSettings, parse_levels
from tools.checkout import ROOT
from tools.command_line import make_parser, positive

PACKAGES = tuple(str(ROOT / package) + "/" for package in ("edgemoe", "prefetch", "cache", "storage"))

CONTEXT = 256
"""Tokens, which leaves some forty experts resident at 22 MB."""

TEXT = "The old man walked along the river and thought about his daughter, who had left the village many years before."


@dataclass(frozen=True)
class Token:
    """The calls of one decode token.

    Args:
        missing: experts that were not resident at their level.
        calls: (file, function) -> calls.
    """

    missing: int
    calls: Counter[tuple[str, str]]

    @property
    def files(self) -> int:
        """Files of the packages."""
        return len({file for file, _ in self.calls})

    @property
    def total(self) -> int:
        """Calls of all functions."""
        return sum(self.calls.values())

    def line(self) -> str:
        """The counts in one line."""
        return f"{self.missing} missing experts: {self.total} calls, {len(self.calls)} functions, {self.files} files"


class CallCounter:
    """Counts calls in all threads that are started after it was made, while it is `on`."""

    def __init__(self) -> None:
        self.on, self.calls = False, Counter[tuple[str, str]]()
        threading.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.on and event == "call" and frame.f_code.co_filename.startswith(PACKAGES):
            self.calls[frame.f_code.co_filename, frame.f_code.co_qualname] += 1

    def start(self) -> None:
        """Begins a count in the calling thread and the others."""
        self.calls = Counter()
        self.on = True
        sys.setprofile(self._called)

    def stop(self) -> Counter[tuple[str, str]]:
        """Ends the count."""
        sys.setprofile(None)
        self.on = False
        return self.calls


def count_tokens(
    store: StoreModel, limit: int, settings: RunSettings, tokens: int, warm_up: int
) -> list[Token]:
    """Counts greedy tokens after a prompt, without the first `warm_up` of them."""
    counter, counted = CallCounter(), []
    plan = store.plan(vram_limit=limit, settings=settings, context=CONTEXT)
    prompt = AutoTokenizer.from_pretrained(store.directory).encode(TEXT)
    with Engine(store, plan, settings) as engine:
        sequence = engine.sequences.new()
        logits = engine.prefill(sequence, prompt)
        for _ in range(warm_up + tokens):
            step = Step((Segment(sequence, (int(logits.argmax()),)),))
            with engine.recorded() as records:
                counter.start()
                logits = engine.step(step)[0]
                calls = counter.stop()
            counts = records[0].transfers
            counted.append(Token(counts.requests - counts.vram_hits, calls))
    threading.setprofile(None)
    return counted[warm_up:]


def nearest(tokens: Sequence[Token], missing: int) -> list[Token]:
    """The tokens with the number of missing experts that is nearest to `missing`, by their number of calls."""
    number = min((token.missing for token in tokens), key=lambda each: abs(each - missing))
    return sorted((token for token in tokens if token.missing == number), key=lambda token: token.total)


def summary(tokens: Sequence[Token], missing: int) -> list[str]:
    """The report's lines; one of them tells about tokens with about so many missing experts."""
    lines, near = [], nearest(tokens, missing)
    for name, some in (
        ("with misses", [token for token in tokens if token.missing]),
        ("all resident", [token for token in tokens if not token.missing]),
        (f"with {near[0].missing} misses", near),
    ):
        if some:
            calls = sorted(token.total for token in some)
            files = max(token.files for token in some)
            median = calls[len(calls) // 2]
            lines.append(
                f"{len(some)} tokens {name}: median {median} calls, most {calls[-1]}, at most {files} files"
            )
    most = max(tokens, key=lambda token: token.total)
    return [*lines, f"most calls: {most.line()}"]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the report."""
    parser = make_parser("tools.timing.count_calls", __doc__)
    parser.add_argument(
        "--model", type=Path, default=DEMO, help="a store or a checkpoint; default: the demo model"
    )
    parser.add_argument("--vram-limit", default="20MB")
    parser.add_argument("--levels", default="8/4/2/0")
    parser.add_argument("--speculate", default="auto")
    parser.add_argument("--tokens", type=positive, default=64)
    parser.add_argument("--warm-up", type=int, default=32, help="tokens before the first that is counted")
    parser.add_argument("--missing", type=int, default=12, help="missing experts of the third line's tokens")
    parser.add_argument("--top", type=int, default=0, help="functions to list")
    parser.add_argument("--files", action="store_true", help="list files and their calls")
    given = parser.parse_args(argv)
    store = StoreModel.open(resolve_store(given.model))
    settings = RunSettings(levels=parse_levels(given.levels), speculate=given.speculate)
    tokens = count_tokens(store, parse_size(given.vram_limit), settings, given.tokens, given.warm_up)
    print(*summary(tokens, given.missing), sep="\n")
    near = nearest(tokens, given.missing)
    token = near[len(near) // 2]
    print(token.line())
    for (file, function), calls in token.calls.most_common(given.top):
        print(f"{calls:6} {Path(file).relative_to(ROOT)} {function}")
    if given.files:
        files = Counter[str]()
        for (file, _), calls in token.calls.items():
            files[file] += calls
        for file, calls in files.most_common():
            print(f"{calls:6} {Path(file).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
