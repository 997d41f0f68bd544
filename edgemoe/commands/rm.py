"""`edgemoe rm`: removes a model from the cache."""

from __future__ import annotations

from typing import Annotated

import typer

from edgemoe.console.sizes import format_size

EXAMPLES = "Examples: edgemoe rm Qwen/Qwen3-30B-A3B | edgemoe rm qwen3-1f2e3d4c5b6a7988-cpu-avx2 --yes"

NameArgument = Annotated[
    str, typer.Argument(help="A name that `edgemoe models` prints, its beginning, or org/name.")
]
YesOption = Annotated[bool, typer.Option("--yes", help="Remove without confirmation.")]


def rm_command(name: NameArgument, yes: YesOption = False) -> None:
    """Remove a model from the cache, after confirmation. Refuses while the model is in use."""
    from edgemoe.models.cache import find_cached, remove

    model = find_cached(name)
    if not yes:
        typer.confirm(f"Remove {model.name} ({format_size(model.bytes)})?", abort=True, err=True)
    remove(model)
    print(f"removed {model.name}: {format_size(model.bytes)}")
