"""The prefix cache that a user's options name, for an open store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edgemoe.console.sizes import parse_size
from edgemoe.errors import UserError
from edgemoe.models.cache import kv_directory

if TYPE_CHECKING:
    from edgemoe.kv.prefix_cache import PrefixCache
    from edgemoe.models.options.groups import PrefixCacheOptions
    from edgemoe.models.store_model import StoreModel

DEFAULT_LIMIT = "4GB"
"""Limit of all KV in a directory."""


def require_directory(directory: Path | None, limit: str | None) -> int:
    """Returns the limit in bytes; 0 for "0", which stands for no KV on disk.

    Raises:
        UserError: it is no size, or there is no directory that it is for.
    """
    if limit is not None and directory is None:
        found = "--prefix-cache-limit alone"
        raise UserError("--prefix-cache-dir with --prefix-cache-limit", found, "add --prefix-cache-dir DIR")
    return 0 if limit == "0" else parse_size(limit or DEFAULT_LIMIT)


def open_prefix_cache(
    store: StoreModel, directory: Path, limit: int, *, automatic: bool = True
) -> PrefixCache:
    """Opens the KV blocks in a directory.

    Args:
        store: has the format of keys and values.
        directory: made where it is missing.
        limit: bytes of all its files.
        automatic: whether blocks are read and written at once; otherwise only after PrefixCache.start.

    Raises:
        UserError: as PrefixCache.open.
    """
    from edgemoe.kv.prefix_cache import PrefixCache

    return PrefixCache.open(directory.expanduser(), limit, store.shape.kv, automatic=automatic)


def conversation_cache(store: StoreModel, options: PrefixCacheOptions, *, keeps: bool) -> PrefixCache | None:
    """Opens the KV on disk that the options name.

    Without --prefix-cache-dir it is the KV of saved conversations: with `keeps` (the conversation is kept for
    --continue) from the first answer on, else from /save or /load on. None where this model or machine has none.
    """
    directory, limit = options.prefix_cache_dir, options.prefix_cache_limit
    most = require_directory(directory or kv_directory(), limit)
    if directory:
        return open_prefix_cache(store, directory, most)
    if not most:
        return None
    try:
        return open_prefix_cache(store, kv_directory(), most, automatic=keeps)
    except UserError:
        if limit is not None:
            raise
        return None
