"""Puts pictures into the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from edgemoe.errors import ModelRefused, UserError
from edgemoe.kv.pictures import Features, PictureTokens, PlacedPicture, PromptPictures, picture_ids
from edgemoe.machine.device import Device
from edgemoe.storage.files.untrusted import CHECK_ORIGIN, shortened
from edgemoe.storage.store.dense import VISION_NAME
from edgemoe.storage.store.manifest import Manifest
from edgemoe.vision.forms import VisionForm, attends_both_ways, read_vision_config
from edgemoe.vision.reader import Picture, PictureReader
from edgemoe.vision.tower import Tower


class Pictures:
    """The pictures of one open model's prompts. Thread-safe, except that one thread runs steps.

    Args:
        directory: the directory of the store.
        manifest: its store.json, with a vision tower.
        form: how pictures enter the model.
        device: the device that computes; None: the CPU.
        least: the smallest sufficient limit, for messages, bytes.

    Raises:
        ModelRefused: a value of config.json is out of bounds.

    Attributes:
        both_ways: whether a picture's tokens attend to each other in both directions, in layers with a window.
    """

    def __init__(
        self, directory: Path, manifest: Manifest, form: VisionForm, device: Device | None, least: int
    ) -> None:
        whole, vision = read_vision_config(directory, form)
        keys = "image_token_id", *form.around
        tokens = [token for key in keys if isinstance(token := whole.get(key), int)]
        if len(tokens) < len(keys):
            wanted = f"whole numbers as {', '.join(keys)} in {directory / 'config.json'}"
            raise ModelRefused(wanted, shortened([whole.get(key) for key in keys]), CHECK_ORIGIN)
        text = whole.get("text_config") or {}
        if text.get("hidden_size_per_layer_input"):
            wanted = (
                f"no text_config.hidden_size_per_layer_input in {directory / 'config.json'}, for pictures"
            )
            raise ModelRefused(wanted, "one", "give --no-vision")
        self._token, self._before, self._after = tokens[0], tokens[1:2], tokens[2:]
        self._axes = form.axes
        self.both_ways = attends_both_ways(text)
        self._reader = PictureReader(directory, form, vision)
        self._tower = Tower(directory, manifest.files[VISION_NAME], form, whole, device, least)

    def read(self, data: bytes) -> Picture:
        """Reads a picture; raises as PictureReader.read."""
        return self._reader.read(data)

    def placed(self, tokens: Sequence[int], pictures: Sequence[Picture]) -> PictureTokens:
        """Replaces each token that stands for a picture by the picture's own tokens, between tokens of `around`.

        Args:
            tokens: ids of a prompt, with one token for each picture.
            pictures: the pictures in their order.

        Raises:
            UserError: another number of such tokens, which a text of the prompt may have written.
        """
        if (found := list(tokens).count(self._token)) != len(pictures):
            raise UserError(
                f"a prompt with one place for each of {len(pictures)} pictures",
                f"{found} places",
                "leave the picture token out of texts, or use a checkpoint whose chat template has pictures",
            )
        ids, plain, placed = list[int](), list[int](), list[PlacedPicture]()
        left: list[Any] = list(reversed(pictures))
        for token in tokens:
            if token != self._token:
                ids.append(token)
                plain.append(token)
                continue
            picture: Picture = left.pop()
            ids += self._before
            plain += self._before
            compute, nbytes = partial(self._features, picture), len(picture.data)
            placed.append(PlacedPicture(len(ids), picture.tokens, compute, nbytes))
            ids += [*picture_ids(picture.digest, picture.tokens), *self._after]
            plain += [*[token] * picture.tokens, *self._after]
        grids = [each.grid for each in pictures]
        positions = self._tower.positions(plain, self._token, grids) if self._axes else None
        return PictureTokens(ids, PromptPictures(tuple(placed), positions, self.both_ways))

    def _features(self, picture: Picture) -> Features:
        return self._tower.features(self._reader.pixels(picture.data))
