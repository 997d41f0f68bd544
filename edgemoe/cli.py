"""The command line. Heavy imports happen inside commands, so that --help answers at once."""

from __future__ import annotations

import json
import logging
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from edgemoe.commands.bench import EXAMPLES as BENCH_EXAMPLES
from edgemoe.commands.bench import bench_command
from edgemoe.commands.chat import EXAMPLES as CHAT_EXAMPLES
from edgemoe.commands.chat import chat_command
from edgemoe.commands.config_file import ConfiguredApp
from edgemoe.commands.eval import EPILOG as EVAL_EXAMPLES
from edgemoe.commands.eval import eval_command
from edgemoe.commands.models import (
    DOCTOR_EXAMPLES,
    MODELS_EXAMPLES,
    RM_EXAMPLES,
    doctor_command,
    models_command,
    rm_command,
)
from edgemoe.commands.options import (
    DEMO,
    ContextOption,
    DeviceOption,
    DramOption,
    ExactOption,
    JsonOption,
    KeepSourceOption,
    LevelsOption,
    ModelOption,
    RetentionOption,
    VramOption,
    open_store,
    run_settings,
)
from edgemoe.console.sizes import format_size
from storage.errors import EdgemoeError

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""

_USAGE_ERROR: Any = typer.BadParameter.__base__
"""click's UsageError. Newer typers bring a click of their own along, so its name is not to be imported."""

app = ConfiguredApp(
    name="edgemoe",
    help="Run Mixture-of-Experts models larger than memory: experts stream from SSD under a hard limit.",
    epilog="Every option of a command can also be set by --config FILE (TOML) and by a variable: EDGEMOE_VRAM_LIMIT is "
    "--vram-limit. Flags win over variables, and those over the file; --print-config shows what holds.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


app.command("chat", epilog=CHAT_EXAMPLES)(chat_command)


@app.command(
    epilog="Example: edgemoe convert ~/models/Qwen3-30B-A3B ~/stores/qwen3 --max-level 4 --dense-bits 8"
)
def convert(
    source: Annotated[
        Path,
        typer.Argument(help="Checkpoint directory, or a model of the Hub: org/name or org/name@revision."),
    ],
    destination: Annotated[Path, typer.Argument(help="Store directory to write.")],
    max_level: Annotated[
        int | None,
        typer.Option(
            help="Highest level stored, 8 or 4 bits. Default: 4 where the experts have 4-bit codes, otherwise 8.",
            show_default=False,
        ),
    ] = None,
    layout: Annotated[
        str, typer.Option(help="auto, cpu-avx512, cpu-avx2, cpu-avx2-paired, cpu-generic or cuda.")
    ] = "auto",
    dense_bits: Annotated[int, typer.Option(help="Bits of all weights that are not experts', 16 or 8.")] = 16,
    keep_source: KeepSourceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Convert a checkpoint to a store. Killed, it resumes; finished, it returns at once.

    A model of the Hub is downloaded shard by shard, each deleted once it is converted.
    """
    from edgemoe.models.resolve import convert_named

    convert_named(
        source,
        destination,
        max_level=max_level,
        layout=layout,
        dense_bits=dense_bits,
        keep_source=keep_source,
    )
    inspect(destination, as_json=as_json)


@app.command()
def inspect(
    store: Annotated[Path, typer.Argument(help="Store directory.")], as_json: JsonOption = False
) -> None:
    """Show what a store holds: experts, planes, bits per weight, layout."""
    from storage.verify import describe

    description = describe(store)
    if as_json:
        print(json.dumps(description))
        return
    for name, value in description.items():
        print(f"{name:>24}  {value}")


@app.command()
def verify(
    store: Annotated[Path, typer.Argument(help="Store directory.")], as_json: JsonOption = False
) -> None:
    """Read every plane of a store and compare checksums. Exit 4 if anything is damaged."""
    from edgemoe.console.progress import ByteProgress
    from storage.verify import verify as verify_store

    with ByteProgress(f"verifying {store.name}") as progress:
        report = verify_store(store, progress.update)
    if as_json:
        print(
            json.dumps(
                {
                    "ok": not report.damage,
                    "bytes": report.bytes_read,
                    "damage": [str(d) for d in report.damage],
                }
            )
        )
    else:
        for damage in report.damage:
            print(damage)
        print(f"{format_size(report.bytes_read)} read, {len(report.damage)} planes or files damaged")
    if report.damage:
        raise typer.Exit(report.damage[0].exit_code)


@app.command()
def plan(
    model: ModelOption = DEMO,
    vram_limit: VramOption = None,
    dram_limit: DramOption = None,
    device: DeviceOption = "auto",
    exact: ExactOption = None,
    levels: LevelsOption = None,
    retention: RetentionOption = None,
    context: ContextOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how a limit would be divided, and the smallest that works. Loads nothing."""
    choose = partial(run_settings, exact=exact, levels=levels, retention=retention)
    _, made, _ = open_store(
        model, choose, vram_limit=vram_limit, dram_limit=dram_limit, device=device, context=context
    )
    if as_json:
        print(json.dumps(made.as_json()))
    else:
        print(*made.lines(), f"smallest limit that works: {made.minimum_vram_bytes} bytes", sep="\n")


app.command("models", epilog=MODELS_EXAMPLES)(models_command)
app.command("rm", epilog=RM_EXAMPLES)(rm_command)
app.command("doctor", epilog=DOCTOR_EXAMPLES)(doctor_command)
app.command("bench", epilog=BENCH_EXAMPLES)(bench_command)
app.command("eval", epilog=EVAL_EXAMPLES)(eval_command)


def main() -> int:
    """Runs the command line; returns its exit code."""
    logging.basicConfig(format="edgemoe: %(message)s", level=logging.WARNING)
    try:
        result = typer.main.get_command(app).main(prog_name="edgemoe", standalone_mode=False)
    except EdgemoeError as error:
        print(f"edgemoe: {error}", file=sys.stderr)
        return error.exit_code
    except _USAGE_ERROR as error:
        error.show()
        return int(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        result = INTERRUPTED
    if result == INTERRUPTED:
        print("edgemoe: interrupted", file=sys.stderr)
    return result if isinstance(result, int) else 0
