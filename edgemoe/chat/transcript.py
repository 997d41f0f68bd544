"""Conversations as files: JSON, written whole or not at all, and checked when read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgemoe.chat.template import Message
from storage.atomic import replacing, write_all
from storage.errors import EdgemoeError, UserError

FORMAT = "edgemoe conversation"
VERSION = 1

MOST_BYTES = 64 << 20
"""Of a file that is read."""


def save(path: Path, messages: Sequence[Message]) -> None:
    """Writes a conversation, in the place of another one, but of no other file.

    Raises:
        UserError: there is nothing to save, something else is there, or it cannot be written (a full disk too:
            what cannot be saved is no reason to end the chat).
    """
    if not messages:
        raise UserError(f"a conversation was wanted for {path}", "nothing has been said yet", "Ask something")
    if path.exists():
        try:
            load(path)
        except UserError as error:
            raise UserError(
                f"a place for the conversation was wanted at {path}",
                "there is a file that is no conversation",
                "Choose another name",
            ) from error
    document = {"format": FORMAT, "version": VERSION, "messages": [dict(m) for m in messages]}
    data = json.dumps(document, indent=1).encode() + b"\n"
    try:
        with replacing(path, len(data)) as file:
            write_all(file, data)
    except (OSError, EdgemoeError) as error:
        raise _unusable("written", path, error) from error


def load(path: Path) -> list[Message]:
    """Reads a conversation: perhaps a system message, then questions and answers in turn.

    Raises:
        UserError: it cannot be read or is no conversation; saying what is wrong with it.
    """
    try:
        if not path.is_file():
            raise UserError(f"a conversation was wanted in {path}", "there is no such file", "See /save")
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise _unusable("read", path, error) from error
    wrong = f"more than {MOST_BYTES} bytes" if len(data) > MOST_BYTES else None
    document: Any = None
    if wrong is None:
        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as error:
            wrong = f"no JSON ({str(error)[:80]})"
    wrong = wrong or _fault(document)
    if wrong is not None:
        raise UserError(f"a conversation was wanted in {path}", f"it is {wrong}", "Load what /save wrote")
    return [{"role": m["role"], "content": m["content"]} for m in document["messages"]]


def _fault(document: Any) -> str | None:
    """What is wrong with a parsed file; None: nothing."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        return f'without "format": "{FORMAT}"'
    if document.get("version") != VERSION:
        return f"of version {document.get('version')!r:.20}, and this is edgemoe for version {VERSION}"
    messages = document.get("messages")
    if not isinstance(messages, list) or not messages:
        return "without messages"
    for place, message in enumerate(messages):
        named = isinstance(message, dict) and set(message) == {"role", "content"}
        if not named or not all(_is_text(part) for part in message.values()):
            return f"wrong in message {place}: a role and a content, both text, were wanted"
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    if len(turns) % 2 or any(role != ("user", "assistant")[i % 2] for i, role in enumerate(turns)):
        return "without the order of roles: perhaps system, then user and assistant in turn"
    return None


def _is_text(value: Any) -> bool:
    """Half of a surrogate pair, which JSON can spell, is no text that a tokenizer takes."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def _unusable(what: str, path: Path, error: OSError | EdgemoeError) -> UserError:
    found = error.found if isinstance(error, EdgemoeError) else error.strerror
    return UserError(
        f"a conversation was to be {what} at {path}",
        found or str(error),
        "Name a file in a directory that is yours",
    )
