"""The directory of what edgemoe keeps between runs and can make again."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import platformdirs


def user_cache() -> Path:
    """The root of the cache, created if missing. Only its user may read it: models may be private."""
    root = Path(platformdirs.user_cache_dir("edgemoe"))
    with suppress(OSError):  # the first write to the cache reports why it cannot be made
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    return root
