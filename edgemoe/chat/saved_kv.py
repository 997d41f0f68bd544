"""Identifies the KV of a saved conversation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SavedKV:
    """Identifies a saved KV on disk: its format, and a hash of the model and settings.

    Args:
        format: how keys and values are stored, in words.
        root: hash of all that KV depends on but tokens, in hex.
    """

    format: str
    root: str
