"""Downloads a checkpoint of the Hub shard by shard, and keeps or removes it; chooses the layout of its store."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgemoe.console.progress import ByteProgress
from edgemoe.errors import UserError
from edgemoe.hub.name import HubModel
from edgemoe.hub.progress import ConversionProgress
from edgemoe.kernels.registry import compute
from edgemoe.models.cache import downloads_directory
from edgemoe.storage.files.lock import StoreLock
from edgemoe.storage.record.layout import LAYOUTS, Layout

if TYPE_CHECKING:
    from edgemoe.hub.shards import StreamedShards

KEPT = ".keep-source"
"""Marker file in a download's directory: the checkpoint stays after conversion."""


def choose_layout(name: str) -> Layout:
    """Looks up a layout by name; `auto` is the layout of this machine's fastest CPU kernel."""
    if name == "auto":
        return compute().layout
    if name not in LAYOUTS:
        raise UserError("the name of a layout", repr(name), f"choose auto or one of {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


RETAINED = ".retain-source"
"""Marker file in a download's directory: the checkpoint stays until the store's codes are calibrated."""


@dataclass(frozen=True)
class Download:
    """A checkpoint that is downloaded shard by shard.

    Args:
        source: its directory.
        shards: files as they arrive.
        progress: counts bytes that are downloaded and converted.
    """

    source: Path
    shards: StreamedShards
    progress: ConversionProgress

    def retain(self) -> None:
        """Keeps the whole checkpoint until the store's codes are calibrated."""
        (self.source / RETAINED).touch()
        self.shards.keep()


@contextmanager
def download(model: HubModel, source: Path, *, keep: bool) -> Iterator[Download]:
    """Downloads a checkpoint into `source`, with a bar on stderr; removes or completes it after the block.

    A first call that ends before it has downloaded weights leaves no directory.

    Raises:
        UserError: the Hub cannot be reached, or has no such model.
    """
    from edgemoe.hub.checkpoint import open_streamed

    begun = source.exists()
    source.mkdir(parents=True, exist_ok=True)
    kept, retained = source / KEPT, source / RETAINED
    if keep:
        kept.touch()
    with StoreLock(source, exclusive=True), ByteProgress(f"downloading and converting {model.name}") as bar:
        progress = ConversionProgress(bar)
        try:
            stays = kept.exists() or retained.exists()
            shards, total = open_streamed(model, source, keep=stays, progress=progress.downloaded)
        except BaseException:
            if not begun:  # no weights have been downloaded
                shutil.rmtree(source)
            raise
        progress.expect(total)
        yield Download(source, shards, progress)
        if kept.exists() or retained.exists():
            shards.complete()
        else:
            shutil.rmtree(source)


def download_path(model: HubModel, layout: str) -> Path:
    """The path of a model's checkpoint in the cache, while it is converted to a layout or kept."""
    return downloads_directory() / f"{model.slug}-{choose_layout(layout).name}"
