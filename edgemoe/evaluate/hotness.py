"""Quality of precision that follows hotness, with domains of text (DynaExq's experiments): one row per measurement.

Half of each text counts what its routers choose; the other half measures, token by token, at HIGH and LOW bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from edgemoe.console.progress import CountProgress
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.errors import UserError
from edgemoe.evaluate.domain_quality import Domain, DomainQuality, Floats
from edgemoe.evaluate.reference import LogitFile, Reference
from edgemoe.evaluate.score import reference_quality, text_windows
from edgemoe.models.tokenizer import load_tokenizer
from edgemoe.policy.hotness import SIGNALS
from edgemoe.policy.settings import RunSettings

HIGH, LOW = 4, 2
"""Levels of hot experts and of the others."""

HOT_SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
"""Fractions of a layer's experts that are hot."""

TOP = 10
"""Hottest experts of each layer whose overlap is measured."""

PLACES = (0, 50, 100, 150, 200, 300, 512)
"""Borders of the places after a change of text, in tokens."""


@dataclass(frozen=True)
class HotnessRow:
    """One measurement. Field names are the JSON's; None: not measured in this part."""

    part: str
    """overlap: the hottest experts in two texts; traffic: their share of tokens; demotion: experts at the low level
    in some order; policy: hot sets that are static or follow use; change: the tokens after another text."""
    text: str
    """The measured text."""
    other: str | None = None
    """The other text of an overlap; the text before a change."""
    hot: int | None = None
    """Hot experts of each layer."""
    policy: str | None = None
    """Who is hot; of demotion, the order in which experts lose the high level."""
    fraction: float | None = None
    """Overlap as Jaccard's index, or the share of gate mass of the hottest experts; mean over layers."""
    kl: float | None = None
    """Mean KL(bf16 || setting) per token, in nats."""
    kl_stderr: float | None = None
    kl_high: float | None = None
    """KL with every expert at the high level."""
    kl_low: float | None = None
    """KL with every expert at the low level."""
    gap_recovered: float | None = None
    """Fraction of the gap between the low and the high level that is recovered."""
    kl_by_place: list[float] | None = None
    """KL by the place after a change of text, with borders of PLACES."""


def hotness_rows(
    store: StoreModel, checkpoint: Path, texts: Sequence[Path], tokens: int, window: int, *, changes: bool
) -> list[HotnessRow]:
    """Measures every part but changes of text, or these alone; shows progress on stderr.

    Args:
        store: has level 4.
        checkpoint: the bf16 model.
        texts: two or more; a text's name is its file's, without the suffix.
        tokens: most tokens of each text.
        window: tokens of a window, each from an empty sequence on.
        changes: whether changes of text are measured, and not the other parts.

    Raises:
        UserError: a text is too short, the store has level 2 alone, or the checkpoint is of another model.
        DoesNotFit: the disk has no room for the reference's logits.
    """
    if store.manifest.max_level < HIGH:
        raise UserError(f"a store with level {HIGH}", "level 2 alone", "convert the model again")
    settings = RunSettings.uniform(HIGH)
    plan = store.plan(vram_limit=None, settings=settings, context=window)
    with ExitStack() as stack:
        domains = _domains(store, checkpoint, texts, tokens, window, stack)
        engine = stack.enter_context(Engine(store, plan, settings))
        hot = sorted({max(round(share * engine.shape.experts_per_layer), 1) for share in HOT_SHARES})
        steps = _runs(len(domains), len(hot), changes=changes) * len(domains[0].measured)
        progress = stack.enter_context(CountProgress("hotness", steps))
        quality = DomainQuality(engine, (HIGH, LOW), progress.advance)
        heat = {domain.name: quality.counted(domain.counted) for domain in domains}
        if changes:
            return list(_changes(domains, heat, quality, hot))
        return [*_overlaps(domains, heat, hot), *_policies(domains, heat, quality, hot)]


def _domains(
    store: StoreModel, checkpoint: Path, texts: Sequence[Path], tokens: int, window: int, stack: ExitStack
) -> list[Domain]:
    """Cuts each text into two halves of windows, and keeps the bf16 model's logits of the second until `stack` ends."""
    reference = Reference(checkpoint, store.shape.vocab, store.manifest.source)
    tokenizer = load_tokenizer(store.directory)
    domains = []
    for path in texts:
        windows = text_windows(tokenizer, path, tokens, window)
        half = len(windows) // 2
        if not half:
            found = f"one window of {path}"
            raise UserError("two windows of each text for --study hotness", found, "give a smaller --window")
        logits = stack.enter_context(LogitFile(sum(map(len, windows[half:])), store.shape.vocab))
        reference_quality(reference, windows[half:], logits, lambda: None)
        domains.append(Domain(path.stem, windows[:half], windows[half:], logits))
    return domains


def _runs(texts: int, hot: int, *, changes: bool) -> int:
    """Runs over half of a text: to count, and of each part."""
    if changes:
        return texts + texts * (texts - 1) * hot * (2 * len(SIGNALS) + 2)
    return texts + texts * (2 + 15 + hot * (texts + len(SIGNALS)))


def _overlaps(domains: Sequence[Domain], heat: dict[str, Floats], hot: Sequence[int]) -> Iterator[HotnessRow]:
    """Yields the overlap of every two texts' hottest experts, and what the hottest ones carry."""
    top = {name: np.argsort(-mass, axis=1, kind="stable")[:, :TOP] for name, mass in heat.items()}
    for i, one in enumerate(domains):
        for other in domains[i + 1 :]:
            both = [
                len({*a} & {*b}) / len({*a} | {*b})
                for a, b in zip(top[one.name].tolist(), top[other.name].tolist(), strict=True)
            ]
            yield HotnessRow("overlap", one.name, other.name, fraction=float(np.mean(both)))
        sorted_mass = -np.sort(-heat[one.name], axis=1)
        shares = sorted_mass.cumsum(1) / sorted_mass.sum(1, keepdims=True)
        for most in hot:
            yield HotnessRow("traffic", one.name, hot=most, fraction=float(shares[:, most - 1].mean()))


@dataclass(frozen=True)
class _Rows:
    """Makes rows of a text, whose KL with every expert at the high and at the low level is known."""

    text: str
    high: float
    low: float

    def of(self, part: str, hot: int, policy: str, kl: Floats) -> HotnessRow:
        """The row of a measurement with the KL of each token, in nats, float64 [tokens]."""
        mean = float(kl.mean())
        return HotnessRow(
            *(part, self.text, None, hot, policy),
            kl=mean,
            kl_stderr=float(kl.std(ddof=1) / len(kl) ** 0.5),
            kl_high=self.high,
            kl_low=self.low,
            gap_recovered=(self.low - mean) / (self.low - self.high),
        )


def _policies(
    domains: Sequence[Domain], heat: dict[str, Floats], quality: DomainQuality, hot: Sequence[int]
) -> Iterator[HotnessRow]:
    """Yields KL with quarters of the experts demoted in three orders, and of hot sets static and online."""
    for domain in domains:
        row = _Rows(domain.name, *(float(quality.uniform(level, domain).mean()) for level in (HIGH, LOW)))
        mass = heat[domain.name]
        orders = {"coldest": mass, "random": np.random.default_rng(0).random(mass.shape), "hottest": -mass}
        for most in (mass.shape[1] - mass.shape[1] * i // 4 for i in range(5)):
            for order, scores in orders.items():
                yield row.of("demotion", most, order, quality.static(scores, most, domain))
        for most in hot:
            for source in domains:
                name = "static, same text" if source is domain else f"static, {source.name}"
                yield row.of("policy", most, name, quality.static(heat[source.name], most, domain))
            for signal in SIGNALS:
                (kl,) = quality.online(signal, most, [domain])
                yield row.of("policy", most, f"online {signal}", kl)


def _changes(
    domains: Sequence[Domain], heat: dict[str, Floats], quality: DomainQuality, hot: Sequence[int]
) -> Iterator[HotnessRow]:
    """Yields KL after a change of text, of hot sets that follow use and of both static ones."""
    pairs = [(before, after) for before in domains for after in domains if before is not after]
    for before, after in pairs:
        for most in hot:
            found = {f"online {s}": quality.online(s, most, [before, after])[1] for s in SIGNALS}
            found["static, text before"] = quality.static(heat[before.name], most, after)
            found["static, text after"] = quality.static(heat[after.name], most, after)
            for policy, kl in found.items():
                places = [float(kl[a:b].mean()) for a, b in pairwise(PLACES) if len(kl) > a]
                yield HotnessRow(
                    *("change", after.name, before.name, most, policy),
                    kl=float(kl.mean()),
                    kl_by_place=places,
                )
