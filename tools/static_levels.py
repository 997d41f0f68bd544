"""Measures static allocations of bits beside `edgemoe eval`: one level for each expert or layer, whatever the token.

    python -m tools.static_levels --model STORE --reference CHECKPOINT --text BOOK --bits 4.25 --bits 3.45

Each allocation is made from the store's calibration, as a rule by damage makes it for a token, and read as often as
the calibration's tokens would read it:

- experts by damage: each expert's mean squared gate weight times its error and the layer's sensitivity;
- experts by load: how often each expert is chosen, times typical errors;
- layers by damage: the mean of a layer's experts.

Prints JSON: a row an allocation and number of bits. With --eval and --plot it draws these rows and those of a report of
`edgemoe eval --json` into one picture.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from edgemoe.engine.engine import Engine
from edgemoe.errors import EdgemoeError, UserError
from edgemoe.evaluate.metrics import QualityMeter
from edgemoe.evaluate.reference import LogitFile, Reference
from edgemoe.evaluate.score import Windows, reference_quality, text_windows
from edgemoe.experts.step import StepTotals
from edgemoe.experts.use import mean_bits
from edgemoe.models.calibration import calibration_of
from edgemoe.models.open import open_model
from edgemoe.models.options.groups import Opening
from edgemoe.models.store_model import StoreModel
from edgemoe.models.tokenizer import load_tokenizer
from edgemoe.policy.damage import TYPICAL_ERROR, Damage, PriceCurve, cheapest
from edgemoe.policy.levels import LevelPolicy
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.base import LEVELS
from tools.command_line import failed, make_parser

WINDOW = 512


class StaticPolicy(LevelPolicy):
    """A level for each expert, the same for every token.

    Args:
        settings: of the highest level.
        experts: in a layer.
        table: layer -> int64 [experts], levels.
    """

    def __init__(self, settings: RunSettings, experts: int, table: dict[int, torch.Tensor]) -> None:
        super().__init__(settings, sorted(table), experts)
        self._table = table

    def levels(
        self,
        layer: int,
        chosen: torch.Tensor,
        gates: torch.Tensor,
        scores: torch.Tensor | None,
        *,
        decode: bool,
    ) -> torch.Tensor:
        """The levels of the table, int64 [T, k]."""
        return self._table[layer][chosen]


def allocations(damage: Damage, bits: float) -> Iterator[tuple[str, dict[int, torch.Tensor]]]:
    """Yields the name and the levels of each allocation with a mean number of bits over the sample."""
    layers, experts = damage.table.shape[:2]
    flat = damage.chosen.reshape(layers, -1)
    uses = torch.zeros(layers, experts).scatter_add_(1, flat, torch.ones(flat.shape))
    squared = torch.zeros(layers, experts).scatter_add_(1, flat, damage.gates.square().reshape(layers, -1))
    each = (squared / uses.clamp_min(1)).unsqueeze(-1) * damage.table
    of_layer = (uses.unsqueeze(-1) * each).sum(1, keepdim=True) / uses.sum(1)[:, None, None]
    typical = torch.tensor([TYPICAL_ERROR[level] ** 2 for level in LEVELS])
    by_load = (uses / uses.mean(1, keepdim=True)).unsqueeze(-1) * typical
    found = {
        "experts by damage": each,
        "experts by load": by_load,
        "layers by damage": of_layer.expand(-1, experts, -1),
    }
    for name, costs in found.items():
        rows = costs[torch.arange(layers)[:, None], flat].reshape(-1, len(LEVELS))
        chosen = cheapest(costs, LEVELS, PriceCurve(rows, LEVELS).price(bits))
        yield name, dict(zip(damage.layers, chosen, strict=True))


def measure(
    store: StoreModel, windows: Windows, logits: LogitFile, damage: Damage, wanted: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """Yields a row for each allocation and number of bits: its KL to the reference, and the bits of new tokens."""
    settings = RunSettings.uniform(store.manifest.max_level)
    with Engine(store, store.plan(vram_limit=None, settings=settings, context=WINDOW), settings) as engine:
        sequence = engine.sequences.new()
        for bits in wanted:
            for name, table in allocations(damage, bits):
                policy = StaticPolicy(settings, store.shape.experts_per_layer, table)
                meter = QualityMeter()
                with engine.studied(policy=policy), engine.recorded() as records:
                    for number, window in enumerate(windows):
                        sequence.crop(0)
                        ours = engine.all_logits(sequence, window, decode=True)
                        meter.add(ours, window, logits.read(number))
                quality = meter.quality()
                yield {
                    "allocation": name,
                    "bits": bits,
                    "bits_per_weight_read": mean_bits(StepTotals.of(records).use.scheduled),
                    "kl": quality.kl,
                    "kl_stderr": quality.kl_stderr,
                    "perplexity": quality.perplexity,
                }


def draw(rows: Sequence[dict[str, Any]], report: dict[str, Any], path: Path) -> None:
    """Draws KL against bits of new tokens: the rows of a report, and static allocations."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in report["rows"]:
        if row["phase"] == "decode" and row["kl"] and row["study"] == "table":
            uniform = "/" not in row["levels"]
            name = "uniform" if uniform else f"{row['levels']}{' by damage' if row['bits'] else ''}"
            lines.setdefault(name, []).append((row["bits_per_weight_read"], row["kl"]))
    for row in rows:
        lines.setdefault(row["allocation"], []).append((row["bits_per_weight_read"], row["kl"]))
    for name, points in lines.items():
        style = "s" if name == "uniform" else "o-" if "/" in name else "x--"
        axes.plot(*zip(*sorted(points), strict=True), style, label=name)
    axes.set(xlabel="bits a weight read, new tokens", ylabel="KL to bf16, nats a token", yscale="log")
    axes.set_xlim(2.3, 5)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures all allocations.

    Raises:
        UserError: a store without a calibration.
    """
    store = open_model(Opening(options.model, device="cpu"))
    calibration = calibration_of(store.directory, store.manifest, store.manifest.max_level)
    if calibration is None:
        raise UserError("a store with a calibration", str(store.directory), "run `edgemoe calibrate` first")
    windows = text_windows(load_tokenizer(store.directory), options.text, options.tokens, WINDOW)
    reference = Reference(options.reference, store.shape.vocab, store.manifest.source)
    with LogitFile(sum(map(len, windows)), store.shape.vocab) as logits:
        reference_quality(reference, windows, logits, lambda: None)
        return list(measure(store, windows, logits, Damage.of(calibration), options.bits))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = make_parser("tools.static_levels", __doc__)
    parser.add_argument("--model", type=Path, required=True, help="a calibrated store")
    parser.add_argument("--reference", type=Path, required=True, help="its checkpoint")
    parser.add_argument("--text", type=Path, required=True, help="to measure KL on")
    parser.add_argument("--tokens", type=int, default=4096, help="of the text")
    parser.add_argument(
        "--bits", type=float, action="append", required=True, help="mean bits; repeat for more"
    )
    parser.add_argument("--eval", type=Path, help="a report of `edgemoe eval --json`, for the plot")
    parser.add_argument("--plot", type=Path, help="PNG; needs --eval")
    options = parser.parse_args(argv)
    try:
        rows = run(options)
    except EdgemoeError as error:
        return failed("tools.static_levels", error)
    print(json.dumps(rows))
    if options.plot and options.eval:
        draw(rows, json.loads(options.eval.read_text()), options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
