"""`edgemoe models`, `edgemoe pull` and `edgemoe rm`: the models in the cache."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgemoe.commands.options.shared import JsonOption, KeepSourceOption, check_template
from edgemoe.console.printable import printable
from edgemoe.console.sizes import format_size
from edgemoe.errors import UserError
from edgemoe.models.demo import demo_by_name
from edgemoe.models.options.declared import one_of
from edgemoe.models.options.groups import complete_cached
from edgemoe.models.published.short_names import short_name_lines

if TYPE_CHECKING:
    from edgemoe.models.listing import CachedModel

EXAMPLES = "Examples: edgemoe models | edgemoe models --json"
PULL_EXAMPLES = "Examples: edgemoe pull Qwen/Qwen3-30B-A3B-GGUF:Q8_0 | edgemoe pull gpt-oss-20b --dry-run"
RM_EXAMPLES = "Examples: edgemoe rm Qwen/Qwen3-30B-A3B | edgemoe rm qwen3 --yes"

SourceArgument = Annotated[
    Path,
    typer.Argument(
        metavar="NAME",
        help="A model of the Hub: org/name, org/name@revision, or org/name:Q4_K_M for a GGUF file by its quantization; "
        'a name that the table "What fits" of docs/models.md has; or a checkpoint\'s directory.',
        callback=lambda given: demo_by_name(given),
    ),
]
NameArgument = Annotated[
    str,
    typer.Argument(
        help="A name that `edgemoe models` prints, its beginning, or org/name.",
        autocompletion=complete_cached,
    ),
]
DryRunOption = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Print what the model takes to download and to store, the smallest limit, and how much of it common sizes "
        "of memory hold. Downloads no weights.",
    ),
]
DenseBitsOption = Annotated[
    str | None,
    typer.Option(
        "--dense-bits",
        help="Bits of the weights outside the experts, where the model is converted now: bf16, 8, 6, 5 or 4. "
        "Default: 8.",
        show_default=False,
        autocompletion=one_of("bf16", "8", "6", "5", "4"),
    ),
]
PlainCodesOption = Annotated[
    bool,
    typer.Option(
        "--plain-codes",
        help="Leave the model's codes as they are rounded. Default: they are calibrated where that takes less than "
        "5 minutes.",
    ),
]
YesOption = Annotated[bool, typer.Option("--yes", help="Remove without confirmation.")]


def models_command(as_json: JsonOption = False) -> None:
    """List the models on this machine.

    Prints family, parameters, bits, the rank of compensators, the size on disk and the last use.
    """
    from edgemoe.models.listing import cached_models

    models = cached_models()
    if as_json:
        for model in models:
            print(json.dumps(model.as_json()))
    elif models:
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
        print(*map(printable, _table(models, columns)), sep="\n")
    else:
        print(
            "no models yet; `edgemoe chat NAME` downloads one of these, or any model org/name:",
            file=sys.stderr,
        )
        print(*short_name_lines(), sep="\n", file=sys.stderr)


def pull_command(
    name: SourceArgument,
    keep_source: KeepSourceOption = False,
    dense_bits: DenseBitsOption = None,
    plain_codes: PlainCodesOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Download a model and convert it.

    Prints the line that starts a chat with it. A call that was ended early continues where it stopped; a finished one
    returns at once.
    """
    from edgemoe.commands.dense_bits import parse_dense_bits
    from edgemoe.models.cache import cached_names
    from edgemoe.models.open import open_model
    from edgemoe.models.options.groups import Opening

    if dry_run:
        _print_what_fits(name, as_json)
        return
    bits = None if dense_bits is None else parse_dense_bits(dense_bits)
    opening = Opening(name, keep_source=keep_source, dense_bits=bits, plain_codes=plain_codes)
    store = open_model(opening, check_files=check_template).directory
    short = next((each.short for each in cached_names() if store in each.paths), str(store))
    if as_json:
        print(json.dumps({"name": short, "store": str(store)}))
    else:
        print(f"edgemoe chat -m {shlex.quote(short)}")


def _print_what_fits(model: Path, as_json: bool) -> None:
    from edgemoe.models.plans.what_fits import WhatFits

    fits = WhatFits.of_model(model)
    print(json.dumps(fits.as_json()) if as_json else "\n".join(fits.lines()))


def rm_command(name: NameArgument, yes: YesOption = False) -> None:
    """Remove a model from this machine.

    Asks first, and refuses while the model is in use. Exits 1 where it is kept.
    """
    from edgemoe.models.cache import disk_bytes, find_cached, remove

    model = find_cached(name)
    size = format_size(sum(map(disk_bytes, model.paths)))
    if not yes and not _confirmed(f"Remove {model.short} ({size})?"):
        print(f"kept {model.short}")
        raise typer.Exit(1)
    remove(model)
    print(f"removed {model.short}: {size}")


def _confirmed(question: str) -> bool:
    """Whether a question on stderr is answered with yes on stdin.

    Raises:
        UserError: there is no answer.
    """
    while True:
        print(f"{question} [y/N]: ", end="", file=sys.stderr, flush=True)
        answer = sys.stdin.readline()
        if not answer:
            raise UserError("y or n", "the end of the input", "give --yes to remove without confirmation")
        if (word := answer.strip().lower()) in ("y", "yes", "n", "no", ""):
            return word in ("y", "yes")


def _table(models: list[CachedModel], columns: int) -> list[str]:
    """The rows of a table, its heading first; the name on a line of its own where they are wider than the terminal."""
    rows = [("NAME", "FAMILY", "PARAMETERS", "BITS", "SIZE", "LAST USED")]
    for model in models:
        levels = "/".join(map(str, model.levels)) or model.state
        if model.compensated:
            levels += f" + rank {model.compensated}"
        used = time.strftime("%Y-%m-%d", time.localtime(model.last_used))
        size, count = format_size(model.bytes), _count(model.parameters)
        rows.append((model.short, model.family or "-", count, levels, size, used))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if sum(widths) + 2 * (len(widths) - 1) <= columns:
        return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines: list[str] = []
    for name, *others in rows:
        lines += [name, f"  {'  '.join(map(str.ljust, others, widths[1:]))}".rstrip()]
    return lines


def _count(parameters: int | None) -> str:
    """A number of parameters for people: 30.5B, 16.4M.

    >>> _count(30_532_122_624), _count(16_400_000), _count(None)
    ('30.5B', '16.4M', '-')
    """
    if parameters is None:
        return "-"
    return f"{parameters / 1e9:.3g}B" if parameters >= 999_500_000 else f"{parameters / 1e6:.3g}M"
