"""The programs to compare: the command of each, and its model."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from edgemoe.bench.rows import PAPER_RETENTION
from edgemoe.errors import UserError
from edgemoe.models.options.run_settings import run_settings
from tools.peers.token_bytes import gguf_bytes_per_token


@dataclass(frozen=True)
class Program:
    """One row of the comparison.

    Args:
        name: the row's name in tables.
        command: starts the child.
        model: file or directory of the model.
        settings: arguments of run_settings; None for a peer.
        fill: whether edgemoe fills its free blocks before the prompt (Engine.fill).
    """

    name: str
    command: tuple[str, ...]
    model: Path
    settings: dict[str, Any] | None = None
    fill: bool = True


def edgemoe_program(row: str, store: Path) -> Program:
    """edgemoe's program for a row of --settings: "4" (exact), "4/2", or either with the suffix "-empty".

    Raises:
        UserError: the row has another suffix.
    """
    levels, _, empty = row.partition("-")
    if empty not in ("", "empty"):
        raise UserError(
            "levels such as 4/2, alone or before -empty", repr(row), f"write {levels} or {levels}-empty"
        )
    chosen: dict[str, Any] = (
        {"exact": int(levels)} if levels.isdigit() else {"levels": levels, "retention": PAPER_RETENTION}
    )
    name = run_settings(8, **chosen).name
    name += ", empty at first" if empty else ""
    command = (sys.executable, "-m", "tools.peers.edgemoe_child")
    return Program(name, command, store, chosen, fill=not empty)


def own_programs(options: argparse.Namespace) -> list[Program]:
    """edgemoe's rows: every setting with every store, whose name is added where there are several."""
    pairs = list(product(options.store, options.settings))
    programs = [edgemoe_program(levels, store) for store, levels in pairs]
    if len(options.store) == 1:
        return programs
    return [replace(program, name=f"{program.name} ({program.model.name})") for program in programs]


def peer_program(options: argparse.Namespace) -> Program:
    """The program of --peer.

    Raises:
        UserError: the peer is not installed, its model is missing, or it decodes one prompt at a time.
    """
    llama = options.peer == "llama.cpp"
    model, kind = (options.gguf, "--gguf") if llama else (options.checkpoint, "--checkpoint")
    if model is None or not model.exists():
        raise UserError(f"a model for {options.peer}", f"{kind} {model}", f"name one with {kind}")
    if not llama:
        require_module("accelerate")
        if max(options.batch) > 1:
            raise UserError("--batch 1 with accelerate", f"{max(options.batch)}", "leave --batch out")
        return Program("accelerate", (sys.executable, "-m", "tools.peers.accelerate_child"), model)
    if options.llama_python is None:
        require_module("llama_cpp")
    python = options.llama_python or sys.executable
    return Program("llama.cpp", (str(python), "-m", "tools.peers.llama_child"), model)


def peer_bytes(options: argparse.Namespace) -> float | None:
    """Bytes of weights that the peer reads for one token; None for accelerate, which nothing counts."""
    return gguf_bytes_per_token(options.gguf) if options.peer == "llama.cpp" else None


def require_module(name: str) -> None:
    """Raises UserError if a peer's module is not installed."""
    if importlib.util.find_spec(name) is None:
        raise UserError(
            f"the module {name}", "none installed", "install edgemoe[peers], or name --llama-python"
        )
