"""Writes the table of docs/models.md that shows which fraction of published models' experts fits under each limit.

    python -m tools.plan_table            rewrites the table
    python -m tools.plan_table --print    prints the table

The plans are made from the models' configs, without weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from edgemoe.errors import DoesNotFit
from edgemoe.families.table import family_of
from edgemoe.memory.limits import Limits
from edgemoe.memory.make_plan import make_plan
from edgemoe.memory.model_shape import ModelShape, PlannedModel
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.convert.config import bounded_config
from edgemoe.storage.record.forms import PlaneForm
from edgemoe.storage.record.layout import LAYOUTS
from edgemoe.storage.record.offsets import MatrixSpec, RecordGeometry
from tools.checkout import ROOT
from tools.command_line import make_parser
from tools.published_models import CONFIGS

DOCS = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- plans -->\n", "<!-- end of plans -->"

LIMITS = (12, 16, 24)
"""Values of --vram-limit, GB."""

LEVELS = (8, 4, 2)
CONTEXT = 4096
_GB = 10**9


def dense_shapes(config: Mapping[str, Any]) -> tuple[dict[str, tuple[int, ...]], int]:
    """The shapes of the dense tensors by name, and the number of weights in all experts' matrices."""
    values = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **values))
    dense = {name: tuple(p.shape) for name, p in model.named_parameters()}
    matrices = [name for name, shape in dense.items() if ".experts." in name and len(shape) == 3]
    return dense, sum(prod(dense.pop(name)) for name in matrices)


def stored_bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Bytes of dense weights at 8 bits: matrices with a bf16 scale a row, other tensors in bf16.

    Routers, which stay in bf16, are counted at 8 bits: an error below 0.1 % of the sum.
    """
    return sum(
        prod(shape) + 2 * shape[0] if len(shape) == 2 else 2 * prod(shape) for shape in shapes.values()
    )


def shape_of(config: dict[str, Any]) -> tuple[ModelShape, RecordGeometry]:
    """The model's shape and its experts' geometry, as make_plan needs them."""
    family = family_of(bounded_config(config))
    shapes, _ = dense_shapes(config)
    hidden, inner = config["hidden_size"], family.intermediate
    matrices = MatrixSpec.of("gate_up", 2 * inner, hidden), MatrixSpec.of("down", hidden, inner)
    sides = [max(s) for s in shapes.values() if len(s) == 2 and s[0] != config["vocab_size"]]
    shape = ModelShape(
        layers=config["num_hidden_layers"],
        experts=len(family.moe_layers) * family.experts,
        experts_per_layer=family.experts,
        top_k=family.top_k,
        hidden=hidden,
        intermediate=inner,
        heads=config["num_attention_heads"],
        kv=family.kv,
        widest=max(sides),
        vocab=config["vocab_size"],
        dense_bytes=stored_bytes(shapes),
    )
    return shape, RecordGeometry(matrices, 8)


def row(name: str, config: dict[str, Any]) -> list[str]:
    """A model's cells: sizes, then for every limit the percentage of its experts resident at each level."""
    shape, geometry = shape_of(config)
    form = PlaneForm(geometry, LAYOUTS["cpu-generic"], LAYOUTS["cpu-generic"])
    model = PlannedModel(shape, geometry, form)
    sizes = [f"{shape.experts * geometry.prefix_bytes(level) / _GB:.1f}" for level in LEVELS]
    cells = [name, str(shape.experts), f"{shape.dense_bytes / _GB:.1f}", " / ".join(sizes)]
    for limit in LIMITS:
        try:
            plan = make_plan(model, Limits(limit * _GB, CONTEXT), RunSettings(levels=(8,)))
        except DoesNotFit as error:
            cells.append(f"needs {error.minimum / _GB:.1f} GB")
            continue
        percents = [plan.experts_resident[str(level)] * 100 // shape.experts for level in LEVELS]
        cells.append(" / ".join("all" if percent == 100 else f"{percent} %" for percent in percents))
    return cells


def table() -> str:
    """The table as Markdown."""
    head = ["Model", "Experts", "Dense, GB", "Experts at 8 / 4 / 2 bits, GB", *(f"{gb} GB" for gb in LIMITS)]
    lines = [head, ["---"] * len(head), *(row(name, config) for name, config in CONFIGS.items())]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def rewritten(text: str) -> str:
    """Replaces the table between the marks of a document.

    Raises:
        SystemExit: a mark is missing.
    """
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(
            f"tools.plan_table: expected {BEGIN.strip()} and {END} in {DOCS}, got none: add both"
        )
    return f"{before}{BEGIN}{table()}{END}{after}"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = make_parser("tools.plan_table", __doc__)
    parser.add_argument("--print", action="store_true", help="print the table, change no file")
    if parser.parse_args(argv).print:
        print(table(), end="")
    else:
        DOCS.write_text(rewritten(DOCS.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
