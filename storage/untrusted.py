"""Files in a directory that anyone may have made: which are opened, and how JSON among them is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from storage.errors import MissingTensor, ModelRefused

JSON_LIMIT = 64 << 20
"""Bytes. The index of the largest checkpoints known takes about 15 MB."""


def inside(directory: Path, name: str) -> Path:
    """directory / name, once it is sure to be a file of that directory.

    Raises:
        ModelRefused: the name leads out of the directory: absolute, through `..`, or by a link.
        MissingTensor: there is no such file.
    """
    root = directory.resolve()
    roots = [root]
    if root.parent.name == "snapshots":
        # A snapshot in the Hub's own cache is made of links to its repository's blobs.
        roots.append(root.parent.parent / "blobs")
    try:
        target = (directory / name).resolve()
    except (ValueError, OSError, RuntimeError) as error:  # a NUL, a name too long, links in a circle
        raise ModelRefused(
            f"a valid file name in {directory}",
            f"{shortened(name)} ({error})",
            "download the checkpoint again",
        ) from error
    if not any(target.is_relative_to(allowed) for allowed in roots):
        raise ModelRefused(
            f"{name} inside {directory}",
            f"a name that leads outside, to {target}",
            "check the origin of this checkpoint",
        )
    if not target.is_file():
        raise MissingTensor(f"{name} in {directory}", "no such file", "download the checkpoint again")
    return directory / name


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """The object in a JSON file of the directory.

    Raises:
        ModelRefused: it leads outside, is larger than JSON_LIMIT, or holds no JSON object.
        MissingTensor: there is no such file.
    """
    path = inside(directory, name)
    wanted = f"a JSON object of at most {JSON_LIMIT} bytes in {path}"
    size = path.stat().st_size
    if size > JSON_LIMIT:
        raise ModelRefused(wanted, f"{size} bytes", "download the checkpoint again")
    try:
        parsed = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelRefused(
            wanted, f"text that does not parse ({shortened(str(error))})", "download the checkpoint again"
        ) from error
    if not isinstance(parsed, dict):
        raise ModelRefused(wanted, f"a {type(parsed).__name__}", "download the checkpoint again")
    return parsed


def refuse_remote_code(name: str, parsed: dict[str, Any]) -> None:
    """Raises ModelRefused if a parsed JSON file names code that comes with the checkpoint."""
    if "auto_map" in parsed:
        raise ModelRefused(
            f"a {name} that transformers understands",
            "auto_map, which runs code from the checkpoint",
            "choose a checkpoint without remote code",
        )


def shortened(value: object) -> str:
    """repr, cut to what fits in a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"
