"""Times decode tokens under memory limits and of the same model with everything resident, in turn.

    python -m tools.timing.decode STORE --text FILE [--limits 2700MB] [--levels 4 4/2 4/2/0:3.3 2+1] [--tokens 300]

Levels may have mean bits per weight after a colon, and after a plus how many experts of a token are compensated, with
the limit of compensators in memory after an @. Every engine decodes the same tokens of the text. The tokens before the
last third warm the caches up; of the last third, blocks of tokens alternate between the engines, so that a change of
the machine's speed meets all of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

from transformers import AutoTokenizer

from edgemoe.console.sizes import parse_size
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.experts.records import StepTotals
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.step import Segment, Step
from edgemoe.policy.compensation import Compensation
from edgemoe.policy.settings import RunSettings, parse_levels
from tools.command_line import make_parser, positive

BLOCK = 10
"""Tokens of one engine before the next one's turn."""


@dataclass
class Arm:
    """One engine and the seconds of its tokens.

    Args:
        name: the name in the table.
        engine: the engine that decodes.
        sequence: the sequence of the engine.
    """

    name: str
    engine: Engine
    sequence: SequenceKV
    seconds: list[float] = field(default_factory=list)
    total: StepTotals = field(default_factory=StepTotals)

    def decode(self, tokens: Sequence[int]) -> None:
        """Appends tokens one by one."""
        with self.engine.recorded() as records:
            for token in tokens:
                start = time.perf_counter()
                self.engine.step(Step((Segment(self.sequence, (token,)),)))
                self.seconds.append(time.perf_counter() - start)
        self.total += StepTotals.of(records)

    def row(self, resident: Arm) -> str:
        """The row of the table; `resident` is the arm to compare with."""
        hits = self.total.transfers.vram_hits / self.total.transfers.requests
        read = self.total.transfers.ssd_bytes / len(self.seconds) / 1e6
        ratio = mean(self.seconds) / mean(resident.seconds)
        middle = median(self.seconds) / median(resident.seconds)
        times = f"{1000 * mean(self.seconds):.1f} | {1000 * median(self.seconds):.1f}"
        last = f"{self.total.use.bits_computed:.3f} | {100 * hits:.2f} % | {read:.1f} | {ratio:.3f} | {middle:.3f}"
        return f"| {self.name} | {times} | {last} |"


def settings_of(text: str, *, exact: bool = False) -> RunSettings:
    """Settings for levels as on the command line: "4", "4/2", "4/2/0:3.3", "2+1", "2+1@20MB".

    >>> settings_of("4/2:2.7+1@20MB").name, settings_of("2").exact
    ('4/2 2.7 bits, compensate 1, 20 MB', True)

    Args:
        text: levels.
        exact: compute levels exactly, resident planes above them or not; one level is exact always.
    """
    rest, _, compensated = text.partition("+")
    count, _, limit = compensated.partition("@")
    levels, _, bits = rest.partition(":")
    parsed = parse_levels(levels)
    return RunSettings(
        levels=parsed,
        bits=float(bits) if bits else None,
        exact=exact or len(parsed) == 1,
        speculate="auto",
        compensation=Compensation(int(count)) if count else None,
        compensators_limit=parse_size(limit) if limit else None,
    )


def measure(
    store: StoreModel, tokens: Sequence[int], rows: Sequence[RunSettings], limits: Sequence[int]
) -> list[Arm]:
    """Decodes with everything resident at the first settings, and with all settings under each limit."""
    arms = []
    cases = [(rows[0], None), *((settings, limit) for limit in limits for settings in rows)]
    for settings, limit in cases:
        plan = store.plan(vram_limit=limit, settings=settings, context=len(tokens) + 8)
        engine = Engine(store, plan, settings)
        engine.fill()
        name = "everything resident" if limit is None else f"{limit / 1e6:.0f} MB"
        arms.append(Arm(f"{settings.name}, {name}", engine, engine.sequences.new()))
    timed = len(tokens) // 3
    for arm in arms:
        arm.decode(tokens[:-timed])
        arm.seconds, arm.total = [], StepTotals()
    for start in range(len(tokens) - timed, len(tokens), BLOCK):
        for arm in arms:
            arm.decode(tokens[start : start + BLOCK])
    for arm in arms:
        arm.engine.close()
    return arms


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = make_parser("tools.timing.decode", __doc__)
    parser.add_argument("store", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="whose tokens are decoded")
    parser.add_argument("--limits", nargs="+", default=["2700MB"])
    parser.add_argument("--levels", nargs="+", default=["4", "4/2"])
    parser.add_argument("--exact", action="store_true", help="compute levels exactly in every row")
    parser.add_argument("--tokens", type=positive, default=300)
    given = parser.parse_args(argv)
    store = StoreModel.open(given.store)
    text = given.text.read_text(encoding="utf-8")
    tokens = AutoTokenizer.from_pretrained(store.directory).encode(text)[: given.tokens]
    rows = [settings_of(levels, exact=given.exact) for levels in given.levels]
    arms = measure(store, tokens, rows, [parse_size(limit) for limit in given.limits])
    print(
        "| | ms per token, mean | median | bits computed | hits | MB from disk | mean × resident | "
        "median × resident |\n"
        "|---|---|---|---|---|---|---|---|",
        *(arm.row(arms[0]) for arm in arms),
        sep="\n",
    )


if __name__ == "__main__":
    main()
