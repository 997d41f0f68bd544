"""Commands whose options also come from a TOML file and from the environment.

Flags win over variables, and variables over the file. --config names the file; otherwise the user's own is read
(options_file.default_file), where it exists. The variable of an option is `EDGEMOE_` and its name in capitals: the one
of `--vram-limit` is EDGEMOE_VRAM_LIMIT.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from edgemoe.commands.options.groups import MODEL_NAME, grouped
from edgemoe.commands.options.help_sections import SECTIONS, sections_of
from edgemoe.commands.options.options_file import NOT_SET, UNSETTABLE, OptionsFile, default_file
from edgemoe.errors import UserError
from edgemoe.models.options.declared import option
from edgemoe.models.options.study import study_keys
from edgemoe.storage.files.untrusted import shortened

PREFIX = "EDGEMOE_"

USAGE_ERROR: Any = typer.BadParameter.__base__
"""click's UsageError, reached through typer because newer versions bundle a click of their own."""

_FILE = "edgemoe.config-file"
"""Key of the OptionsFile that was read in the `meta` of a command's context."""

_HELP_ALL = "help_all"


class ConfiguredCommand(TyperCommand):
    """A command whose options also come from `--config` and the environment, and that can print them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += _own_options()
        for name, each in options_of(self).items():
            each.hidden = name == "help-all" and self.name not in SECTIONS  # --help has all of them
            if name not in NOT_SET:
                each.envvar = variable(name)
                each.show_envvar = False  # the epilog of `edgemoe --help` covers all options
            if name == "model" and each.multiple:
                each.value_from_envvar = partial(_lines_of_variable, each)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the arguments.

        Raises:
            UserError: an option of studies that is a key of --study here, or a value of a file that its option refuses.
        """
        try:
            return super().parse_args(ctx, args)
        except USAGE_ERROR as error:
            _refuse_value(ctx, error)
            name = getattr(error, "option_name", "").removeprefix("--")
            if name in study_keys() and "study" in options_of(self):
                raise _elsewhere(ctx, name) from None
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the options in the sections of this command, where it has sections."""
        if ctx.info_name not in SECTIONS:
            super().format_options(ctx, formatter)
            return
        records = {
            long_name(each): record for each in self.get_params(ctx) if (record := each.get_help_record(ctx))
        }
        every = ctx.params.get(_HELP_ALL, False)
        for heading, names in sections_of(ctx.info_name, records, every=every):
            with formatter.section(heading):
                formatter.write_dl([records[name] for name in names])

    def invoke(self, ctx: Any) -> Any:
        """Runs the command, or prints its options and exits 0."""
        _warn_of_variables(ctx)
        if ctx.params.pop("print_config"):
            print(*effective(ctx), sep="\n")
            return 0
        return super().invoke(ctx)


def _elsewhere(ctx: Any, name: str) -> UserError:
    """The error for an option of studies that a command has as a key of --study, or, as eval, not at all."""
    commands = ctx.find_root().command.commands
    owners = " and ".join(each for each in commands if name in options_of(commands[each]))
    action = f"give it to {owners}" if ctx.info_name == "eval" else f"write --study {name}=VALUE"
    return UserError(f"an option of {ctx.info_name}", f"--{name}, an option of {owners} alone", action)


def _lines_of_variable(option: Any, ctx: Any) -> list[str] | None:
    """The values of an option in its variable, one per line: names of models may have colons and spaces."""
    text = option.resolve_envvar_value(ctx)
    return None if text is None else text.splitlines()


def variable(option: str) -> str:
    """Names the variable of an option: vram-limit -> EDGEMOE_VRAM_LIMIT."""
    return PREFIX + option.upper().replace("-", "_")


def options_of(command: Any) -> dict[str, Any]:
    """Maps names without dashes to typer's options; without arguments and --help."""
    return {
        name: parameter for parameter in command.params if (name := long_name(parameter)) not in ("", "help")
    }


def long_name(parameter: Any) -> str:
    """The name of an option without dashes; "" for an argument."""
    name = max(parameter.opts, key=len)
    return name.removeprefix("--") if name.startswith("--") else ""


def effective(ctx: Any) -> Iterator[str]:
    """Yields lines of TOML that --config reads: every option, its value, and the source of the value."""
    file = f"file, {file_read(ctx)}"
    origins = {"COMMANDLINE": "command line", "DEFAULT": "default", "DEFAULT_MAP": file}
    yield f"[{ctx.info_name}]"
    for name, each in options_of(ctx.command).items():
        if name in UNSETTABLE:
            continue
        value = ctx.params[each.name]
        source = ctx.get_parameter_source(each.name).name
        if name == "model" and ctx.params.get(MODEL_NAME):
            value, source = ctx.params[MODEL_NAME], "COMMANDLINE"
        origin = origins.get(source, f"environment, {variable(name)}")
        unset = value is None or value in ([], ())
        yield f"# {name} is not set" if unset else f"{name} = {_toml(value)}  # {origin}"


def file_read(ctx: Any) -> Path | None:
    """The path of the file whose options a command has; None: there is none."""
    file = ctx.meta.get(_FILE)
    return file.path if file else None


def _refuse_value(ctx: Any, error: Any) -> None:
    """Raises UserError, with file and line, where a usage error is about a value of the file."""
    parameter, file = getattr(error, "param", None), ctx.meta.get(_FILE)
    if parameter is None or file is None or ctx.get_parameter_source(parameter.name).name != "DEFAULT_MAP":
        return
    name = long_name(parameter)
    expected = f"a value that --{name} takes in {file.place_of(name, ctx.info_name)}"
    found = f"{shortened(ctx.default_map[parameter.name])} ({error.message})"
    raise UserError(expected, found, "write such a value") from None


def _take_config(ctx: typer.Context, value: Path | None) -> None:
    if ctx.resilient_parsing:
        return
    path = value or default_file()
    if not value and not path.exists():
        return
    root: Any = ctx.find_root().command
    known = {name: options_of(command) for name, command in root.commands.items()}
    command = ctx.info_name or ""
    file = OptionsFile.read(path)
    chosen = file.options_of(command, known)
    ctx.default_map = {known[command][name].name: one for name, one in chosen.items()}
    ctx.meta[_FILE] = file


def _print_help(ctx: typer.Context, flag: bool) -> None:
    if flag and not ctx.resilient_parsing:
        ctx.params[_HELP_ALL] = True
        print(ctx.get_help())
        raise typer.Exit


@dataclass(frozen=True)
class OwnOptions:
    """Options that every command has."""

    config: Path | None = option(
        "TOML file with options: their names as keys, for one command alone in a table of its name. Default: "
        "~/.config/edgemoe/config.toml, where it exists.",
        callback=_take_config,
        is_eager=True,  # it gives the other options their defaults
        expose_value=False,
    )
    help_all: bool = option(
        "Show every option and exit.", False, callback=_print_help, is_eager=True, expose_value=False
    )
    print_config: bool = option("Print every option, its value and its source, as TOML; run nothing.", False)


def _own_options() -> list[Any]:
    """Makes --config and --print-config, which every command has and no command receives."""
    app = typer.Typer(add_completion=False)

    @app.command()
    @grouped
    def options(own: OwnOptions) -> None:
        """Declares the two options."""

    return list(options_of(typer.main.get_command(app)).values())


def _warn_of_variables(ctx: Any) -> None:
    """Warns of variables that resemble an option's variable and are none."""
    known = {variable(name) for one in ctx.find_root().command.commands.values() for name in options_of(one)}
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in known:
            for near in get_close_matches(name, known, 1, 0.9):
                print(f"edgemoe: {name} sets nothing; did you mean {near}?", file=sys.stderr)


def _toml(value: Any) -> str:
    """Writes a value as TOML, which is JSON but for infinite numbers and the character DEL."""
    if isinstance(value, float):
        return str(value)
    return json.dumps(value, default=str, ensure_ascii=False).replace("\x7f", "\\u007f")
