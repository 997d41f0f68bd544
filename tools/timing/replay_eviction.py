"""Eviction policies side by side: what each would have kept while a model ran on a text.

    python -m tools.timing.replay_eviction --model CHECKPOINT --text FILE [--levels 4/2] [--save-trace FILE] [--json]
    python -m tools.timing.replay_eviction --trace FILE [--resident 0.125 0.25 0.5] [--json]

Replays a trace of requests (tools/timing/routing_trace.py) through the cache's own tier, in a CPU's resident form, with
every policy at several sizes. Prints the share of requests that were hits, and the share of the asked bits that had to
be read. `belady` knows the future and evicts what is needed last: no policy has more hits where all requests are
at one level. With several levels it goes by experts, so it is a mark to aim at, not a bound.
"""

from __future__ import annotations

import argparse
import json
import sys
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cache.base import EvictionPolicy, Lease
from cache.plane_tier import PlaneTier
from cache.policies import POLICIES, make_policy
from edgemoe.console.output_files import require_folders
from edgemoe.policy.schedule import BITS_PER_WEIGHT
from edgemoe.policy.settings import RunSettings, parse_levels
from storage.base import ExpertKey
from storage.errors import EdgemoeError, UserError
from storage.forms import P0, P4, MergedForm
from storage.layout import LAYOUTS
from storage.record import MatrixSpec, RecordGeometry
from tools.timing.routing_trace import Group, read_trace, record, write_trace

BELADY = "belady"
RECORDING = {"levels": "4", "retention": 0.75, "tokens": 4096, "context": 512, "prompt": 64}
"""Options that say how a trace is made, with their defaults."""


@dataclass(frozen=True)
class Outcome:
    """One policy at one size.

    Args:
        policy: its name.
        resident: experts' blocks, as a share of the experts in the trace.
        blocks: kind -> blocks.
        requests: experts asked for, once a step and layer.
        hits: requests that needed no read.
        hit_rate: hits per request.
        read_share: bits read per bit that all requests would have read without a cache.
    """

    policy: str
    resident: float
    blocks: dict[str, int]
    requests: int
    hits: int
    hit_rate: float
    read_share: float


class Belady(EvictionPolicy):
    """The expert whose next use is farthest goes first (Belady 1966). Counts steps by `advance`."""

    def __init__(self, trace: list[Group]) -> None:
        self._uses: dict[ExpertKey, list[int]] = defaultdict(list)
        for step, group in enumerate(trace):
            for key in group:
                self._uses[key].append(step)
        self._step = -1
        self._resident: set[ExpertKey] = set()

    def advance(self) -> None:
        """The next group of the trace is being served."""
        self._step += 1

    def used(self, keys: Iterable[ExpertKey]) -> None:
        """Ignores uses: the future alone decides."""

    def arrived(self, key: ExpertKey) -> None:
        """See EvictionPolicy."""
        self._resident.add(key)

    def forgotten(self, key: ExpertKey) -> None:
        """See EvictionPolicy."""
        self._resident.remove(key)

    def candidates(self) -> Iterator[ExpertKey]:
        """See EvictionPolicy."""
        return iter(sorted(self._resident, key=self._next_use, reverse=True))

    def _next_use(self, key: ExpertKey) -> float:
        uses = self._uses[key]
        after = bisect_right(uses, self._step)
        return uses[after] if after < len(uses) else float("inf")


def blocks_for(trace: list[Group], resident: float) -> dict[str, int]:
    """A tier for a share of the trace's experts, with p0 for as many of them as its requests are at level 8."""
    experts = len(set().union(*trace))
    asked = [level for group in trace for level in group.values()]
    p4 = max(round(resident * experts), 1)
    return {P4: p4, P0: -(-p4 * asked.count(8) // len(asked))}


def replay(
    trace: list[Group], policy: Callable[[], EvictionPolicy], blocks: dict[str, int]
) -> tuple[int, float]:
    """Serves a trace from a tier that is empty at first, as prefetch.fetcher does: hits pinned, then misses.

    Args:
        trace: what is asked for.
        policy: makes one.
        blocks: kind -> blocks of the tier.

    Returns:
        requests that needed no read; bits per weight read, summed over requests.

    Raises:
        UserError: one expert does not fit.
    """
    # No byte of a weight is moved, so the smallest expert there is stands for all.
    geometry = RecordGeometry((MatrixSpec.of("gate_up", 16, 64),), max_level=8)
    form = MergedForm(geometry, LAYOUTS["cpu-generic"], LAYOUTS["cpu-generic"])
    made: list[EvictionPolicy] = []

    def make() -> EvictionPolicy:
        made.append(policy())
        return made[-1]

    tier = PlaneTier(form, blocks, make, device="cpu", name="replay")
    hits, bits = 0, 0.0
    for group in trace:
        for one in made:
            if isinstance(one, Belady):
                one.advance()
        leases = {key: tier.acquire(key, group[key]) for key in sorted(group)}
        pinned = deque(lease for lease in leases.values() if lease)
        hits += len(pinned)
        for key in (key for key, lease in leases.items() if lease is None):
            bits += _fetch(tier, key, group[key], pinned)
        for lease in pinned:
            tier.release(lease)
    tier.close()
    return hits, bits


def _fetch(tier: PlaneTier, key: ExpertKey, level: int, pinned: deque[Lease]) -> float:
    """Brings an expert in, letting the oldest leases go where there is no room. Returns bits a weight read."""
    while (reservation := tier.reserve(key, level)) is None:
        if pinned:
            tier.release(pinned.popleft())
        elif tier.level_of(key):
            tier.drop(key)
        else:
            raise UserError(
                f"room for one expert at {level} bits was wanted", "there is none", "Raise --resident"
            )
    held = reservation.held.level if reservation.held else 0
    pinned.append(tier.publish(reservation))
    return BITS_PER_WEIGHT[level] - BITS_PER_WEIGHT[held]


def compare(trace: list[Group], sizes: list[float]) -> list[Outcome]:
    """Every policy, and Belady's, at every size: a share of the experts in the trace.

    Raises:
        UserError: a size that is not above 0.
    """
    if min(sizes) <= 0:
        raise UserError("sizes above 0 were wanted", f"got {min(sizes):g}", "Try --resident 0.25 0.5")
    requests = sum(map(len, trace))
    asked = sum(BITS_PER_WEIGHT[level] for group in trace for level in group.values())
    makers: dict[str, Callable[[], EvictionPolicy]] = {name: partial(make_policy, name) for name in POLICIES}
    makers[BELADY] = partial(Belady, trace)
    outcomes = []
    for resident in sizes:
        blocks = blocks_for(trace, resident)
        for name, make in makers.items():
            hits, bits = replay(trace, make, blocks)
            outcomes.append(Outcome(name, resident, blocks, requests, hits, hits / requests, bits / asked))
    return outcomes


def print_table(outcomes: list[Outcome]) -> None:
    """One row a size, one column a policy: hit rate, and the share of bits read."""
    table = Table("resident", *dict.fromkeys(o.policy for o in outcomes))
    for resident in dict.fromkeys(o.resident for o in outcomes):
        row = [o for o in outcomes if o.resident == resident]
        table.add_row(f"{resident:g}", *(f"{o.hit_rate:.3f} ({o.read_share:.3f})" for o in row))
    console = Console()
    console.print(f"{outcomes[0].requests} requests; hit rate (share of the asked bits that were read)")
    console.print(table)


def load(given: argparse.Namespace) -> list[Group]:
    """The trace that the command line names, recorded now if it names a model."""
    asked = {name: value for name in RECORDING if (value := getattr(given, name)) is not None}
    if given.trace:
        useless = [*asked, *(name for name in ("text", "save_trace") if getattr(given, name))]
        if useless:
            raise UserError("a recorded trace was asked for", f"{useless} say how to record one", "Drop them")
        return read_trace(given.trace)
    if given.text is None:
        raise UserError("a text for the model was wanted", "none is given", "Add --text FILE")
    require_folders(given.save_trace)
    options: dict[str, Any] = RECORDING | asked
    settings = RunSettings(levels=parse_levels(options.pop("levels")), retention=options.pop("retention"))
    trace = record(given.model, given.text, settings, **options)
    if given.save_trace:
        write_trace(trace, given.save_trace)
    return trace


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, help="a checkpoint to record a trace with")
    source.add_argument("--trace", type=Path, help="a trace recorded before")
    parser.add_argument("--text", type=Path, help="what the model reads")
    for name, default in RECORDING.items():
        parser.add_argument(f"--{name}", type=type(default), help=f"of the recording; default {default}")
    parser.add_argument("--save-trace", type=Path)
    parser.add_argument("--resident", type=float, nargs="+", default=[0.125, 0.25, 0.5, 0.75])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    try:
        outcomes = compare(load(given), given.resident)
    except EdgemoeError as error:
        print(f"replay_eviction: {error}", file=sys.stderr)
        return error.exit_code
    if given.json:
        print(json.dumps({"rows": [asdict(outcome) for outcome in outcomes]}))
    else:
        print_table(outcomes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
