"""What the KV of a saved conversation is of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SavedKV:
    """What the KV of a saved conversation is of, so that it can be found on disk.

    Args:
        format: of keys and values, in words.
        root: hash of all that KV depends on beside tokens, in hex.
    """

    format: str
    root: str
