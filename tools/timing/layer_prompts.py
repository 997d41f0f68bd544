"""Times a prompt through the parts of layers that know earlier tokens: attention, gated delta nets and others.

    python -m tools.timing.layer_prompts [deepseek-v2-lite ...] --place DIR [--tokens 512] [--runs 5]

Models are the ones of tools.timing.families, with random weights, all experts resident. For each kind of part of a
model one line has the milliseconds of a layer in the fastest run, the milliseconds of its products with dense weights,
and the rest.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.layers.decoder_parts import parts_of
from edgemoe.layers.dense import DenseLinear
from edgemoe.layers.linear_attention import PerSequence
from edgemoe.layers.resumable import ResumableLayer
from edgemoe.layers.row_blocks import RowBlocks
from edgemoe.policy.settings import RunSettings
from tools.command_line import make_parser, positive
from tools.synthetic.family_sizes import MODELS
from tools.timing.families import make_store


class Clock:
    """Adds up the seconds of each kind of part, and of the dense products within it, from calls of modules.

    Attributes:
        parts, products: seconds by the part's class.
        layers: the layers' parts, by class.
    """

    def __init__(self) -> None:
        self.parts, self.products = defaultdict[str, float](float), defaultdict[str, float](float)
        self.layers = defaultdict[str, set[nn.Module]](set)
        self._kinds: dict[nn.Module, str] = {}
        self._within, self._start, self._product = "", 0.0, 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within it every call of a module counts."""
        before = register_module_forward_pre_hook(self._before)
        after = register_module_forward_hook(self._after)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _before(self, module: nn.Module, inputs: Any) -> None:
        if isinstance(module, ResumableLayer):
            for part in parts_of(module.module):
                if part.mixes:
                    self._kinds[part.module] = kind = _name(part.module)
                    self.layers[kind].add(part.module)
        elif module in self._kinds:
            self._within, self._start = self._kinds[module], time.perf_counter()
        elif self._within and isinstance(module, DenseLinear):
            self._product = time.perf_counter()

    def _after(self, module: nn.Module, inputs: Any, result: Any) -> None:
        if module in self._kinds:
            self.parts[self._within] += time.perf_counter() - self._start
            self._within = ""
        elif self._within and isinstance(module, DenseLinear):
            self.products[self._within] += time.perf_counter() - self._product


def measure(store: StoreModel, tokens: int, runs: int) -> dict[str, tuple[float, float]]:
    """Milliseconds of a layer's part, and of its dense products, in the fastest run, by the part's class."""
    settings = RunSettings(levels=(4,), exact=True)
    plan = store.plan(vram_limit=None, settings=settings, context=tokens + 8)
    fastest: dict[str, tuple[float, float]] = {}
    with Engine(store, plan, settings) as engine:
        engine.fill()
        sequence = engine.sequences.new()
        for _ in range(runs):
            clock = Clock()
            sequence.crop(0)
            with clock.running():
                engine.prefill(sequence, [(7 * i + 5) % store.shape.vocab for i in range(tokens)])
            for kind, layers in clock.layers.items():
                found = 1000 * clock.parts[kind] / len(layers), 1000 * clock.products[kind] / len(layers)
                fastest[kind] = min(fastest.get(kind, found), found)
    return fastest


def _name(part: Any) -> str:
    """The class of a part, inside what gives it blocks of rows and the state of each sequence."""
    while isinstance(part, RowBlocks | PerSequence):
        part = part.module
    return type(part).__name__


def main(argv: Sequence[str] | None = None) -> None:
    """Prints one line for each kind of part of each model."""
    parser = make_parser("tools.timing.layer_prompts", __doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--tokens", type=positive, default=512)
    parser.add_argument("--runs", type=positive, default=5)
    parser.add_argument("--layers", type=positive, default=6)
    parser.add_argument("--experts", type=positive, default=16, help="experts of a layer")
    parser.add_argument("--vocab", type=positive, default=32000)
    parser.add_argument("--place", type=Path, required=True, help="where stores are made")
    given = parser.parse_args(argv)
    for name in given.models or MODELS:
        store = make_store(name, given.place, given.layers, given.experts, given.vocab, 8)
        for kind, (whole, products) in measure(StoreModel.open(store), given.tokens, given.runs).items():
            print(f"{whole:8.1f} ms  {products:8.1f} products  {whole - products:8.1f} rest  {name} {kind}")


if __name__ == "__main__":
    main()
