"""The programs that are compared: how each is started, and on which model."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgemoe.bench.rows import PAPER_RETENTION
from edgemoe.commands.options import run_settings
from storage.errors import UserError


@dataclass(frozen=True)
class Program:
    """One row of the comparison.

    Args:
        name: in tables.
        command: starts its child.
        model: its file or directory.
        settings: of edgemoe; None: a peer.
        fill: whether edgemoe's free room is filled before the prompt comes (Engine.fill).
    """

    name: str
    command: tuple[str, ...]
    model: Path
    settings: dict[str, Any] | None = None
    fill: bool = True


def edgemoe_program(row: str, store: Path) -> Program:
    """edgemoe at levels such as 4 (then exact) or 4/2; behind them -empty where no room is to be filled."""
    levels, _, empty = row.partition("-")
    if empty not in ("", "empty"):
        raise UserError(
            f"the row {row} was wanted", f"-{empty} is not known", "Levels stand alone or before -empty"
        )
    chosen: dict[str, Any] = (
        {"exact": int(levels)} if levels.isdigit() else {"levels": levels, "retention": PAPER_RETENTION}
    )
    name = run_settings(8, **chosen).name
    name += ", empty at first" if empty else ""
    command = (sys.executable, "-m", "tools.peers.edgemoe_child")
    return Program(name, command, store, chosen, fill=not empty)


def peer_program(options: argparse.Namespace) -> Program:
    """The peer that was chosen.

    Raises:
        UserError: it is not installed, or its model is not given.
    """
    model = options.gguf if options.peer == "llama.cpp" else options.checkpoint
    if model is None or not model.exists():
        wanted, option = (
            ("a GGUF", "--gguf") if options.peer == "llama.cpp" else ("a checkpoint", "--checkpoint")
        )
        raise UserError(f"{wanted} was wanted for {options.peer}", f"{option} is {model}", f"Give {option}")
    if options.peer == "accelerate":
        require_module("accelerate")
        return Program("accelerate", (sys.executable, "-m", "tools.peers.accelerate_child"), model)
    if options.llama_python is None:
        require_module("llama_cpp")
    python = options.llama_python or sys.executable
    return Program("llama.cpp", (str(python), "-m", "tools.peers.llama_child"), model)


def require_module(name: str) -> None:
    """Raises UserError where a peer's module is missing."""
    if importlib.util.find_spec(name) is None:
        raise UserError(
            f"the module {name} was wanted",
            "it is not installed",
            "Install edgemoe[peers], or name --llama-python",
        )
