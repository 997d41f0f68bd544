"""Files of a directory from an untrusted source: the check of their names, and the reading of JSON."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgemoe.errors import EdgemoeError, MissingTensor, ModelRefused
from edgemoe.storage.files.retry import open_regular, read_errors

JSON_LIMIT = 32 << 20
"""Bytes. The index of the largest known checkpoints takes about 15 MB."""

CONFIG_LIMIT = 4 << 20
"""Bytes of config.json. The largest known ones, with a list of the modules that are not quantized, take 200 kB."""

DOWNLOAD_AGAIN = "download the checkpoint again"
CHECK_ORIGIN = "check the origin of this checkpoint"
USE_SOURCE = "use the checkpoint that this one was quantized from"
_CHECK_DISK = "check the disk and the permissions of the file, then try again"
"""Actions of errors about a checkpoint."""


def inside(directory: Path, name: str) -> Path:
    """Returns directory / name after a check that it is a file of that directory.

    Raises:
        ModelRefused: the name leads out of the directory: absolute, through `..`, or by a link.
        MissingTensor: the file does not exist.
    """
    root = directory.resolve()
    # A snapshot in the Hub's cache, with the folders in it, consists of links to the blobs of its repository.
    within = [folder for folder in (root, *root.parents) if folder.parent.name == "snapshots"]
    roots = [root, *(folder.parent.parent / "blobs" for folder in within)]
    try:
        target = (directory / name).resolve()
        exists = target.is_file()
    except (ValueError, OSError, RuntimeError) as error:  # a NUL, a name too long, links in a circle
        raise ModelRefused(
            f"a valid file name in {directory}", f"{shortened(name)} ({error})", DOWNLOAD_AGAIN
        ) from error
    if not any(target.is_relative_to(allowed) for allowed in roots):
        raise ModelRefused(
            f"{name} inside {directory}", f"a name that leads outside, to {target}", CHECK_ORIGIN
        )
    if not exists:
        raise MissingTensor(f"{name} in {directory}", "no such file", DOWNLOAD_AGAIN)
    return directory / name


@contextmanager
def foreign_code(
    expectation: str, action: str = CHECK_ORIGIN, values: Mapping[str, object] | None = None
) -> Iterator[None]:
    """The border of a call into another library with a model's own values: whatever it raises becomes ModelRefused.

    A panic of a library in Rust is a BaseException. This program's errors, Ctrl-C, the end of the program and a lack
    of memory pass.

    Args:
        expectation: the value that is expected of the model, and the file that has it, for messages.
        action: the advice in messages of the error.
        values: the file's values; the error then names the one that the library stumbled over, as far as that is known.
    """
    try:
        yield
    except (EdgemoeError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        found = f"{type(error).__name__}: {shortened(str(error))}"
        if key := _blamed(error, values or {}):
            found = f"{key} {shortened((values or {})[key])} ({found})"
        raise ModelRefused(expectation, found, action) from error


def _blamed(error: BaseException, values: Mapping[str, object]) -> str | None:
    """The key of a file's values that an error's text names or quotes, or that the failed line of a library reads."""
    text = str(error)[:1000]
    words = re.findall(r"\w{3,}", text)
    words += [key for key, value in values.items() if any(word in text for word in _texts(value))]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        words += re.findall(r"(?:config|self)\.(\w+)", frame.line or "")
    return next((word for word in words if word in values), None)


def _texts(value: object) -> list[str]:
    """The texts in a value of a config, of three characters or more: shorter ones occur in any message."""
    found = value.values() if isinstance(value, dict) else [value]
    return [text for text in found if isinstance(text, str) and len(text) > 2]


def refuse_special_files(directory: Path) -> None:
    """Refuses a directory with a pipe, socket or device in it, which would block its reader for ever.

    Raises:
        ModelRefused: with the name of a pipe, socket or device.
        ReadFailed: the operating system refuses to read the directory.
    """
    with read_errors(f"the directory {directory}", _CHECK_DISK):
        for path in sorted(directory.iterdir()):
            if path.exists() and not path.is_file() and not path.is_dir():
                raise ModelRefused(
                    f"files and directories in {directory}",
                    f"{shortened(path.name)}, a pipe or device",
                    CHECK_ORIGIN,
                )


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """Reads the object in a JSON file of the directory.

    Raises:
        ModelRefused: the file lies outside, is larger than its limit, or holds no JSON object.
        MissingTensor: the file does not exist.
        ReadFailed: the operating system refuses to read it.
    """
    path = inside(directory, name)
    limit = CONFIG_LIMIT if name == "config.json" else JSON_LIMIT
    wanted = f"a JSON object of at most {limit} bytes in {path}"
    with read_errors(wanted, _CHECK_DISK):
        size = path.stat().st_size
        if size > limit:
            raise ModelRefused(wanted, f"{size} bytes", DOWNLOAD_AGAIN)
        with open_regular(path) as file:
            raw = file.read()
    try:
        parsed = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ModelRefused(
            wanted, f"text that does not parse ({shortened(str(error))})", DOWNLOAD_AGAIN
        ) from error
    if not isinstance(parsed, dict):
        raise ModelRefused(wanted, f"a {type(parsed).__name__}", DOWNLOAD_AGAIN)
    return parsed


def refuse_remote_code(name: str, content: dict[str, Any]) -> None:
    """Raises ModelRefused if a parsed JSON file names code of the checkpoint."""
    if "auto_map" in content:
        raise ModelRefused(
            f"a {name} that transformers understands",
            "auto_map, which runs code from the checkpoint",
            "choose a checkpoint without remote code",
        )


def no_tensor(place: str) -> MissingTensor:
    """The error for a tensor that is missing at a place, such as "lm_head.weight in DIR"."""
    return MissingTensor(f"tensor {place}", "no tensor of that name", DOWNLOAD_AGAIN)


def shortened(value: object) -> str:
    """repr of a value, cut to 60 characters for a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"
