"""Measures precision that follows hotness: DynaExq's experiments on quality, with a model's own domains of text.

    python -m tools.hotness --model STORE --reference CHECKPOINT --text prose=A.txt --text code=B.txt [--hot 4 --hot 12]

Every text's first --tokens tokens count what its routers choose, the next ones measure; new tokens run one by one.
Prints JSON, a row a measurement:

- overlap: of the ten hottest experts of each layer in two texts (Jaccard, mean over layers; DynaExq figure 2);
- traffic: the fraction of gate mass that the n hottest experts of a layer carry;
- demotion: KL with so many experts of each layer at the low level, the coldest, random ones or the hottest (figure 3);
- policy: KL of static hot sets, counted in the same text or in another one, and of hot sets that follow use;
- change: KL of the tokens after one text gives way to another, by their place behind the change.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgemoe.engine.engine import Engine
from edgemoe.errors import EdgemoeError, UserError
from edgemoe.evaluate.metrics import kl_of
from edgemoe.evaluate.reference import LogitFile, Reference
from edgemoe.evaluate.score import Windows, reference_quality, text_windows
from edgemoe.experts.step import Study
from edgemoe.experts.use import ChoiceCounts
from edgemoe.kv.step import Segment, Step
from edgemoe.models.open import open_model
from edgemoe.models.options.groups import Opening
from edgemoe.models.tokenizer import load_tokenizer
from edgemoe.policy.hotness import SIGNALS, Hotness
from edgemoe.policy.settings import RunSettings
from tools.command_line import failed, make_parser

WINDOW = 256

TOP = 10

BEHIND = (0, 50, 100, 150, 200, 300, 512)
"""Borders of the places behind a change of text, tokens."""


@dataclass(frozen=True)
class Text:
    """A domain: windows that are counted, windows that are measured, and the reference's logits of these."""

    name: str
    counted: Windows
    measured: Windows
    logits: LogitFile


class Measurement:
    """One engine with every expert in memory, and the levels that settings ask for.

    Args:
        engine: of the model.
        levels: of hot experts, and of the others.
        hotness: settings that all rows share.
    """

    def __init__(self, engine: Engine, levels: tuple[int, int], hotness: Hotness) -> None:
        self._engine, self._levels, self._hotness = engine, levels, hotness
        self._sequence = engine.sequences.new()
        self._layers = sorted(engine.store.manifest.layers)
        self.experts = engine.shape.experts_per_layer

    def counted(self, windows: Windows) -> np.ndarray:
        """The gate mass [layers, experts] of windows at the high level."""
        self._start(RunSettings.uniform(self._levels[0]))
        choices = ChoiceCounts(self._engine.shape.layers, self.experts)
        with self._engine.studied(Study(choices=True)), self._engine.recorded() as records:
            self._run(windows)
        for record in records:
            assert record.choices
            choices.merge(record.choices)
        return choices.mass[self._layers]

    def uniform(self, level: int, text: Text) -> np.ndarray:
        """KL of each token with every expert at a level."""
        self._start(RunSettings.uniform(level))
        return self._kl(text)

    def static(self, scores: np.ndarray, hot: int, text: Text) -> np.ndarray:
        """KL of each token with the `hot` best experts of each layer by scores [layers, experts] at the high level."""
        self._follow(hot=hot)
        self._fix(scores, hot)
        return self._kl(text)

    def _fix(self, scores: np.ndarray, hot: int) -> None:
        best = np.argsort(-scores, axis=1, kind="stable")[:, :hot]
        assert self._engine.rules.hot
        self._engine.rules.hot.fix(
            {layer: {*row} for layer, row in zip(self._layers, best.tolist(), strict=True)}
        )

    def online(self, signal: str, hot: int, texts: Sequence[Text]) -> list[np.ndarray]:
        """KL of each token of texts one after another, with hot sets that follow use."""
        self._follow(hot=hot, signal=signal)
        return [self._kl(text) for text in texts]

    def _follow(self, *, hot: int, signal: str = SIGNALS[0]) -> None:
        hotness = Hotness(
            signal=signal,
            half_life=self._hotness.half_life,
            interval=self._hotness.interval,
            margin=self._hotness.margin,
            experts=hot,
            settled=True,
        )
        self._start(RunSettings(levels=self._levels, hotness=hotness))

    def _start(self, settings: RunSettings) -> None:
        self._engine.configure(settings)
        self._engine.forget_experts()

    def _kl(self, text: Text) -> np.ndarray:
        kept = []
        for number, ours in enumerate(self._run(text.measured)):
            theirs = text.logits.read(number).float().log_softmax(-1)
            kept.append(kl_of(ours.log_softmax(-1), theirs)[:-1])
        return torch.cat(kept).numpy()

    def _run(self, windows: Windows) -> list[torch.Tensor]:
        logits = []
        for window in windows:
            self._sequence.crop(0)
            rows = [self._engine.step(Step((Segment(self._sequence, (token,)),))) for token in window]
            logits.append(torch.cat(rows))
        return logits


def rows_of(
    texts: Sequence[Text],
    measure: Measurement,
    levels: tuple[int, int],
    hot: Sequence[int],
    parts: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """Yields the rows of the wanted parts."""
    heat = {text.name: measure.counted(text.counted) for text in texts}
    high = {text.name: measure.uniform(levels[0], text) for text in texts}
    low = {text.name: measure.uniform(levels[1], text) for text in texts}

    def quality(text: Text, kl: np.ndarray, **more: Any) -> dict[str, Any]:
        up, down = (float(of[text.name].mean()) for of in (high, low))
        kls = {"kl": float(kl.mean()), "kl_stderr": float(kl.std(ddof=1) / len(kl) ** 0.5)}
        recovered = (down - kls["kl"]) / (down - up)
        return more | {"text": text.name, **kls, "kl_high": up, "kl_low": down, "gap_recovered": recovered}

    if "overlap" in parts:
        yield from overlaps(texts, heat, hot)
    if "demotion" in parts:
        for text in texts:
            yield from demotions(text, heat, measure, quality)
    if "policy" in parts:
        for text in texts:
            for most in hot:
                for source in texts:
                    name = "static, same text" if source is text else f"static, {source.name}"
                    kl = measure.static(heat[source.name], most, text)
                    yield quality(text, kl, part="policy", hot=most, policy=name)
                for signal in SIGNALS:
                    (kl,) = measure.online(signal, most, [text])
                    yield quality(text, kl, part="policy", hot=most, policy=f"online {signal}")
    if "change" in parts:
        yield from changes(texts, heat, measure, hot)


def overlaps(
    texts: Sequence[Text], heat: dict[str, np.ndarray], hot: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yields the overlap of every two texts' hottest experts, and what the hottest ones carry."""
    top = {name: np.argsort(-mass, axis=1, kind="stable")[:, :TOP] for name, mass in heat.items()}
    for i, one in enumerate(texts):
        for other in texts[i + 1 :]:
            both = [
                len({*a} & {*b}) / len({*a} | {*b})
                for a, b in zip(top[one.name].tolist(), top[other.name].tolist(), strict=True)
            ]
            yield {"part": "overlap", "texts": [one.name, other.name], "jaccard": float(np.mean(both))}
        sorted_mass = -np.sort(-heat[one.name], axis=1)
        shares = sorted_mass.cumsum(1) / sorted_mass.sum(1, keepdims=True)
        for most in hot:
            share = float(shares[:, most - 1].mean())
            yield {"part": "traffic", "text": one.name, "hot": most, "fraction": share}


def demotions(
    text: Text, heat: dict[str, np.ndarray], measure: Measurement, quality: Any
) -> Iterator[dict[str, Any]]:
    """Yields KL with quarters of the experts at the low level, in three orders."""
    mass = heat[text.name]
    orders = {
        "coldest": mass,
        "random": np.random.default_rng(0).random(mass.shape),
        "hottest": -mass,
    }
    for demoted in (measure.experts * i // 4 for i in range(5)):
        for order, scores in orders.items():
            kl = measure.static(scores, measure.experts - demoted, text)
            yield quality(text, kl, part="demotion", demoted=demoted, order=order)


def changes(
    texts: Sequence[Text], heat: dict[str, np.ndarray], measure: Measurement, hot: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yields KL behind a change of text, of hot sets that follow use and of both static ones."""
    for before in texts:
        for after in texts:
            if before is after:
                continue
            for most in hot:
                found = {f"online {s}": measure.online(s, most, [before, after])[1] for s in SIGNALS}
                for source in (before, after):
                    name = "static, text before" if source is before else "static, text behind"
                    found[name] = measure.static(heat[source.name], most, after)
                for policy, kl in found.items():
                    places = [float(kl[a:b].mean()) for a, b in pairwise(BEHIND) if len(kl) > a]
                    yield {
                        "part": "change",
                        "before": before.name,
                        "behind": after.name,
                        "hot": most,
                        "policy": policy,
                        "kl": float(kl.mean()),
                        "kl_by_place": places,
                    }


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the rows."""
    store = open_model(Opening(options.model, device="cpu"))
    tokenizer = load_tokenizer(store.directory)
    reference = Reference(options.reference, store.shape.vocab, store.manifest.source)
    window = min(WINDOW, options.tokens)
    with ExitStack() as stack:
        texts = []
        for given in options.text:
            name, _, path = given.partition("=")
            if not path:
                raise UserError("NAME=FILE for --text", given, "write --text prose=book.txt")
            windows = text_windows(tokenizer, Path(path), 2 * options.tokens, window)
            half = len(windows) // 2
            logits = stack.enter_context(LogitFile(sum(map(len, windows[half:])), store.shape.vocab))
            reference_quality(reference, windows[half:], logits, lambda: None)
            texts.append(Text(name, windows[:half], windows[half:], logits))
        del reference
        high, low = (int(level) for level in options.levels.split("/"))
        plan = store.plan(vram_limit=None, settings=RunSettings.uniform(high), context=window)
        hotness = Hotness(half_life=options.half_life, interval=options.interval, margin=options.margin)
        with Engine(store, plan, RunSettings.uniform(high)) as engine:
            measure = Measurement(engine, (high, low), hotness)
            for row in rows_of(texts, measure, (high, low), options.hot or [4, 8, 12, 16, 24], options.part):
                print(json.dumps(row), file=sys.stderr)
                yield row


PARTS = ("overlap", "demotion", "policy", "change")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = make_parser("tools.hotness", __doc__)
    parser.add_argument("--model", type=Path, required=True, help="a store")
    parser.add_argument("--reference", type=Path, required=True, help="its checkpoint")
    parser.add_argument("--text", action="append", required=True, help="NAME=FILE, a domain; two or more")
    parser.add_argument(
        "--tokens", type=int, default=1024, help="counted, and as many measured, of each text"
    )
    parser.add_argument("--levels", default="4/2", help="of hot experts, and of the others")
    parser.add_argument("--hot", type=int, action="append", help="hot experts of a layer")
    parser.add_argument("--half-life", type=float, default=64, help="as --hot-half-life")
    parser.add_argument("--interval", type=int, default=16, help="as --hot-interval, in tokens")
    parser.add_argument("--margin", type=float, default=0.1, help="as --hot-margin")
    parser.add_argument("--part", action="append", choices=PARTS, help="what to measure; all by default")
    options = parser.parse_args(argv)
    options.part = options.part or PARTS
    try:
        rows = list(run(options))
    except EdgemoeError as error:
        return failed("tools.hotness", error)
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
