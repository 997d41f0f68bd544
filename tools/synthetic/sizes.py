"""Options of a synthetic model's sizes."""

from __future__ import annotations

import argparse
from dataclasses import replace

from edgemoe.bench.synthetic.workload import PRESETS, Shape
from tools.command_line import positive


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Adds --layers, --vocab and --seed, which shape_of and the weights need in addition to --like."""
    parser.add_argument("--layers", type=positive, help="layers, instead of the model's number")
    parser.add_argument("--vocab", type=positive, help="tokens, instead of the model's number")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers")


def shape_of(options: argparse.Namespace) -> Shape:
    """The shape that --like, --layers and --vocab name."""
    preset = PRESETS[options.like]
    return replace(preset, layers=options.layers or preset.layers, vocab=options.vocab or preset.vocab)
