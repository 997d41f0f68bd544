"""`edgemoe inspect`: the contents of a store."""

from __future__ import annotations

import json

from edgemoe.commands.options import JsonOption, StoreArgument
from edgemoe.console.printable import printable


def inspect_command(store: StoreArgument, as_json: JsonOption = False) -> None:
    """Show the contents of a store: experts, planes, bits per weight, layout."""
    from edgemoe.models.cache import store_path

    store = store_path(store)
    from storage.verify import describe

    description = describe(store)
    if as_json:
        print(json.dumps(description))
    else:
        print(*(printable(f"{name:>24}  {value}") for name, value in description.items()), sep="\n")
