"""`edgemoe models` and `edgemoe rm`: the models in the cache, and the removal of one."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from edgemoe.commands.options import JsonOption
from edgemoe.console.sizes import format_size

if TYPE_CHECKING:
    from edgemoe.models.cache import CachedModel

EXAMPLES = "Examples: edgemoe models | edgemoe models --json"
RM_EXAMPLES = "Examples: edgemoe rm Qwen/Qwen3-30B-A3B | edgemoe rm qwen3-1f2e3d4c5b6a7988-cpu-avx2 --yes"

NameArgument = Annotated[
    str, typer.Argument(help="A name that `edgemoe models` prints, its beginning, or org/name.")
]
YesOption = Annotated[bool, typer.Option("--yes", help="Remove without confirmation.")]


def models_command(as_json: JsonOption = False) -> None:
    """List the models in the cache: size on disk, levels, layout, last use."""
    from edgemoe.models.cache import cached_models

    models = cached_models()
    if as_json:
        for model in models:
            print(json.dumps(model.as_json()))
    elif models:
        print(*_table(models), sep="\n")
    else:
        hint = "edgemoe chat --model org/name, or a checkpoint directory, makes one"
        print(f"no models yet: {hint}", file=sys.stderr)


def rm_command(name: NameArgument, yes: YesOption = False) -> None:
    """Remove a model from the cache, after confirmation. Refuses while the model is in use."""
    from edgemoe.models.cache import find_cached, remove

    model = find_cached(name)
    if not yes:
        typer.confirm(f"Remove {model.name} ({format_size(model.bytes)})?", abort=True, err=True)
    remove(model)
    print(f"removed {model.name}: {format_size(model.bytes)}")


def _table(models: list[CachedModel]) -> list[str]:
    rows = [("NAME", "SIZE", "LEVELS", "LAYOUT", "LAST USED")]
    for model in models:
        levels = "/".join(map(str, model.levels)) or model.state
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(model.last_used))
        rows.append((model.name, format_size(model.bytes), levels, model.layout or "-", used))
    width = max(len(model.name) for model in models)
    return [
        f"{name:<{width}}  {size:>8}  {levels:<8}  {layout:<12}  {used}"
        for name, size, levels, layout, used in rows
    ]
