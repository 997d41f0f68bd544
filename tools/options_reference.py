"""Writes docs/options.md: every command with its arguments and options, as the code declares them.

python -m tools.options_reference
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import typer

from edgemoe.cli import app
from edgemoe.commands.options.configured_command import long_name
from edgemoe.commands.options.help_sections import FURTHER, SECTIONS
from tools.checkout import ROOT

PAGE = ROOT / "docs" / "options.md"

SHARED = 3
"""An option that so many commands or more declare alike is described once, in the first table."""

_HEAD = """\
# Options

Every command with its arguments and options, written by `python -m tools.options_reference` from the code. `edgemoe
COMMAND --help` prints it for one command: of `chat`, `serve` and `bench` twelve to begin with, all with `--help-all`.
Which options matter for which task is in the [guides](guides/chat.md).

## Options that need not be typed

edgemoe reads `~/.config/edgemoe/config.toml` where it exists (`XDG_CONFIG_HOME` names another place for `.config`), or
the TOML file that `--config FILE` names instead. A key is the name of an option. At the top it is for every command
that has the option, and in a table for the command of the table's name alone:

```
vram-limit = "12GB"

[chat]
model = "qwen3"
temperature = 0.7

[serve]
model = "qwen3-coder"
context = 32768
```

A variable of the environment sets an option too: `EDGEMOE_VRAM_LIMIT=12GB`. The command line goes before variables,
variables before the file, and a command's table before the top. A key that no option has is an error with the file, the
line and the nearest names. `--print-config` prints every option, its value and where that comes from, as such a file;
`edgemoe doctor` says which file was read.
"""


@dataclass(frozen=True)
class Row:
    """One option or argument of a command.

    Args:
        names: the names as a user types them, with a word for the value that follows.
        text: the description, with the default and the range.
    """

    names: str
    text: str

    def line(self, *more: str) -> str:
        """The row of a Markdown table, with further cells between the names and the text."""
        return (
            "| "
            + " | ".join((f"`{self.names}`", *more, self.text.replace("|", "\\|").replace("<", "\\<")))
            + " |"
        )


def page() -> str:
    """The whole page."""
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    rows = {name: _rows(name, command) for name, command in commands.items()}
    users: dict[Row, list[str]] = defaultdict(list)
    for name, own in rows.items():
        for row in own:
            users[row].append(name)
    shared = {row: names for row, names in users.items() if len(names) >= SHARED}
    parts = [_HEAD, "## Options of several commands\n", *_shared_table(shared, len(commands))]
    for name, command in commands.items():
        parts += ["", f"## edgemoe {name}\n", _sentence(command.help), ""]
        own = {row: option for row, option in rows[name].items() if row not in shared}
        parts += [_usage(name, command), "", *_tables(name, own)]
        also = [f"`--{option}`" for row, option in rows[name].items() if row in shared]
        parts += ["", f"Also, from the first table: {', '.join(also)}."] if also else []
    return "\n".join(parts).rstrip() + "\n"


def _shared_table(shared: dict[Row, list[str]], commands: int) -> list[str]:
    lines = ["| option | commands | |", "|---|---|---|"]
    for row, names in shared.items():
        lines.append(row.line("all" if len(names) == commands else ", ".join(names)))
    return lines


def _tables(name: str, rows: dict[Row, str]) -> list[str]:
    """The command's own arguments and options: in the sections of its --help, then the others."""
    if not rows:
        return ["It has no options of its own."]
    sections = [("Arguments", ("",)), *SECTIONS.get(name, {}).items()]
    sections += FURTHER.items() if name in SECTIONS else ()
    parts = [
        (heading, [row for row, option in rows.items() if option in names]) for heading, names in sections
    ]
    first = [row for _, own in parts for row in own]
    parts.append(("Options", [row for row in rows if row not in first]))
    lines: list[str] = []
    for heading, own in parts:
        if own:
            lines += ["", f"**{heading}**", "", "| | |", "|---|---|", *(row.line() for row in own)]
    return lines[1:]


def _usage(name: str, command: Any) -> str:
    arguments = [_argument(each) for each in command.params if not long_name(each)]
    return f"`{' '.join(['edgemoe', name, *arguments, '[OPTIONS]'])}`"


def _sentence(text: str) -> str:
    """The first paragraphs of a docstring, each on one line."""
    return "\n\n".join(" ".join(part.split()) for part in text.strip().split("\n\n"))


def _rows(name: str, command: Any) -> dict[Row, str]:
    """The rows of a command's arguments and options -> the option's name without dashes, "" for an argument."""
    context = command.make_context(name, [], resilient_parsing=True)
    rows: dict[Row, str] = {}
    for each in command.params:
        record = each.get_help_record(context)
        if record is None or each.hidden:
            continue
        names = re.sub(
            r" <([a-z]+)[^>]*>", lambda kind: f" {_KINDS.get(kind[1], kind[1].upper())}", record[0]
        )
        rows[Row(names, " ".join(record[1].split()))] = long_name(each)
    return rows


_KINDS = {"str": "TEXT", "list": "TEXT", "int": "N", "float": "NUMBER", "path": "PATH"}
"""The first word of a type -> a word for its values."""


def _argument(parameter: Any) -> str:
    """An argument as a command's usage names it, in brackets where it can be left out."""
    name = parameter.metavar or parameter.name.upper()
    return str(name if parameter.required else f"[{name}]")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
