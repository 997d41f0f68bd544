"""The table that a conversion of quantized weights prints: its treatment of each type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edgemoe.storage.convert.source_table import SourceRow

_TITLES = ("source", "matrix", "layers", "bits", "store", "codes", "error", "source's own")


def source_lines(rows: Sequence[SourceRow]) -> Iterator[str]:
    """Yields the lines of the table; none without rows.

    Bits are per weight on disk, with the groups' parameters. The source's own error is the expected one of its type.
    """
    if not rows:
        return
    cells = [_TITLES, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def _cells(row: SourceRow) -> tuple[str, ...]:
    codes = f"{'kept' if row.kept else 'coded again'}, {row.code_bits} bits"
    error = "-" if row.error is None else f"{row.error:.4f}"
    numbers = f"{row.layers}", f"{row.source_bits:.2f}", f"{row.store_bits:.2f}"
    return row.types, row.matrix, *numbers, codes, error, f"{row.source_error:.3f}"
