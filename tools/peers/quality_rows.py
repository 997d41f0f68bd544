"""The rows of tools.peers.quality: bits per weight of two programs, their table and their picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import gguf

from edgemoe.evaluate.plot import write_figure
from edgemoe.policy.bits import BITS_PER_WEIGHT
from edgemoe.storage.store.manifest import Manifest

OURS = "edgemoe"
"""The beginning of the names of edgemoe's programs."""

_PARAMETERS = 32
"""Bits of a group's scale and centre."""

_OF_GROUP_64 = BITS_PER_WEIGHT[8] - 8
"""Bits per weight of group parameters that `edgemoe eval` counts for every matrix."""


@dataclass(frozen=True)
class Row:
    """One setting of a program.

    Args:
        program: the program and what its weights were made with.
        setting: the type, level or mean bits.
        bits: bits per weight over all weights of the checkpoint.
        kl: mean KL divergence from the bf16 model, in nats per token.
        error: its standard error; None for one token.
        mixed: whether the experts of a token have levels of their own. `bits` then counts what a token reads on
            average, which is less than the file has.
    """

    program: str
    setting: str
    bits: float
    kl: float | None
    error: float | None
    mixed: bool = False


def bits_of_gguf(reader: gguf.GGUFReader) -> float:
    """Bits per weight of a GGUF's tensors."""
    weights = sum(prod(map(int, tensor.shape)) for tensor in reader.tensors)
    return 8 * sum(int(tensor.n_bytes) for tensor in reader.tensors) / weights


def bits_of_store(store: Path, manifest: Manifest, bits_read: float, weights: int) -> float:
    """Bits per weight of a store whose tokens read so many bits per weight of experts.

    Args:
        store: directory of the store.
        manifest: its manifest.
        bits_read: bits per weight that `edgemoe eval` prints, which counts parameters of groups of 64 inputs.
        weights: all weights of the checkpoint.
    """
    matrices = manifest.geometry.matrices
    own = sum(matrix.rows * matrix.cols for matrix in matrices)
    parameters = sum(matrix.rows * -(-matrix.cols // matrix.group) * _PARAMETERS for matrix in matrices)
    experts = own * sum(len(layer.records) for layer in manifest.layers.values())
    return (
        experts * (bits_read - _OF_GROUP_64 + parameters / own) + 8 * _bytes(store / manifest.dense_name)
    ) / weights


def _bytes(file: Path) -> int:
    """Bytes of all tensors of a safetensors file, whose first 8 bytes are the length of its header."""
    with file.open("rb") as stream:
        return file.stat().st_size - 8 - int.from_bytes(stream.read(8), "little")


def best_within(rows: Sequence[Row], bits: float, *, mixed: bool) -> Row | None:
    """Finds edgemoe's row of lowest KL that has at most so many bits per weight; None where no row has so few.

    Args:
        rows: all rows.
        bits: the limit.
        mixed: whether levels may differ between experts of a token; otherwise all have one level.
    """
    ours = [row for row in rows if row.program.startswith(OURS) and row.bits <= bits and row.kl is not None]
    return min((row for row in ours if row.mixed == mixed), key=lambda row: row.kl or 0.0, default=None)


def table(rows: Sequence[Row]) -> str:
    """A Markdown table, ordered by bits; a row of llama.cpp names edgemoe's best row of at most as many bits."""
    heads = ("program", "setting", "bits per weight", "KL", "edgemoe, one level", "edgemoe, mixed levels")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in sorted(rows, key=lambda row: -row.bits):
        cells = [row.program, row.setting, f"{row.bits:.2f}", "" if row.kl is None else f"{row.kl:.5f}"]
        for mixed in (False, True):
            ours = row.program.startswith(OURS)
            best = None if ours else best_within(rows, row.bits, mixed=mixed)
            cells.append("" if best is None else f"{best.kl:.5f} ({best.setting}, {best.bits:.2f} bits)")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws KL, on a logarithmic scale, over bits per weight: a line for each program.

    Raises:
        UserError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for program, mixed in dict.fromkeys((row.program, row.mixed) for row in rows):
        line = [row for row in rows if (row.program, row.mixed) == (program, mixed) and row.kl]
        line.sort(key=lambda row: row.bits)
        ours = program.startswith(OURS)
        label = f"{program}, {'mixed levels' if mixed else 'one level'}" if ours else program
        marker, dashes, fill = ("o", "-" if mixed else "--", "full") if ours else ("s", "", "none")
        x, y = [row.bits for row in line], [row.kl or 0.0 for row in line]
        axes.plot(x, y, label=label, marker=marker, ls=dashes, fillstyle=fill)
        if not ours:
            for row in line:
                place = row.bits, row.kl or 0.0
                axes.annotate(row.setting, place, fontsize=6, xytext=(3, 3), textcoords="offset points")
    axes.set(
        xlabel="bits per weight, all weights counted",
        ylabel="KL to bf16, nats per token",
        yscale="log",
        xlim=(2, 10),
    )
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    write_figure(figure, path, dpi=120)
