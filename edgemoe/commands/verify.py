"""`edgemoe inspect`: the contents of a store; `edgemoe verify`: whether they are whole and belong together."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import typer

from edgemoe.commands.options.shared import JsonOption, StoreArgument, named_store
from edgemoe.console.printable import printable
from edgemoe.console.sizes import format_size
from edgemoe.console.width import fitted, markdown_tables
from edgemoe.errors import EdgemoeError, UserError


def inspect_command(store: StoreArgument, as_json: JsonOption = False) -> None:
    """Show the contents of a store.

    Prints its experts, the planes of their bits, bits per weight, and the layout.
    """
    store = named_store(store)
    from edgemoe.storage.store.contents import describe

    description = describe(store)
    if as_json:
        print(json.dumps(description))
    else:
        print(*_lines(description), sep="\n")


def verify_command(store: StoreArgument, as_json: JsonOption = False) -> None:
    """Check a store or an export for damage.

    Reads every file, compares checksums, and compares every shape with config.json. Exits 4 if anything is damaged or
    contradicts the config.
    """
    from edgemoe.console.progress import ByteProgress
    from edgemoe.layers.dense_tensors import check_dense, dense_specs
    from edgemoe.models.calibration import calibration_of
    from edgemoe.models.store_model import StoreModel
    from edgemoe.storage.export.directory import EXPORT_NAME, UNFINISHED_NAME, verify_export
    from edgemoe.storage.store.verify import verify

    if (store / EXPORT_NAME).is_file():
        with ByteProgress(f"verifying {store.name}") as progress:
            size, found = verify_export(store, progress.update)
        _report(size, found, "whole", as_json)
        return
    if (store / UNFINISHED_NAME).is_file():
        raise UserError(
            f"a finished export in {store}", UNFINISHED_NAME, "run `edgemoe export` again to resume it"
        )
    store = named_store(store)
    with ByteProgress(f"verifying {store.name}") as progress:
        report = verify(store, progress.update)
    damage: list[EdgemoeError] = [*report.damage]
    if not damage:
        try:
            opened = StoreModel.open(store)
            check_dense(store, opened.config, dense_specs(store / opened.manifest.dense_name))
            # Logs a warning about one that cannot be used.
            calibration_of(opened.directory, opened.manifest, opened.manifest.max_level)
        except EdgemoeError as error:
            damage.append(error)
    _report(report.bytes_read, damage, "whole; every shape is as config.json says", as_json)


def _report(size: int, damage: Sequence[EdgemoeError], whole: str, as_json: bool) -> None:
    """Prints the result of a verification; exits where there is damage."""
    if as_json:
        print(json.dumps({"ok": not damage, "bytes": size, "damage": [str(each) for each in damage]}))
    else:
        found = f"{len(damage)} planes or files damaged" if damage else whole
        lines = [fitted(printable(each)) for each in damage]
        print(*lines, f"{format_size(size)} read, {found}", sep="\n")
    if damage:
        raise typer.Exit(damage[0].exit_code)


def _lines(description: dict[str, Any]) -> Iterator[str]:
    """Yields the description for people, with units; --json has the exact values."""
    table = description.pop("codes_by_layer")
    for name, value in description.items():
        size = name.endswith("_bytes")
        title = name.replace("_bytes", " on disk").replace("_", " ")
        yield fitted(printable(f"{title:>18}  {_value(value, size=size)}"), indent=20)
    yield ""
    titles = ["layers", "matrix", "bits of codes", "group", "bits per weight"]
    yield markdown_tables(titles, [_row(row) for row in table], keys=2)


def _row(row: dict[str, Any]) -> list[str]:
    """The cells of a row of `codes_by_layer`."""
    spans = list[list[int]]()
    for layer in row["layers"]:
        if spans and spans[-1][1] == layer - 1:
            spans[-1][1] = layer
        else:
            spans.append([layer, layer])
    layers = ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in spans)
    return [
        layers,
        printable(row["matrix"]),
        f"{row['bits']}",
        f"{row['group']}",
        f"{row['bits_per_weight']:.2f}",
    ]


def _value(value: object, *, size: bool) -> str:
    if isinstance(value, dict):
        pairs = ((name, _value(each, size=size)) for name, each in value.items())
        return ", ".join(
            f"{each} at {name}" if name.isdecimal() else f"{name} {each}" for name, each in pairs
        )
    if isinstance(value, list):
        return " × ".join(map(str, value))
    if size and isinstance(value, int):
        return format_size(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3g}" if isinstance(value, float) else "-" if value is None else str(value)
