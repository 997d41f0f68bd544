"""Options from a TOML file and from the environment: flags win over variables, and variables over the file.

A key is an option's name: at the top level for every command with that option, in a table named for a command for
that command alone. The variable of an option is `EDGEMOE_` and its name in capitals: `--vram-limit`,
EDGEMOE_VRAM_LIMIT.
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from edgemoe.commands.options.groups import grouped
from edgemoe.commands.options.help_sections import SECTIONS, sections_of
from edgemoe.errors import UserError, fault_of
from edgemoe.models.options.declared import option
from edgemoe.models.options.study import study_keys
from edgemoe.storage.files.retry import open_regular
from edgemoe.storage.files.untrusted import shortened

PREFIX = "EDGEMOE_"

USAGE_ERROR: Any = typer.BadParameter.__base__
"""click's UsageError, reached through typer because newer versions bundle a click of their own."""

_FILE = "edgemoe.config-file"
"""Key of the file's name in the `meta` of a command's context."""

_HELP_ALL = "help_all"

_MOST_BYTES = 64 << 10
"""Bytes of a file of options."""

_MOST_DOTS = 128
"""Dots of a line of such a file."""

_NOT_SET = ("print-config", "help-all")

_OURS = ("config", *_NOT_SET)
"""Options of this module, which no file can set."""


class ConfiguredCommand(TyperCommand):
    """A command whose options also come from `--config` and the environment, and that can print them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += _own_options()
        for name, each in options_of(self).items():
            each.hidden = name == "help-all" and self.name not in SECTIONS  # --help has all of them
            if name not in _NOT_SET:
                each.envvar = variable(name)
                each.show_envvar = False  # the epilog of `edgemoe --help` covers all options

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the arguments; raises UserError for an option of studies that is a key of --study here."""
        try:
            return super().parse_args(ctx, args)
        except USAGE_ERROR as error:
            name = getattr(error, "option_name", "").removeprefix("--")
            if name in study_keys() and "study" in options_of(self):
                found = f"--{name}, an option of bench and eval alone"
                raise UserError(
                    f"an option of {ctx.info_name}", found, f"write --study {name}=VALUE"
                ) from None
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
    file = f"file, {ctx.meta.get(_FILE)}"
    origins = {"COMMANDLINE": "command line", "DEFAULT": "default", "DEFAULT_MAP": file}
    yield f"[{ctx.info_name}]"
    for name, each in options_of(ctx.command).items():
        if name in _OURS:
            continue
        value = ctx.params[each.name]
        source = ctx.get_parameter_source(each.name).name
        origin = origins.get(source, f"environment, {variable(name)}")
        unset = value is None or value in ([], ())
        yield f"# {name} is not set" if unset else f"{name} = {_toml(value)}  # {origin}"


def read_config(path: Path, command: str, commands: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Reads the options of a command from a file; the command's table wins over the top level.

    Args:
        path: the file.
        command: its name.
        commands: command's name -> options_of(command).

    Returns:
        option's name -> value.

    Raises:
        UserError: the file cannot be read, is no TOML, or has a key or a value that no option takes.
    """
    document = _parsed(path)
    everywhere = {name for options in commands.values() for name in options}
    common: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, dict):
            _check_key(path, key, commands, "a command")
            taken = own if key == command else {}
            for inner, one in value.items():
                if not _is_study(inner, commands[key]):
                    _check_key(path, inner, commands[key], f"an option of {key}")
                _take(taken, path, inner, one, commands[key])
        else:
            _check_key(path, key, everywhere, "an option")
            if key in commands[command] or _is_study(key, commands[command]):
                _take(common, path, key, value, commands[command])
    if "study" in common and "study" in own:
        own["study"] = common["study"] + own["study"]
    return common | own


def _parsed(path: Path) -> dict[str, Any]:
    """Parses a file of options. Its size and the parts of its keys are bounded: each part copies all earlier ones.

    Raises:
        UserError: the file cannot be read, is no TOML, or exceeds a bound.
    """
    wanted, action = (
        f"a TOML file for --config {path}",
        "give a file such as `edgemoe chat --print-config` prints",
    )
    try:
        with open_regular(path) as file:
            raw = file.read(_MOST_BYTES + 1)
        if len(raw) > _MOST_BYTES:
            raise UserError(wanted, f"more than {_MOST_BYTES} bytes", action)
        if any(line.count(b".") > _MOST_DOTS for line in raw.splitlines()):
            raise UserError(wanted, f"a line of more than {_MOST_DOTS} dots", action)
        return tomllib.loads(raw.decode())
    except (OSError, ValueError) as error:
        raise UserError(wanted, fault_of(error)[:300], action) from error
    except RecursionError as error:
        raise UserError(wanted, "lists or tables too deep in each other", action) from error


def _is_study(key: str, options: Collection[str]) -> bool:
    """Whether a key is a setting of studies for a command that takes these by --study."""
    return key in study_keys() and key not in options and "study" in options


def _take(options: dict[str, Any], path: Path, key: str, value: Any, declared: dict[str, Any]) -> None:
    """Adds a value to options in the form that its parser takes; a setting of studies is added to --study."""
    if _is_study(key, declared):
        text = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
        key, value = "study", f"{key}={text}"
    fitting = _fitting(path, key, value, declared[key])
    options[key] = [*options.get(key, ()), *fitting] if key == "study" else fitting


def _check_key(path: Path, key: str, options: Collection[str], what: str) -> None:
    if key not in options or key in _OURS:
        near = get_close_matches(key, [name for name in options if name not in _OURS], 1)
        action = f"did you mean {near[0]!r}?" if near else "look the name up in `edgemoe COMMAND --help`"
        raise UserError(f"the name of {what} in {path}", shortened(key), action)


def _fitting(path: Path, key: str, value: Any, option: Any) -> Any:
    """Returns a value in the form that the option's parser takes; a repeated option also takes a single value."""
    if option.multiple and isinstance(value, list) and all(map(_is_plain, value)):
        return value
    if option.is_flag and isinstance(value, bool):
        return value
    if not option.is_flag and _is_plain(value):
        return [value] if option.multiple else value
    wanted = "true or false" if option.is_flag else "a string or a number"
    raise UserError(f"{wanted} for {key} in {path}", shortened(value), "write such a value")


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _take_config(ctx: typer.Context, value: Path | None) -> None:
    if value is None or ctx.resilient_parsing:
        return
    root: Any = ctx.find_root().command
    known = {name: options_of(command) for name, command in root.commands.items()}
    command = ctx.info_name or ""
    chosen = read_config(value, command, known)
    ctx.default_map = {known[command][name].name: one for name, one in chosen.items()}
    ctx.meta[_FILE] = str(value)


def _print_help(ctx: typer.Context, flag: bool) -> None:
    if flag and not ctx.resilient_parsing:
        ctx.params[_HELP_ALL] = True
        print(ctx.get_help())
        raise typer.Exit


@dataclass(frozen=True)
class OwnOptions:
    """Options that every command has."""

    config: Path | None = option(
        "TOML file with options: their names as keys, for one command alone in a table of its name.",
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
