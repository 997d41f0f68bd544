"""One progress bar for a download and the conversion that runs meanwhile."""

from __future__ import annotations

from edgemoe.console.progress import ByteProgress


class ConversionProgress:
    """Adds downloaded and converted bytes on one bar. For one thread."""

    def __init__(self, bar: ByteProgress) -> None:
        self._bar = bar
        self._to_download = self._to_convert = self._downloaded = self._converted = 0

    def expect(self, to_download: int) -> None:
        """Sets the total bytes of weights to download, and to convert until `converted` says how many."""
        self._to_download = self._to_convert = to_download

    def downloaded(self, size: int) -> None:
        """Adds `size` downloaded bytes."""
        self._downloaded += size
        self._show()

    def converted(self, count: int, total: int) -> None:
        """Sets converted and total bytes of source; the `progress` argument of storage.convert.run.convert."""
        self._converted, self._to_convert = count, total
        self._show()

    def _show(self) -> None:
        if not self._to_download:
            return  # the headers are still being downloaded
        # A shard that a killed run converted in part is downloaded twice, and counts once.
        done = min(self._downloaded, self._to_download) + self._converted
        self._bar.update(done, self._to_download + self._to_convert)
