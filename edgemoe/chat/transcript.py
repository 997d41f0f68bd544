"""Saves conversations to JSON files, whole or not at all, and checks them when they are loaded."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import platformdirs

from edgemoe.api.model import Model
from edgemoe.api.pictures import has_pictures, without_pictures
from edgemoe.api.template import Message
from edgemoe.chat.conversation import Conversation
from edgemoe.chat.saved_kv import SavedKV
from edgemoe.errors import EdgemoeError, UserError
from edgemoe.storage.files.atomic import replacing, write_all

FORMAT = "edgemoe conversation"
VERSION = 1

LEFT_OUT = {"type": "text", "text": "(a picture that was not saved)"}
"""Stands for each picture that a saved conversation leaves out."""

MOST_BYTES = 64 << 20
"""Maximum size of a file."""


def keep_last(conversation: Conversation, then: Callable[[], None]) -> None:
    """Saves a conversation for load_last, and calls `then`; a failed write is only logged.

    Replaces any file there. Pictures stay out where the file would be too large to load again.
    """
    path, messages = _last(), conversation.messages
    try:
        kv = conversation.saved_kv()[0]
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        data = _encoded(messages, kv)
        if len(data) > MOST_BYTES and has_pictures(messages):
            data = _encoded([without_pictures(message, LEFT_OUT) for message in messages], kv)
        _write(path, data)
    except (OSError, UserError) as error:
        logging.getLogger("edgemoe").warning("the conversation is not kept for --continue: %s", error)
    then()


def continued(
    model: Model, system: str | None, messages: list[Message], saved_kv: SavedKV | None
) -> tuple[Conversation, str]:
    """Begins a conversation with the messages of an earlier one.

    Args:
        model: computes the answers.
        system: a system message; None: the earlier one's.
        messages, saved_kv: the result of load_last; no messages: a new conversation.

    Returns:
        the conversation, and a line about what it continues; "" for a new one.
    """
    conversation = Conversation(model, system)
    if not messages:
        return conversation, ""
    conversation.restore(messages)
    conversation.set_system(system or conversation.system)
    note = conversation.kv_note(saved_kv)
    return conversation, f"(continues {len(messages)} messages: {note})" if note else ""


def load_last() -> tuple[list[Message], SavedKV | None]:
    """Loads the conversation that keep_last saved last, and what its KV is of.

    Raises:
        UserError: there is none, or from load.
    """
    path = _last()
    if not path.exists():
        wanted = "a conversation to continue"
        raise UserError(wanted, f"none in {path}", "start one at a terminal, without --continue")
    return load(path), load_kv(path)


def _last() -> Path:
    return Path(platformdirs.user_state_dir("edgemoe"), "last-conversation.json")


def save(path: Path, messages: Sequence[Message], kv: SavedKV | None = None) -> None:
    """Writes a conversation. Replaces another conversation, but no other file.

    Args:
        path: the file.
        messages: the messages of the conversation.
        kv: identifies its KV on disk; None: it has none there.

    Raises:
        UserError: no messages, more than MOST_BYTES, another file at `path`, or a failed write. A full disk is a
            UserError too, so that the chat continues.
    """
    if not messages:
        raise UserError(f"messages to save in {path}", "none", "enter a turn first")
    if path.exists():
        try:
            load(path)
        except UserError as error:
            wanted = f"no file or a saved conversation at {path}"
            raise UserError(wanted, "a file that is no conversation", "choose another name") from error
    _write(path, _encoded(messages, kv))


def _encoded(messages: Sequence[Message], kv: SavedKV | None) -> bytes:
    """The bytes of a conversation's file."""
    document: dict[str, Any] = {"format": FORMAT, "version": VERSION, "messages": [dict(m) for m in messages]}
    if kv:
        document["kv"] = asdict(kv)
    return json.dumps(document, indent=1).encode() + b"\n"


def _write(path: Path, data: bytes) -> None:
    """Writes a conversation's file whole, or not at all.

    Raises:
        UserError: it would be too large to load again, or the write fails.
    """
    if len(data) > MOST_BYTES:
        wanted = f"a conversation of at most {MOST_BYTES} bytes, its pictures included"
        raise UserError(
            wanted,
            f"{len(data)} bytes for {path}",
            "begin another one with /clear, or attach smaller pictures",
        )
    try:
        with replacing(path, len(data)) as file:
            write_all(file, data)
    except (OSError, EdgemoeError) as error:
        raise _unusable("writable", path, error) from error


def load_kv(path: Path) -> SavedKV | None:
    """Reads what the KV of a saved conversation is of; None where the file does not say."""
    try:
        found = json.loads(path.read_bytes()).get("kv")
        return SavedKV(str(found["format"]), str(found["root"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def load(path: Path) -> list[Message]:
    """Loads a conversation: an optional system message, then questions and answers in turn.

    Raises:
        UserError: the file cannot be read or is no conversation, with the fault.
    """
    try:
        if not path.is_file():
            found = "a directory" if path.is_dir() else "no such file"
            raise UserError(f"a conversation in {path}", found, "load a file that /save wrote")
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        document: Any = json.loads(data) if len(data) <= MOST_BYTES else None
        fault = _fault(document) if len(data) <= MOST_BYTES else f"more than {MOST_BYTES} bytes"
    except OSError as error:
        raise _unusable("readable", path, error) from error
    except (ValueError, RecursionError) as error:
        fault = f"no JSON ({str(error)[:80]})"
    if fault is not None:
        raise UserError(f"a conversation in {path}", fault, "load a file that /save wrote")
    return [{"role": m["role"], "content": m["content"]} for m in document["messages"]]


def _fault(document: Any) -> str | None:
    """The first fault of a parsed file; None without one."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        return f'a file without "format": "{FORMAT}"'
    if document.get("version") != VERSION:
        return f"version {document.get('version')!r:.20}, while this edgemoe reads version {VERSION}"
    messages = document.get("messages")
    if not isinstance(messages, list) or not messages:
        return "a file without messages"
    for place, message in enumerate(messages):
        named = isinstance(message, dict) and set(message) == {"role", "content"}
        if not named or not (_is_text(message["role"]) and _is_content(message["content"])):
            return f"something other than the texts role and content in message {place}"
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    if len(turns) % 2 or any(role != ("user", "assistant")[i % 2] for i, role in enumerate(turns)):
        return "another order of roles than system (optional), then user and assistant in turn"
    return None


def _is_content(value: Any) -> bool:
    """Whether a value is text, or parts of text and pictures as api.pictures.picture_part makes them."""
    if not isinstance(value, list):
        return _is_text(value)
    return all(isinstance(part, dict) and _is_text(_text_of(part)) for part in value)


def _text_of(part: dict[str, Any]) -> Any:
    """The text of a part, or the URL of a picture."""
    if "text" in part:
        return part["text"]
    picture = part.get("image_url")
    return picture.get("url") if isinstance(picture, dict) else picture


def _is_text(value: Any) -> bool:
    """Whether a value is text for a tokenizer: no half of a surrogate pair, which JSON can express."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def _unusable(kind: str, path: Path, error: OSError | EdgemoeError) -> UserError:
    found = error.finding if isinstance(error, EdgemoeError) else error.strerror
    return UserError(f"a {kind} file {path}", found or str(error), "name a file in a directory of your own")
