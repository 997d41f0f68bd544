"""The conditions of a training run, which the model card shows, and whether a run may start or resume."""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from edgemoe.errors import UserError
from tools.training.data import Files
from tools.training.loop import Recipe
from tools.training.model import DEMO_FAMILY, Size


def check_start(options: argparse.Namespace) -> None:
    """Prevents overwriting a run, and resuming where there is none.

    Raises:
        UserError: --out has a run and --resume is missing, or the reverse; a resumed run is given --from or --words;
            both of these.
    """
    option = "--from" if options.start else "--words"
    if options.resume and (options.start or options.words):
        raise UserError(
            f"--resume or {option}", "both", f"leave out {option}: the run continues with its own weights"
        )
    if options.start and options.words:
        raise UserError("--from or --words", "both", "leave out --words: --from brings its own embeddings")
    directory = options.out / "run"
    if (directory / "state.pt").exists() == options.resume:
        return
    if options.resume:
        raise UserError(f"a run to resume in {directory}", "none", "leave out --resume")
    raise UserError(f"no run in {directory}", "one", "add --resume, or name another --out")


def check_same_data(before: dict[str, Any], options: argparse.Namespace, files: Files) -> None:
    """Makes sure that a resumed run continues with its data.

    Raises:
        UserError: an option would change the data; names the first such option.
    """
    for name in ("seed", "chat_tokens", "text_tokens", "family"):
        if getattr(options, name) != before.get(name, DEMO_FAMILY):
            option = "--" + name.replace("_", "-")
            raise UserError(
                f"the run's {option} {before.get(name, DEMO_FAMILY)}",
                str(getattr(options, name)),
                f"give {option} {before.get(name, DEMO_FAMILY)}, or name another --out",
            )
    if files["prose"] != before["files"]["prose"]:
        raise UserError(
            f"the run's corpus of {before['files']['prose']} files",
            f"{files['prose']} in {options.corpus}",
            "give the same --corpus",
        )


def earlier_run(directory: Path) -> dict[str, Any]:
    """The commands, steps, tokens and seconds that the model in a directory was trained with, by its figures.json.

    Raises:
        UserError: there is no such file.
    """
    path = directory / "figures.json"
    if not path.exists():
        raise UserError(
            f"a model with figures.json in {directory}", "none", "run tools.model_card on it first"
        )
    figures = json.loads(path.read_text())
    run, last, before = figures["run"], figures["last"], figures["run"].get("earlier") or {}
    totals = {name: last[name] + before.get(name, 0) for name in ("step", "tokens", "elapsed_s")}
    return {"commands": [*before.get("commands", []), *run["commands"]], **totals}


def write_description(
    path: Path, options: argparse.Namespace, size: Size, recipe: Recipe, files: Files, threads: int
) -> None:
    """Writes the run's conditions as JSON for the model card; a resumed run appends its command.

    Raises:
        UserError: a resumed run has other data; nothing is written.
    """
    commands, earlier = [], earlier_run(options.start) if options.start else None
    if options.resume:
        before = json.loads(path.read_text())
        check_same_data(before, options, files)
        commands, earlier = before["commands"], before.get("earlier")
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "tokenizers")}
    description = {
        "commands": [*commands, options.command],
        "earlier": earlier,
        "seed": options.seed,
        "family": options.family,
        "size": asdict(size),
        "recipe": asdict(recipe),
        "chat_tokens": options.chat_tokens,
        "text_tokens": options.text_tokens,
        "files": files,
        "threads": threads,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU",
        "versions": {"python": platform.python_version()} | versions,
    }
    path.write_text(json.dumps(description, indent=1) + "\n")
