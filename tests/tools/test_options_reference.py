"""docs/options.md, which tools/options_reference.py writes from the code."""

from __future__ import annotations

import typer

from edgemoe.cli import app
from edgemoe.commands.options.configured_command import options_of
from tools.options_reference import PAGE, page


def test_the_reference_is_current():
    """The page is what python -m tools.options_reference writes now: run it after a change of an option."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_every_option_is_in_the_reference():
    """Each command has a heading, and each of its options that a user sees stands under it or in the first table."""
    shared, *sections = page().split("\n## edgemoe ")
    commands = typer.main.get_command(app).commands
    found = {section.split("\n")[0]: section for section in sections}
    assert found.keys() == commands.keys()
    for name, command in commands.items():
        options = {option for option, each in options_of(command).items() if not each.hidden}
        assert {option for option in options if f"--{option}" not in found[name]} == set()
        assert len(shared) > 1000
