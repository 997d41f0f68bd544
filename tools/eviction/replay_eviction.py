"""Compares eviction policies on the requests of a model that ran on a text.

    python -m tools.eviction.replay_eviction --model CHECKPOINT --text FILE [--levels 4/2] [--save-trace FILE] [--json]
    python -m tools.eviction.replay_eviction --trace FILE [--resident 0.125 0.25 0.5] [--json]

Replays a trace of requests (tools/eviction/routing_trace.py) through the cache's tier, in the engine's resident form
with the engine's split of bytes into blocks, with every policy at several sizes: bytes as a fraction of all experts'
bytes at 4 bits. Prints the fraction of requests that were hits, and the fraction of the requested bits that had
to be read. `belady` knows the future and evicts the expert whose next use is farthest: no policy has more hits
where all requests are at one level. With several levels it still orders whole experts, so it is no bound there.
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

from edgemoe.cache.base import EvictionPolicy, Lease
from edgemoe.cache.plane_tier import PlaneTier
from edgemoe.cache.policies import POLICIES, make_policy
from edgemoe.console.output_files import require_folders
from edgemoe.errors import EdgemoeError, UserError
from edgemoe.memory.block_counts import count_blocks, fraction_at
from edgemoe.memory.split import MINIMUM_EXPERTS
from edgemoe.policy.bits import BITS_PER_WEIGHT
from edgemoe.policy.settings import CRITICAL, RunSettings, parse_levels
from edgemoe.storage.base import ExpertKey
from edgemoe.storage.record.forms import PlaneForm
from edgemoe.storage.record.layout import LAYOUTS
from edgemoe.storage.record.offsets import MatrixSpec, RecordGeometry
from tools.command_line import failed, make_parser
from tools.eviction.routing_trace import Group, Trace, TraceSource, read_trace, record, write_trace

BELADY = "belady"
RECORDING = {
    "levels": "4",
    "retention": 0.75,
    "critical": CRITICAL[0],
    "tokens": 4096,
    "context": 512,
    "prompt": 64,
}
"""Options of a recording, with their defaults."""


def _form(gate_up: MatrixSpec, *others: MatrixSpec) -> PlaneForm:
    """The form of edgemoe's own kernel on a CPU, for experts of these matrices."""
    layout = LAYOUTS["cpu-avx2-paired"]
    return PlaneForm(RecordGeometry((gate_up, *others), max_level=8), layout, layout)


_SIZED = _form(MatrixSpec.of("gate_up", 1536, 2048), MatrixSpec.of("down", 2048, 768))
"""Experts of Qwen3-30B-A3B: their planes' sizes decide how many blocks fit."""

_REPLAYED = _form(MatrixSpec.of("gate_up", 16, 64))
"""The smallest experts, which the tier holds in their place: no byte of a weight is moved."""


@dataclass(frozen=True)
class Outcome:
    """The result of one policy at one size.

    Args:
        policy: name of the policy.
        resident: bytes of the tier, as a fraction of all experts' bytes at 4 bits.
        blocks: kind -> blocks.
        requests: experts requested, each once a step and layer.
        hits: requests that needed no read.
        hit_rate: hits a request.
        read_share: bits read for each bit that all requests would have read without a cache.
    """

    policy: str
    resident: float
    blocks: dict[str, int]
    requests: int
    hits: int
    hit_rate: float
    read_share: float


class Belady(EvictionPolicy):
    """Evicts the expert whose next use is farthest first (Belady 1966); `advance` counts the steps."""

    def __init__(self, trace: list[Group]) -> None:
        self._uses: dict[ExpertKey, list[int]] = defaultdict(list)
        for step, group in enumerate(trace):
            for key in group:
                self._uses[key].append(step)
        self._step = -1
        self._resident: set[ExpertKey] = set()

    def advance(self) -> None:
        """Moves on to the next group of the trace; call it before the group is served."""
        self._step += 1

    def used(self, keys: Iterable[ExpertKey]) -> None:
        """Does nothing: the order depends on the future only."""

    def arrived(self, key: ExpertKey) -> None:
        """Adds a resident expert."""
        self._resident.add(key)

    def forgotten(self, key: ExpertKey) -> None:
        """Removes an evicted expert."""
        self._resident.remove(key)

    def candidates(self) -> Iterator[ExpertKey]:
        """Yields the resident experts, the farthest next use first."""
        return iter(sorted(self._resident, key=self._next_use, reverse=True))

    def _next_use(self, key: ExpertKey) -> float:
        uses = self._uses[key]
        after = bisect_right(uses, self._step)
        return uses[after] if after < len(uses) else float("inf")


def blocks_for(source: TraceSource, resident: float) -> dict[str, int]:
    """The engine's blocks for a tier of a fraction of all experts' bytes at 4 bits: kind -> blocks."""
    experts, settings = source.layers * source.experts, source.settings
    fraction = partial(
        fraction_at, settings, layers=source.layers, experts=source.experts, top_k=source.top_k
    )
    kinds = _SIZED.kinds_at(settings.levels[0])
    fractions = {kind: fraction(kind.level) for kind in kinds}
    size = int(resident * experts * _SIZED.bytes_at(4))
    if size < MINIMUM_EXPERTS * sum(kind.size for kind in kinds):
        least = MINIMUM_EXPERTS * sum(kind.size for kind in kinds) / (experts * _SIZED.bytes_at(4))
        found = f"--resident {resident:g} of {experts}"
        raise UserError(
            f"bytes for {MINIMUM_EXPERTS} experts", found, f"write --resident {least:.3g} or more"
        )
    return count_blocks(size, fractions, experts, MINIMUM_EXPERTS)


def replay(
    trace: list[Group], policy: Callable[[], EvictionPolicy], blocks: dict[str, int]
) -> tuple[int, float]:
    """Serves a trace from an empty tier in the order of prefetch.fetcher: pins hits, then reads misses.

    Args:
        trace: requests.
        policy: makes the policies of the tier.
        blocks: kind -> blocks of the tier.

    Returns:
        requests that needed no read; bits per weight read, summed over requests.

    Raises:
        UserError: the tier is too small for one expert.
    """
    made: list[EvictionPolicy] = []

    def make() -> EvictionPolicy:
        made.append(policy())
        return made[-1]

    tier = PlaneTier(_REPLAYED, blocks, make, device="cpu", name="replay")
    hits, bits = 0, 0.0
    for group in trace:
        for each in made:
            if isinstance(each, Belady):
                each.advance()
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
    """Publishes an expert, releasing the oldest leases until blocks are free; returns bits read a weight."""
    while (reservation := tier.reserve(key, level)) is None:
        if pinned:
            tier.release(pinned.popleft())
        else:
            raise UserError(f"blocks for one expert at {level} bits", "none", "raise --resident")
    resident = reservation.held.level if reservation.held else 0
    pinned.append(tier.publish(reservation))
    return BITS_PER_WEIGHT[level] - BITS_PER_WEIGHT[resident]


def compare(trace: Trace, sizes: list[float]) -> list[Outcome]:
    """Replays a trace with every policy and Belady's at every size, as blocks_for.

    Raises:
        UserError: a size is too small for two experts.
    """
    groups = trace.groups
    requests = sum(map(len, groups))
    requested_bits = sum(BITS_PER_WEIGHT[level] for group in groups for level in group.values())
    makers: dict[str, Callable[[], EvictionPolicy]] = {name: partial(make_policy, name) for name in POLICIES}
    makers[BELADY] = partial(Belady, groups)
    outcomes = []
    for resident in sizes:
        blocks = blocks_for(trace.source, resident)
        for name, make in makers.items():
            hits, bits = replay(groups, make, blocks)
            rates = hits / requests, bits / requested_bits
            outcomes.append(Outcome(name, resident, blocks, requests, hits, *rates))
    return outcomes


def print_table(outcomes: list[Outcome]) -> None:
    """Prints a row for each size and a column for each policy: hit rate, and the fraction of bits read."""
    table = Table("resident", *dict.fromkeys(o.policy for o in outcomes))
    for resident in dict.fromkeys(o.resident for o in outcomes):
        row = [o for o in outcomes if o.resident == resident]
        table.add_row(f"{resident:g}", *(f"{o.hit_rate:.3f} ({o.read_share:.3f})" for o in row))
    console = Console()
    console.print(
        f"{outcomes[0].requests} requests; hit rate (fraction of the requested bits that were read)"
    )
    console.print(table)


def load(given: argparse.Namespace) -> Trace:
    """Returns the trace that the command line names; records it if the command line names a model.

    Raises:
        UserError: --text is missing, or an option of a recording stands beside --trace.
    """
    recording = {name: value for name in RECORDING if (value := getattr(given, name)) is not None}
    if given.trace:
        useless = [*recording, *(name for name in ("text", "save_trace") if getattr(given, name))]
        if useless:
            raise UserError(
                "--trace alone", f"options of a recording: {', '.join(useless)}", "leave them out"
            )
        return read_trace(given.trace)
    if given.text is None:
        raise UserError("a text for the model", "none", "add --text FILE")
    require_folders(given.save_trace)
    options: dict[str, Any] = RECORDING | recording
    chosen = {name: options.pop(name) for name in ("retention", "critical")}
    settings = RunSettings(levels=parse_levels(options.pop("levels")), **chosen)
    trace = record(given.model, given.text, settings, **options)
    if given.save_trace:
        write_trace(trace, given.save_trace)
    return trace


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = make_parser("tools.eviction.replay_eviction", __doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, help="a checkpoint to record a trace with")
    source.add_argument("--trace", type=Path, help="a trace recorded before")
    parser.add_argument("--text", type=Path, help="a text file that the model reads")
    for name, default in RECORDING.items():
        parser.add_argument(f"--{name}", type=type(default), help=f"of the recording; default {default}")
    parser.add_argument("--save-trace", type=Path)
    parser.add_argument("--resident", type=float, nargs="+", default=[0.125, 0.25, 0.5, 0.75])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    try:
        outcomes = compare(load(given), given.resident)
    except EdgemoeError as error:
        return failed("tools.eviction.replay_eviction", error)
    if given.json:
        print(json.dumps({"rows": [asdict(outcome) for outcome in outcomes]}))
    else:
        print_table(outcomes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
