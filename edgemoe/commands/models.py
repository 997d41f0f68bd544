"""`models`, `rm` and `doctor`: what is in the cache, and what this machine can do with it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from edgemoe.commands.options import JsonOption
from edgemoe.console.sizes import format_size

MODELS_EXAMPLES = "Examples: edgemoe models | edgemoe models --json"
RM_EXAMPLES = "Examples: edgemoe rm Qwen/Qwen3-30B-A3B | edgemoe rm qwen3-1f2e3d4c5b6a7988-cpu-avx2 --yes"
DOCTOR_EXAMPLES = "Examples: edgemoe doctor | edgemoe doctor ~/stores --json"


def models_command(as_json: JsonOption = False) -> None:
    """List the models in the cache: size on disk, levels, layout, last use."""
    from edgemoe.models.cache import cached_models

    models = cached_models()
    if as_json:
        for model in models:
            row = {
                "name": model.name,
                "paths": [str(path) for path in model.paths],
                "bytes": model.size,
                "state": model.state,
                "levels": list(model.levels),
                "layout": model.layout,
                "last_used": model.last_used,
            }
            print(json.dumps(row))
        return
    if not models:
        print(
            "no models yet: edgemoe chat --model org/name, or a checkpoint directory, makes one",
            file=sys.stderr,
        )
        return
    width = max(len(model.name) for model in models)
    print(f"{'NAME':<{width}}  {'SIZE':>8}  {'LEVELS':<8}  {'LAYOUT':<12}  LAST USED")
    for model in models:
        levels = "/".join(map(str, model.levels)) or model.state
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(model.last_used))
        print(
            f"{model.name:<{width}}  {format_size(model.size):>8}  {levels:<8}  {model.layout or '-':<12}  {when}"
        )


def rm_command(
    name: Annotated[str, typer.Argument(help="As `edgemoe models` prints it, its beginning, or org/name.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove a model from the cache. Asks first; refuses while the model is in use."""
    from edgemoe.models.cache import find_cached, remove

    model = find_cached(name)
    if not yes:
        typer.confirm(f"Remove {model.name} ({format_size(model.size)})?", abort=True, err=True)
    remove(model)
    print(f"removed {model.name}: {format_size(model.size)}")


def doctor_command(
    directory: Annotated[
        Path | None, typer.Argument(help="Where models lie or will lie. Default: the cache.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Report what this machine can do, and which limits that suggests. Takes some seconds."""
    from edgemoe.commands.doctor import examine
    from edgemoe.models.cache import stores_directory

    found = examine(directory or stores_directory())
    if as_json:
        print(json.dumps(found.as_json()))
    else:
        print(*found.lines(), sep="\n")
