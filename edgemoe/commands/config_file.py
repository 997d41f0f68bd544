"""Options from a TOML file and from the environment: flags win over the environment, that over the file.

A key is an option's name: at the top level for every command that has the option, in a table of a command's name
for that one alone. `EDGEMOE_` and the name in capitals is its variable: `--vram-limit`, vram-limit, EDGEMOE_VRAM_LIMIT.
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Callable, Collection, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from storage.errors import UserError

PREFIX = "EDGEMOE_"

_PRINT, _FILE = "edgemoe.print-config", "edgemoe.config-file"
"""Keys of a command's context."""
_OURS = ("config", "print-config")


_Function = TypeVar("_Function", bound=Callable[..., Any])


class ConfiguredCommand(TyperCommand):
    """A command whose options may also come from `--config` and the environment, and that can show them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += _own_options()
        for name, option in options_of(self).items():
            if name != "print-config":
                option.envvar = variable(name)
                option.show_envvar = False  # one line of `edgemoe --help` says it for all

    def invoke(self, ctx: Any) -> Any:
        """Runs the command, or prints its options and exits 0."""
        _warn_of_variables(ctx)
        if ctx.meta.get(_PRINT):
            print(*effective(ctx), sep="\n")
            return 0
        return super().invoke(ctx)


class ConfiguredApp(typer.Typer):
    """A command line all of whose commands are ConfiguredCommands."""

    def command(self, *args: Any, **kwargs: Any) -> Callable[[_Function], _Function]:
        """As typer's."""
        return super().command(*args, **{"cls": ConfiguredCommand, **kwargs})


def variable(option: str) -> str:
    """vram-limit -> EDGEMOE_VRAM_LIMIT."""
    return PREFIX + option.upper().replace("-", "_")


def options_of(command: Any) -> dict[str, Any]:
    """An option's name without dashes -> the option, as typer has it; arguments and --help are none."""
    return {
        long.removeprefix("--"): parameter
        for parameter in command.params
        for long in [max(parameter.opts, key=len)]
        if long.startswith("--") and long != "--help"
    }


def effective(ctx: Any) -> Iterator[str]:
    """Lines of TOML, itself a file for --config: every option, its value, and where that came from."""
    origins = {"COMMANDLINE": "command line", "DEFAULT": "default", "DEFAULT_MAP": "file"}
    yield f"[{ctx.info_name}]"
    for name, option in options_of(ctx.command).items():
        if name in _OURS:
            continue
        value = ctx.params[option.name]
        source = ctx.get_parameter_source(option.name).name
        origin = origins.get(source, f"environment, {variable(name)}")
        if origin == "file":
            origin = f"file, {ctx.meta[_FILE]}"
        unset = value is None or value in ([], ())
        yield f"# {name} is not set" if unset else f"{name} = {_toml(value)}  # {origin}"


def read_config(path: Path, command: str, known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What a file sets for a command: option's name -> value, the command's own table over the top level.

    Args:
        path: of the file.
        command: name.
        known: command's name -> options_of it.

    Raises:
        UserError: it cannot be read, is no TOML, or has a key or a value that no option takes.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"a TOML file was wanted for --config {path}",
            getattr(error, "strerror", None) or str(error),
            "Give a file such as `edgemoe chat --print-config` writes",
        ) from error
    everywhere = {name for options in known.values() for name in options}
    common: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, dict):
            _check_key(path, key, known, "a command")
            for inner, one in value.items():
                _check_key(path, inner, known[key], f"an option of {key}")
                fitting = _fitting(path, inner, one, known[key][inner])
                if key == command:
                    own[inner] = fitting
        else:
            _check_key(path, key, everywhere, "an option")
            if key in known[command]:
                common[key] = _fitting(path, key, value, known[command][key])
    return common | own


def _check_key(path: Path, key: str, known: Collection[str], what: str) -> None:
    if key not in known or key in _OURS:
        near = get_close_matches(key, [name for name in known if name not in _OURS], 1)
        raise UserError(
            f"the name of {what} was wanted in {path}",
            f"got {key!r}",
            f"Did you mean {near[0]!r}?" if near else "See `edgemoe COMMAND --help` for the names",
        )


def _fitting(path: Path, key: str, value: Any, option: Any) -> Any:
    """The value as the option's own parser takes it; one of an option that repeats may stand alone."""
    if option.multiple and isinstance(value, list) and all(map(_is_plain, value)):
        return value
    if option.is_flag and isinstance(value, bool):
        return value
    if not option.is_flag and _is_plain(value):
        return [value] if option.multiple else value
    wanted = "true or false" if option.is_flag else "a string or a number"
    raise UserError(f"{wanted} was wanted for {key} in {path}", f"got {value!r}", "Write it that way")


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _own_options() -> list[Any]:
    """--config and --print-config, which every command has and none sees."""
    app = typer.Typer(add_completion=False)

    @app.command()
    def options(
        config: Annotated[
            Path | None,
            typer.Option(
                "--config",
                help="TOML file with options: their names as keys, for one command alone in a table of its name.",
                is_eager=True,
                expose_value=False,
                callback=_take_config,
            ),
        ] = None,
        print_config: Annotated[
            bool,
            typer.Option(
                "--print-config",
                help="Print every option, its value and where that came from, as TOML; run nothing.",
                is_eager=True,
                expose_value=False,
                callback=_ask_for_print,
            ),
        ] = False,
    ) -> None:
        """Only its options are used."""

    return list(options_of(typer.main.get_command(app)).values())


def _take_config(ctx: typer.Context, value: Path | None) -> None:
    if value is None or ctx.resilient_parsing:
        return
    root: Any = ctx.find_root().command
    known = {name: options_of(command) for name, command in root.commands.items()}
    command = ctx.info_name or ""
    chosen = read_config(value, command, known)
    ctx.default_map = {known[command][name].name: one for name, one in chosen.items()}
    ctx.meta[_FILE] = str(value)


def _ask_for_print(ctx: typer.Context, value: bool) -> None:
    ctx.meta[_PRINT] = value


def _warn_of_variables(ctx: Any) -> None:
    """Says which variables look like an option's, and are none's."""
    known = {variable(name) for one in ctx.find_root().command.commands.values() for name in options_of(one)}
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in known:
            for near in get_close_matches(name, known, 1, 0.9):
                print(f"edgemoe: {name} sets nothing; did you mean {near}?", file=sys.stderr)


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
