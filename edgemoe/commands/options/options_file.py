"""A file of options: TOML whose keys are the names of options.

A key at the top level is for every command that has the option, a key in a table named for a command for that command
alone:

    vram-limit = "12GB"

    [chat]
    model = "qwen3"
    temperature = 0.7
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

import platformdirs

from edgemoe.errors import UserError, fault_of
from edgemoe.models.options.study import study_keys
from edgemoe.storage.files.retry import open_regular
from edgemoe.storage.files.untrusted import shortened

NOT_SET = ("print-config", "help-all")
"""Options that have no variable either."""

UNSETTABLE = ("config", *NOT_SET)
"""Options that no file can set."""

_MOST_BYTES = 64 << 10
"""Bytes of a file of options."""

_MOST_DOTS = 128
"""Dots of a line of such a file."""

_MOST_LINES = 100
"""Lines with the text of a key that are tried, to name the key's line."""

_ACTION = "give a file such as `edgemoe chat --print-config` prints"


def default_file() -> Path:
    """The path of the user's own file: ~/.config/edgemoe/config.toml, or the same below XDG_CONFIG_HOME."""
    return Path(platformdirs.user_config_dir("edgemoe"), "config.toml")


@dataclass(frozen=True)
class OptionsFile:
    """A file of options that was read.

    Args:
        path: the path of the file.
        text: its text.
        document: its keys and values.
    """

    path: Path
    text: str
    document: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> OptionsFile:
        """Reads a file. Its size and the parts of its keys are bounded: each part copies all earlier ones.

        Raises:
            UserError: the file cannot be read, is no TOML, or exceeds a bound.
        """
        expected = f"a TOML file with options at {path}"
        try:
            with open_regular(path) as file:
                raw = file.read(_MOST_BYTES + 1)
            if len(raw) > _MOST_BYTES:
                raise UserError(expected, f"more than {_MOST_BYTES} bytes", _ACTION)
            if any(line.count(b".") > _MOST_DOTS for line in raw.splitlines()):
                raise UserError(expected, f"a line of more than {_MOST_DOTS} dots", _ACTION)
            text = raw.decode()
            return cls(path, text, tomllib.loads(text))
        except (OSError, ValueError) as error:
            raise UserError(expected, fault_of(error)[:300], _ACTION) from error
        except RecursionError as error:
            raise UserError(expected, "lists or tables too deep in each other", _ACTION) from error

    def options_of(self, command: str, commands: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """The options of a command; its table wins over the top level.

        Args:
            command: the command's name.
            commands: name of each command -> name of each of its options -> typer's option.

        Returns:
            option's name -> value.

        Raises:
            UserError: a key or a value that no option takes.
        """
        everywhere = {name for options in commands.values() for name in options}
        common: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for key, value in self.document.items():
            if isinstance(value, dict):
                self._check_key((key,), commands, "a command")
                taken = own if key == command else {}
                for inner, one in value.items():
                    if not _is_study(inner, commands[key]):
                        self._check_key((key, inner), commands[key], f"an option of {key}")
                    self._take(taken, (key, inner), one, commands[key])
            else:
                self._check_key((key,), everywhere, "an option")
                if key in commands[command] or _is_study(key, commands[command]):
                    self._take(common, (key,), value, commands[command])
        if "study" in common and "study" in own:
            own["study"] = common["study"] + own["study"]
        return common | own

    def place_of(self, option: str, command: str) -> str:
        """The path and the line of an option's value that a command takes."""
        table = self.document.get(command)
        return self._place((command, option) if isinstance(table, dict) and option in table else (option,))

    def _place(self, keys: tuple[str, ...]) -> str:
        """The path and the line of a key, of which the tables that have it come first."""
        lines = self.text.splitlines(keepends=True)
        named = (number for number, line in enumerate(lines) if keys[-1] in line)
        before = [number for number in islice(named, _MOST_LINES) if not _has("".join(lines[:number]), keys)]
        return f"{self.path}, line {before[-1] + 1}" if before else str(self.path)

    def _check_key(self, keys: tuple[str, ...], options: Collection[str], what: str) -> None:
        key = keys[-1]
        if key in options and key not in UNSETTABLE:
            return
        near = get_close_matches(key, [name for name in options if name not in UNSETTABLE])
        names = " or ".join(map(repr, near))
        action = f"did you mean {names}?" if near else "look the name up in `edgemoe COMMAND --help-all`"
        raise UserError(f"the name of {what} in {self._place(keys)}", shortened(key), action)

    def _take(
        self, options: dict[str, Any], keys: tuple[str, ...], value: Any, declared: Mapping[str, Any]
    ) -> None:
        """Adds a value to options in the form that its parser takes; a setting of studies is added to --study."""
        key = keys[-1]
        if _is_study(key, declared):
            text = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
            key, value = "study", f"{key}={text}"
        fitting = self._fitting(keys, value, declared[key])
        options[key] = [*options.get(key, ()), *fitting] if key == "study" else fitting

    def _fitting(self, keys: tuple[str, ...], value: Any, option: Any) -> Any:
        """A value in the form that the option's parser takes; a repeated option also takes a single value."""
        if option.multiple and isinstance(value, list) and all(map(_is_plain, value)):
            return value
        if option.is_flag and isinstance(value, bool):
            return value
        if not option.is_flag and _is_plain(value):
            return [value] if option.multiple else value
        expected = "true or false" if option.is_flag else "a string or a number"
        place = self._place(keys)
        raise UserError(f"{expected} for {keys[-1]} in {place}", shortened(value), "write such a value")


def _has(text: str, keys: tuple[str, ...]) -> bool:
    """Whether the first lines of a file have a key. Lines that end within a value or a table's name have none."""
    found: Any = None
    with suppress(ValueError, RecursionError):
        found = tomllib.loads(text)
    for key in keys:
        if not isinstance(found, dict) or key not in found:
            return False
        found = found[key]
    return True


def _is_study(key: str, options: Collection[str]) -> bool:
    """Whether a key is a setting of studies for a command that takes these by --study."""
    return key in study_keys() and key not in options and "study" in options


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)
