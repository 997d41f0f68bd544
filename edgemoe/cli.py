"""The table of commands. Commands import heavy packages only when they run, so that --help answers at once."""

from __future__ import annotations

import logging
import sys
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from edgemoe import __version__
from edgemoe.commands import (
    bench,
    calibrate,
    chat,
    compensate,
    convert,
    doctor,
    export,
    models,
    plan,
    recode,
    serve,
    verify,
)
from edgemoe.commands import eval as evaluation
from edgemoe.commands.options.configured_command import USAGE_ERROR, ConfiguredCommand
from edgemoe.console.printable import PrintableRecord
from edgemoe.console.streams import standard_streams
from edgemoe.console.width import say
from edgemoe.errors import EdgemoeError, UserError

INTERRUPTED = 130
"""Exit code after Ctrl-C, by the convention of shells."""


class _Warnings(logging.Handler):
    """Prints warnings on stderr as all lines for people."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


class _Commands(TyperGroup):
    """Answers a command that does not exist, such as another program's, with the one that is meant."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None:
            near = get_close_matches(args[0], self.commands, 1)
            action = f"did you mean {near[0]}?" if near else "`edgemoe chat MODEL` runs a model"
            raise UserError("a command of edgemoe", repr(args[0]), f"{action} (`edgemoe --help` lists all)")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="edgemoe",
    cls=_Commands,
    help="Type `edgemoe chat` to talk to the small model that comes with edgemoe, or `edgemoe chat qwen3 --vram-limit "
    "6GB` to download a real one and run it inside 6 GB. edgemoe runs Mixture-of-Experts models that are larger than "
    "memory: it keeps the parts that are used often in memory, and reads the others from the SSD.",
    epilog="Every option of a command can also be set in ~/.config/edgemoe/config.toml, or in another TOML file by "
    "--config FILE, and by a variable: EDGEMOE_VRAM_LIMIT is --vram-limit. Flags win over variables, and variables "
    "over the file; --print-config shows the result, and `edgemoe doctor` which file was read.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for name, command, epilog in (
    ("chat", chat.chat_command, chat.EXAMPLES),
    ("serve", serve.serve_command, serve.EXAMPLES),
    ("convert", convert.convert_command, convert.EXAMPLES),
    ("compensate", compensate.compensate_command, compensate.EXAMPLES),
    ("recode", recode.recode_command, recode.EXAMPLES),
    ("export", export.export_command, export.EXAMPLES),
    ("calibrate", calibrate.calibrate_command, calibrate.EXAMPLES),
    ("inspect", verify.inspect_command, None),
    ("verify", verify.verify_command, None),
    ("plan", plan.plan_command, None),
    ("models", models.models_command, models.EXAMPLES),
    ("pull", models.pull_command, models.PULL_EXAMPLES),
    ("rm", models.rm_command, models.RM_EXAMPLES),
    ("doctor", doctor.doctor_command, doctor.EXAMPLES),
    ("bench", bench.bench_command, bench.EXAMPLES),
    ("eval", evaluation.eval_command, evaluation.EXAMPLES),
):
    app.command(name, cls=ConfiguredCommand, epilog=epilog)(command)


def _print_version(flag: bool) -> None:
    if flag:
        print(f"edgemoe {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Declares the options before a command's name."""


@cache
def _program() -> Any:
    """The commands with all their options, which take 25 ms to make; a program that calls main again has them."""
    return typer.main.get_command(app)


def main() -> int:
    """Runs the command line; returns its exit code."""
    logging.setLogRecordFactory(PrintableRecord)
    logging.captureWarnings(True)
    logging.basicConfig(format="edgemoe: %(message)s", level=logging.WARNING, handlers=[_Warnings()])
    try:
        with standard_streams():
            result = _program().main(prog_name="edgemoe", standalone_mode=False)
    except EdgemoeError as error:
        say(f"edgemoe: {error}")
        return error.exit_code
    except USAGE_ERROR as error:
        error.show()
        return int(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        result = INTERRUPTED
    if result == INTERRUPTED:
        print("edgemoe: interrupted", file=sys.stderr)
    return result if isinstance(result, int) else 0
