"""The price of a bit: each expert gets the level that costs a token least (docs/decisions/0025).

The damage of computing an expert at a level is its squared gate weight, times the mean squared error of the expert's
output at that level, times the layer's sensitivity. Each level costs its damage, plus a price for every bit per
weight that it reads. One price holds for a whole model. It is solved so that the mean is a given number of bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
import xxhash

from edgemoe.policy.bits import BITS_PER_WEIGHT
from edgemoe.storage.base import LEVELS
from edgemoe.storage.store.calibration import Calibration

TYPICAL_ERROR = {8: 0.004, 4: 0.07, 2: 0.28, 0: 1.0}
"""level -> mean relative error of an expert's output, measured on two models (docs/decisions/0025)."""

_MOST_ROWS = 1 << 13
"""Rows of damages that a price is solved on: more change it by less than two hundredths of a bit."""

_MOST_POINTS = 4096
"""Points of a curve: it is exact to a four-thousandth of the bits between its ends."""


@dataclass(frozen=True, eq=False)
class Damage:
    """The damage of fewer bits of each expert, and a sample of routers' choices.

    >>> table = torch.tensor([[[0.0, 0.01, 0.1, 1.0], [0.0, 0.02, 0.2, 2.0]]])
    >>> chosen, gates = torch.tensor([[[0, 1], [1, 0]]]), torch.tensor([[[0.7, 0.3], [0.9, 0.1]]])
    >>> damage = Damage("text", (5,), table, chosen, gates)
    >>> price = damage.price((4, 0), 2.25)
    >>> cheapest(gates[0].square()[..., None] * damage.of_layer(5, (4, 0))[chosen[0]], (4, 0), price).tolist()
    [[4, 0], [4, 0]]

    Args:
        origin: the origin of the measurement, for people.
        layers: numbers of the layers with experts.
        table: float32 [layers, experts, levels], damage at each of LEVELS for a gate weight of 1.
        choices: int64 [layers, tokens, k], routers' choices for consecutive tokens.
        gates: float32 [layers, tokens, k], their gate weights.
    """

    origin: str
    layers: tuple[int, ...]
    table: torch.Tensor
    choices: torch.Tensor
    gates: torch.Tensor

    @classmethod
    def of(cls, calibration: Calibration) -> Damage:
        """The damage that a calibration has measured."""
        sensitivity = torch.from_numpy(calibration.sensitivity)[:, None, None]
        return cls(
            calibration.measured_on,
            calibration.layers,
            torch.from_numpy(calibration.error) * sensitivity,
            torch.from_numpy(calibration.chosen.astype("int64")),
            torch.from_numpy(calibration.gates.astype("float32")),
        )

    @classmethod
    def typical(
        cls, layers: Sequence[int], experts: int, choice: torch.Tensor, gates: torch.Tensor
    ) -> Damage:
        """Equal experts with the errors of TYPICAL_ERROR, for a plan that is made before a model runs.

        Args:
            layers: numbers of the layers with experts.
            experts: number of experts in a layer.
            choice: int64 [tokens, k], routers' choices in every layer, or [layers, tokens, k].
            gates: their gate weights, of the same shape.
        """
        count = len(layers)
        table = torch.tensor([TYPICAL_ERROR[level] ** 2 for level in LEVELS]).expand(count, experts, -1)
        sample = choice.expand(count, -1, -1), gates.float().expand(count, -1, -1)
        return cls("typical errors", tuple(layers), table, *sample)

    @cached_property
    def digest(self) -> str:
        """A hash of all that levels follow from: equal digests choose equal levels."""
        digest = xxhash.xxh3_128(repr(self.layers).encode())
        for part in (self.table, self.choices, self.gates):
            digest.update(part.contiguous().numpy().data)
        return digest.hexdigest()

    def of_layer(self, layer: int, levels: tuple[int, ...]) -> torch.Tensor:
        """The damage of each expert of a layer at `levels` for a gate weight of 1: float32 [experts, levels]."""
        return _of_layer(self, layer, levels)

    @cached_property
    def by_level(self) -> torch.Tensor:
        """`table` with its rows at the layers' numbers and its columns at the levels, 0 elsewhere.

        float32 [highest layer number + 1, experts, highest level + 1].
        """
        placed = torch.zeros(max(self.layers) + 1, self.table.shape[1], max(LEVELS) + 1)
        placed[torch.tensor(self.layers)[:, None], :, torch.tensor(LEVELS)] = self.table.transpose(1, 2)
        return placed

    def price(self, levels: tuple[int, ...], bits: float, tokens: int = 0) -> float:
        """The price of a bit at which the mean over the sample is a number of bits.

        Args:
            levels: the levels that are chosen from, high to low.
            bits: the mean, in bits per weight.
            tokens: length of a prompt, in which an expert has one level for all tokens and the mean is over the experts
                that they chose; 0: single tokens, with a mean over tokens and experts.
        """
        if not tokens:
            return _curve(self, levels, 0).price(bits)
        # Prices are solved for powers of two, and lie on a straight line between them: both axes logarithmic.
        low = 1 << (tokens.bit_length() - 1)
        first = _curve(self, levels, low).price(bits)
        if low == tokens or not first:
            return first
        second = _curve(self, levels, 2 * low).price(bits)
        return first * math.exp(math.log2(tokens / low) * math.log(second / first))


def cheapest(damage: torch.Tensor, levels: tuple[int, ...], price: float | torch.Tensor) -> torch.Tensor:
    """The level of least cost.

    Args:
        damage: float32 [..., levels], of each level.
        levels: high to low; of a tie the higher one is taken.
        price: the price of a bit; 0 gives the least damage. Or of each level, float32 [..., levels].

    Returns:
        int64 [...], levels.
    """
    of_level = prices(levels, price) if isinstance(price, float | int) else price
    return torch.tensor(levels)[(damage + of_level).argmin(dim=-1)]


def prices(levels: tuple[int, ...], price: float) -> torch.Tensor:
    """The price of each level: float32 [levels]."""
    return price * torch.tensor([BITS_PER_WEIGHT[level] for level in levels])


class PriceCurve:
    """The mean bits per weight of the cheapest levels, at every price of a bit.

    >>> curve = PriceCurve(torch.tensor([[0.0, 0.2], [0.0, 2.0]]), (4, 2))
    >>> [curve.bits(price) for price in (0.05, 0.5, 5.0)]
    [4.5, 3.5, 2.5]
    >>> 0.1 < curve.price(3.5) < 1.0
    True

    Args:
        damage: float32 [rows, levels].
        levels: high to low.
    """

    def __init__(self, damage: torch.Tensor, levels: tuple[int, ...]) -> None:
        of_level = torch.tensor([BITS_PER_WEIGHT[level] for level in levels])
        now = damage.argmin(1)
        self._top = float(of_level[now].mean())
        turns, saved = [], []
        for _ in levels[1:]:
            # The price at which each row turns from its level to the next one of its lower envelope.
            fewer = of_level[now].unsqueeze(1) - of_level
            lost = damage - damage.gather(1, now.unsqueeze(1))
            turn, following = (lost / fewer).masked_fill(fewer <= 0, math.inf).min(1)
            turning = turn.isfinite()
            turns.append(turn[turning])
            saved.append((of_level[now] - of_level[following])[turning])
            now = torch.where(turning, following, now)
        prices, order = torch.cat(turns).sort()
        bits = self._top - torch.cat(saved)[order].double().cumsum(0) / len(damage)
        points = torch.linspace(0, len(prices) - 1, min(len(prices), _MOST_POINTS)).round().long()
        self._prices, self._bits = prices[points].double(), bits[points]

    def bits(self, price: float) -> float:
        """The mean bits per weight at a price."""
        below = int(torch.searchsorted(self._prices, price))
        return float(self._bits[below - 1]) if below else self._top

    def price(self, bits: float) -> float:
        """The price at which the mean is a number of bits, or the nearest that there is; 0: no price is needed."""
        if bits >= self._top:
            return 0.0
        first = min(int((self._bits > bits).sum()), len(self._bits) - 1)
        # Above the turn by more than float32's rounding: at the turn itself the higher level is as cheap.
        return float(self._prices[first]) * (1 + 1e-6)


@lru_cache(maxsize=256)
def _of_layer(damage: Damage, layer: int, levels: tuple[int, ...]) -> torch.Tensor:
    columns = [LEVELS.index(level) for level in levels]
    return damage.table[damage.layers.index(layer)][:, columns].contiguous()


@lru_cache(maxsize=64)
def _curve(damage: Damage, levels: tuple[int, ...], tokens: int) -> PriceCurve:
    samples = _of_prompts(damage, tokens) if tokens else _of_tokens(damage)
    return PriceCurve(samples[:, [LEVELS.index(level) for level in levels]], levels)


def _of_tokens(damage: Damage) -> torch.Tensor:
    """Damages [rows, LEVELS] of the sample's tokens and experts."""
    layers, tokens, slots = damage.choices.shape
    kept = max(1, min(tokens, _MOST_ROWS // (layers * slots)))
    rows = [
        gates.square().unsqueeze(-1) * table[chosen]
        for table, chosen, gates in zip(
            damage.table, _spread(damage.choices, kept), _spread(damage.gates, kept), strict=True
        )
    ]
    return torch.stack(rows).reshape(-1, len(LEVELS))


def _spread(sample: torch.Tensor, count: int) -> torch.Tensor:
    """`count` evenly spaced tokens of a sample [layers, tokens, k]."""
    return sample[:, torch.linspace(0, sample.shape[1] - 1, count).round().long()]


def _of_prompts(damage: Damage, tokens: int) -> torch.Tensor:
    """Damages [rows, LEVELS] of the experts that prompts of `tokens` tokens, cut out of the sample, chose."""
    layers, sampled, slots = damage.choices.shape
    experts = damage.table.shape[1]
    length = min(tokens, sampled)
    count = max(1, min(sampled // length, _MOST_ROWS // (layers * experts)))
    shape = layers, count, length * slots
    starts = torch.linspace(0, sampled - length, count).long()[:, None] + torch.arange(length)
    chosen, gates = damage.choices[:, starts].reshape(shape), damage.gates[:, starts].reshape(shape)
    weights = torch.zeros(layers, count, experts).scatter_add_(2, chosen, gates.square())
    active = torch.zeros(layers, count, experts, dtype=torch.bool).scatter_(2, chosen, value=True)
    # A prompt longer than the sample has proportionally more of the same.
    found = (weights * (tokens / length)).unsqueeze(-1) * damage.table.unsqueeze(1)
    return found[active]
