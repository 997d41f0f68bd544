"""Measures, at caches of several sizes, the bits that a rule reads from disk and the KL that it costs.

    python -m tools.cache_front --model STORE --reference CHECKPOINT --text BOOK [--cache 0.25 --cache 0.4 --cache 0.6]
        [--dram 0.3]

A cache is a fraction of the bytes that all experts take at 4 bits, and --dram one of a second tier beside it. New
tokens run one by one through the engine, with planes in memory used above their schedule (conservative reuse) except in
rows that are exact. Bytes are counted from the second window on.

Levels by damage have rows whose price counts what a missing plane takes from where it lies ("by place"), counts one in
DRAM as one on disk ("by memory"), or counts every plane, in memory or not. Beside them stand other uses of a miss:

- drop: an absent expert whose gate weight is below a fraction of the token's mean is skipped, the others are exact;
- instead: an absent expert below that fraction is replaced by the likeliest resident expert that is not chosen.

Prints JSON: a row a cache and rule. --plot draws KL over bits read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from edgemoe.engine.engine import Engine
from edgemoe.errors import EdgemoeError
from edgemoe.evaluate.lynx.cached import cached_quality
from edgemoe.evaluate.reference import LogitFile, Reference
from edgemoe.evaluate.score import Text, Windows, reference_quality, text_windows
from edgemoe.experts.step import Study
from edgemoe.experts.use import mean_bits
from edgemoe.models.open import open_model
from edgemoe.models.options.groups import Opening
from edgemoe.models.store_model import StoreModel
from edgemoe.models.tokenizer import load_tokenizer
from edgemoe.policy.bits import BITS_PER_WEIGHT
from edgemoe.policy.levels import LevelPolicy
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.base import ExpertKey
from tools.command_line import failed, make_parser

WINDOW = 256
EXACT_4 = RunSettings(levels=(4,), exact=True)


PLACES = ("by place", "by memory", "of every plane")
"""What the price of a level by damage counts: the seconds of missing planes, their bits, or the bits of all planes."""


@dataclass(frozen=True)
class Rule:
    """A row of the report.

    Args:
        name: of the rule.
        settings: of the engine, without eviction.
        drop: fraction of a token's mean gate weight below which an absent expert is skipped; 0: none is.
        instead: fraction below which a resident expert runs instead; 0: none does.
        counts: what the price of a level counts (PLACES).
    """

    name: str
    settings: RunSettings
    drop: float = 0.0
    instead: float = 0.0
    counts: str = PLACES[0]


def rules(bits: Sequence[float], *, dram: bool = False) -> list[Rule]:
    """Every rule of a report, without a second tier or with one."""
    four = (8, 4, 2, 0)
    places = PLACES if dram else (PLACES[0], PLACES[2])
    return [
        Rule("exact 4", EXACT_4),
        Rule("4/2 r 0.75", RunSettings(levels=(4, 2), critical="ceil")),
        *(
            Rule(f"{place} {each:g} bits", RunSettings(levels=four, bits=each), counts=place)
            for place in places
            for each in bits
        ),
        *(
            Rule(f"drop below {each:g}", RunSettings(levels=(4, 0), exact=True), drop=each)
            for each in (0.5, 1.0)
        ),
        *(Rule(f"instead below {each:g}", EXACT_4, instead=each) for each in (0.5, 1.0)),
    ]


class DropAbsent(LevelPolicy):
    """Level 4, and 0 for an absent expert whose gate weight is below a fraction of the token's mean."""

    def __init__(self, engine: Engine, fraction: float) -> None:
        super().__init__(
            engine.settings, sorted(engine.store.manifest.layers), engine.shape.experts_per_layer
        )
        self._engine, self._fraction = engine, fraction

    def levels(
        self,
        layer: int,
        chosen: torch.Tensor,
        gates: torch.Tensor,
        ranks: torch.Tensor | None,
        *,
        decode: bool,
    ) -> torch.Tensor:
        """Levels [T, k]."""
        there = resident(self._engine, layer)
        absent = torch.tensor([[expert not in there for expert in row] for row in chosen.tolist()])
        weak = gates < self._fraction * gates.mean(-1, keepdim=True)
        return torch.where(absent & weak, 0, 4)


def resident(engine: Engine, layer: int) -> set[int]:
    """The experts of a layer that are in memory."""
    return {key.expert for key in engine.vram.resident() if key.layer == layer}


def replace_absent(engine: Engine, fraction: float) -> None:
    """Makes every router choose the likeliest resident experts in the place of absent ones with little weight."""
    layers: Any = engine._parts.model.get_submodule("model.layers")
    for number, decoder in enumerate(layers):
        router = getattr(decoder.mlp, "gate", None)
        if router is not None and ExpertKey(number, 0) in engine._keys:
            router.register_forward_hook(_replacement(engine, number, fraction))


def _replacement(engine: Engine, layer: int, fraction: float) -> Any:
    def replace(module: Any, inputs: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits, gates, chosen = output
        there, chosen = resident(engine, layer), chosen.clone()
        for token, row in enumerate(chosen.tolist()):
            free = [e for e in logits[token].argsort(descending=True).tolist() if e in there and e not in row]
            weak = fraction * float(gates[token].mean())
            for slot, expert in enumerate(row):
                if expert not in there and float(gates[token, slot]) < weak and free:
                    chosen[token, slot] = free.pop(0)
        return logits, gates, chosen

    return replace


@contextmanager
def changes(engine: Engine, rule: Rule) -> Iterator[None]:
    """A block inside of which a rule holds; through modules, where the compiled kernel has no such rule."""
    policy: LevelPolicy | None = DropAbsent(engine, rule.drop) if rule.drop else None
    if rule.instead:
        replace_absent(engine, rule.instead)
    if rule.counts != PLACES[0]:
        policy = _counting_less(engine, rule.counts)
    with engine.studied(Study(policy=policy, modules=bool(rule.drop or rule.instead))):
        yield


def _counting_less(engine: Engine, counts: str) -> LevelPolicy:
    """The engine's policy, whose price counts less of where planes lie."""
    policy, layers = engine.rules.policy, sorted(engine.store.manifest.layers)
    tiers = replace(policy.tiers, dram=1.0) if policy.tiers and counts == PLACES[1] else None
    return LevelPolicy(policy.settings, layers, policy.experts, policy.damage, tiers)


def measure(
    store: StoreModel,
    windows: Windows,
    logits: LogitFile,
    rule: Rule,
    cache: float,
    eviction: str,
    dram: float = 0.0,
) -> dict[str, Any]:
    """Runs a rule with a cache and, where `dram` is above 0, a second tier; returns its row."""
    settings = rule.settings.with_(eviction=eviction)
    text = Text(windows, logits, lambda: None)
    run = cached_quality(store, settings, cache, text, partial(changes, rule=rule), dram)
    scheduled, quality = run.use.scheduled, run.quality
    bits = BITS_PER_WEIGHT[4] / store.form.bytes_at(4) / sum(scheduled.values())
    return {
        "cache": cache,
        "dram": dram,
        "rule": rule.name,
        "bits_read_per_expert": run.read_bytes * bits,
        "bits_from_dram_per_expert": run.dram_bytes * bits,
        "bits_scheduled": mean_bits(scheduled),
        "bits_computed": run.use.bits_computed,
        "skipped": scheduled.get(0, 0) / sum(scheduled.values()),
        "kl": quality.kl,
        "kl_stderr": quality.kl_stderr,
        "perplexity": quality.perplexity,
    }


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the rows."""
    store = open_model(Opening(options.model, device="cpu"))
    windows = text_windows(load_tokenizer(store.directory), options.text, options.tokens, WINDOW)
    reference = Reference(options.reference, store.shape.vocab, store.manifest.source)
    with LogitFile(sum(map(len, windows)), store.shape.vocab) as logits:
        reference_quality(reference, windows, logits, lambda: None)
        for cache in options.cache or (0.25, 0.4, 0.6):
            for rule in rules(options.bits or (4.25, 3.85, 3.45, 3.05, 2.75), dram=options.dram > 0):
                row = measure(store, windows, logits, rule, cache, options.eviction, options.dram)
                print(
                    f"{cache:g} {rule.name}: {row['bits_read_per_expert']:.2f} bits from disk, "
                    f"{row['bits_from_dram_per_expert']:.2f} from DRAM, KL {row['kl']:.5f}",
                    file=sys.stderr,
                )
                yield row


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws KL over bits read, a panel a cache."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    caches = sorted({row["cache"] for row in rows})
    figure, panels = plt.subplots(
        1, len(caches), figsize=(5 * len(caches), 4), sharey=True, layout="constrained"
    )
    for cache, axes in zip(caches, [panels] if len(caches) == 1 else panels, strict=True):
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row["cache"] == cache:
                name = (
                    row["rule"].rsplit(" ", 2)[0] if "bits" in row["rule"] else row["rule"].split(" below")[0]
                )
                lines.setdefault(name, []).append((row["bits_read_per_expert"], row["kl"]))
        for name, points in lines.items():
            axes.plot(*zip(*sorted(points), strict=True), "o-", label=name)
        axes.set(
            title=f"cache of {100 * cache:g} % of 4 bits",
            xlabel="bits read per wanted expert",
            yscale="log",
        )
        axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.supylabel("KL to bf16, nats a token")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = make_parser("tools.cache_front", __doc__)
    parser.add_argument("--model", type=Path, required=True, help="a calibrated store")
    parser.add_argument("--reference", type=Path, required=True, help="its checkpoint")
    parser.add_argument("--text", type=Path, required=True, help="to measure on")
    parser.add_argument("--tokens", type=int, default=2048, help="of the text")
    parser.add_argument(
        "--cache", type=float, action="append", help="fraction of all experts' bytes at 4 bits"
    )
    parser.add_argument("--dram", type=float, default=0.0, help="the same, of a second tier")
    parser.add_argument("--bits", type=float, action="append", help="mean bits of levels by damage")
    parser.add_argument("--eviction", default="lfru", help="as `edgemoe bench --eviction`")
    parser.add_argument("--plot", type=Path, help="PNG")
    options = parser.parse_args(argv)
    try:
        rows = list(run(options))
    except EdgemoeError as error:
        return failed("tools.cache_front", error)
    print(json.dumps(rows))
    if options.plot:
        draw(rows, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
