"""`edgemoe verify`: checksums of a store, and whether its parts belong together."""

from __future__ import annotations

import json

import typer

from edgemoe.commands.options import JsonOption, StoreArgument
from edgemoe.console.printable import printable
from edgemoe.console.sizes import format_size


def verify_command(store: StoreArgument, as_json: JsonOption = False) -> None:
    """Read every plane and file of a store and compare checksums; compare every shape with config.json. Exit 4 if
    anything is damaged or contradicts the config."""
    from edgemoe.console.progress import ByteProgress
    from edgemoe.layers.build import check_dense, dense_specs
    from edgemoe.models.cache import store_path
    from edgemoe.models.calibration import calibration_of
    from edgemoe.models.store_model import StoreModel
    from storage.errors import EdgemoeError
    from storage.verify import verify
    from storage.writer import DENSE_NAME

    store = store_path(store)
    with ByteProgress(f"verifying {store.name}") as progress:
        report = verify(store, progress.update)
    damage: list[EdgemoeError] = [*report.damage]
    if not damage:
        try:
            opened = StoreModel.open(store)
            check_dense(store, opened.config, dense_specs(store / DENSE_NAME))
            calibration_of(opened, opened.manifest.max_level)  # logs a warning about one that cannot be used
        except EdgemoeError as error:
            damage.append(error)
    if as_json:
        result = {"ok": not damage, "bytes": report.bytes_read, "damage": [str(each) for each in damage]}
        print(json.dumps(result))
    else:
        found = (
            f"{len(damage)} planes or files damaged"
            if damage
            else "whole; every shape is that of config.json"
        )
        print(*map(printable, damage), f"{format_size(report.bytes_read)} read, {found}", sep="\n")
    if damage:
        raise typer.Exit(damage[0].exit_code)
