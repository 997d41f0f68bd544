"""Checks the bytes of a picture, and makes of them what a vision tower takes."""

from __future__ import annotations

import hashlib
import math
import threading
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from edgemoe.errors import ModelRefused, UserError
from edgemoe.kv.blocks import BLOCK_ROWS
from edgemoe.machine.packages import install_extra
from edgemoe.storage.files.untrusted import CHECK_ORIGIN, foreign_code, shortened
from edgemoe.vision.forms import VisionForm
from edgemoe.vision.sizes import MOST_PIXELS, MOST_SOURCE_PIXELS

MOST_BYTES = 20_000_000
"""Most bytes of a picture's file."""

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Formats of files that Pillow may decode; of a GIF the first picture counts."""

_MOST_RATIO = 200
"""Largest ratio of the sides of a picture that processors divide into patches."""

_MOST_GRIDS = 1024
"""Number of pictures that are in memory with their size in patches, without their bytes."""

_SOFT_TOKENS = (70, 140, 280, 560, 1120)
"""Bounds on a picture's tokens that a processor with `max_soft_tokens` accepts."""

_WANTED = "a picture as PNG, JPEG, WebP or GIF"


@dataclass(frozen=True)
class Picture:
    """A picture that can be decoded.

    Args:
        data: the bytes of its file.
        digest: their SHA-256.
        grid: patches in time, height and width.
        tokens: number of its tokens in a prompt.
    """

    data: bytes
    digest: bytes
    grid: tuple[int, int, int]
    tokens: int


class PictureReader:
    """Reads pictures for one model. Thread-safe; one picture is decoded at a time, so that its memory is bounded.

    Args:
        directory: the directory of the store, with the processor's settings.
        form: how pictures enter the model.
        vision: vision_config, bounded.
    """

    def __init__(self, directory: Path, form: VisionForm, vision: dict[str, Any]) -> None:
        self._directory, self._form, self._vision = directory, form, vision
        self._lock = threading.Lock()
        self._grids = dict[bytes, tuple[int, int, int]]()  # by digest, the latest last
        self._grids_lock = threading.Lock()

    def read(self, data: bytes) -> Picture:
        """Decodes a picture, to see that it can be decoded and how many tokens it has.

        The results for the last pictures are kept, so that the later turns of a conversation decode nothing again.

        Raises:
            UserError: it is too large, or no picture; Pillow is missing.
            ModelRefused: the processor's settings contradict config.json.
        """
        if len(data) > MOST_BYTES:
            raise UserError(
                f"a picture of at most {MOST_BYTES} bytes", f"{len(data)} bytes", "send a smaller one"
            )
        digest = hashlib.sha256(data).digest()
        with self._grids_lock:
            grid = self._grids.pop(digest, None)
        if grid is None:
            grid = _grid_of(self.pixels(data))
        with self._grids_lock:
            self._grids[digest] = grid
            if len(self._grids) > _MOST_GRIDS:
                del self._grids[next(iter(self._grids))]
        return Picture(data, digest, grid, math.prod(grid) // self._vision[self._form.merge] ** 2)

    def pixels(self, data: bytes) -> dict[str, torch.Tensor]:
        """Makes the named tensors of a picture that the tower takes; raises as `read`."""
        with self._lock:
            picture = _decoded(data)
            with foreign_code(
                f"a picture that {self._form.processor} can divide into patches", "send another picture"
            ):
                options = {"do_resize": True, "return_tensors": "pt"} | self._bounds
                return dict(self._processor(images=[picture], **options))

    @cached_property
    def _bounds(self) -> dict[str, Any]:
        """The bounds of a picture's size, as the processor takes them: fewest and most pixels, or most tokens."""
        own = self._processor
        if given := getattr(own, "max_soft_tokens", None):
            pixels = (self._vision["patch_size"] * self._vision[self._form.merge]) ** 2
            fits = [
                tokens for tokens in _SOFT_TOKENS if tokens <= min(given, MOST_PIXELS // pixels, BLOCK_ROWS)
            ]
            return {"max_soft_tokens": max(fits, default=_SOFT_TOKENS[0])}
        bound = MOST_PIXELS * self._form.frames
        most = min(own.size["longest_edge"] or bound, bound)
        return {"size": {"shortest_edge": min(own.size["shortest_edge"] or 1, most), "longest_edge": most}}

    @cached_property
    def _processor(self) -> Any:
        """transformers' processor with the model's settings.

        Raises:
            ModelRefused: they are missing, or contradict vision_config.
        """
        _pillow()
        import transformers

        kind, file = getattr(transformers, self._form.processor), self._directory / "preprocessor_config.json"
        with foreign_code(f"settings of a picture's processor in {file}"):
            made = kind.from_pretrained(self._directory)
        for key, name in self._form.patch.items():
            if getattr(made, name) != self._vision[key]:
                raise ModelRefused(
                    f"{name} {self._vision[key]} in {file}, as vision_config.{key} of config.json",
                    shortened(getattr(made, name)),
                    CHECK_ORIGIN,
                )
        return made


def _grid_of(pixels: dict[str, torch.Tensor]) -> tuple[int, int, int]:
    """Patches of a picture in time, height and width."""
    if "image_grid_thw" in pixels:
        time, height, width = pixels["image_grid_thw"][0].tolist()
        return time, height, width
    columns, rows = (pixels["image_position_ids"][0].amax(0) + 1).tolist()  # -1 where patches fill up
    return 1, rows, columns


def _pillow() -> Any:
    """The package that decodes pictures.

    Raises:
        UserError: it is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError("the package pillow, for pictures", "none", install_extra("vision")) from error
    return Image


def _decoded(data: bytes) -> Any:
    """The picture of a file, RGB, turned as its Exif data says.

    Raises:
        UserError: the file has no picture, a damaged one, or one of too many pixels.
    """
    pillow = _pillow()
    from PIL import ImageOps

    try:
        with pillow.open(BytesIO(data), formats=_FORMATS) as found:
            _require_sides(*found.size)
            return ImageOps.exif_transpose(found).convert("RGB")
    except (UserError, MemoryError):
        raise
    except Exception as error:  # Pillow's decoders raise what their formats' parsers do
        raise UserError(_WANTED, shortened(str(error)), "send another picture") from error


def _require_sides(width: int, height: int) -> None:
    """Checks the sides of a picture before its pixels are decoded.

    Raises:
        UserError: it has too many pixels, or is too long for its other side.
    """
    if width * height > MOST_SOURCE_PIXELS:
        wanted = f"a picture of at most {MOST_SOURCE_PIXELS} pixels"
        raise UserError(wanted, f"{width} x {height}", "send a smaller one")
    if max(width, height) > _MOST_RATIO * min(width, height):
        wanted = f"a picture with sides of at most {_MOST_RATIO} to 1"
        raise UserError(wanted, f"{width} x {height}", "cut it into several pictures")
