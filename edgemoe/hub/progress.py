"""One bar for a download and the conversion that goes along with it."""

from __future__ import annotations

from edgemoe.console.progress import ByteProgress


class PassingProgress:
    """Adds up bytes that were downloaded and bytes that were converted. Used by one thread."""

    def __init__(self, bar: ByteProgress) -> None:
        self._bar = bar
        self._to_download = self._downloaded = self._converted = 0
        self._to_convert: int | None = None

    def expect(self, to_download: int) -> None:
        """So many bytes of weights come in all."""
        self._to_download = to_download

    def downloaded(self, size: int) -> None:
        """`size` bytes more are here."""
        self._downloaded += size
        self._show()

    def converted(self, done: int, total: int) -> None:
        """As storage.convert's progress."""
        self._converted, self._to_convert = done, total
        self._show()

    def _show(self) -> None:
        if not self._to_download:
            return  # the first headers are still coming
        # A shard that a killed run has converted in part is downloaded twice, and counts once.
        done = min(self._downloaded, self._to_download) + self._converted
        to_convert = self._to_download if self._to_convert is None else self._to_convert
        self._bar.update(done, self._to_download + to_convert)
