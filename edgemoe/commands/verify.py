"""`edgemoe verify`: checksums of a store."""

from __future__ import annotations

import json

import typer

from edgemoe.commands.options import JsonOption, StoreArgument
from edgemoe.console.sizes import format_size


def verify_command(store: StoreArgument, as_json: JsonOption = False) -> None:
    """Read every plane of a store and compare checksums. Exit 4 if anything is damaged."""
    from edgemoe.console.progress import ByteProgress
    from storage.verify import verify

    with ByteProgress(f"verifying {store.name}") as progress:
        report = verify(store, progress.update)
    damage = [str(each) for each in report.damage]
    if as_json:
        print(json.dumps({"ok": not damage, "bytes": report.bytes_read, "damage": damage}))
    else:
        summary = f"{format_size(report.bytes_read)} read, {len(damage)} planes or files damaged"
        print(*damage, summary, sep="\n")
    if report.damage:
        raise typer.Exit(report.damage[0].exit_code)
