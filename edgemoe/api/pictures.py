"""Pictures in messages: their parts, their bytes, and their tokens in a prompt."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgemoe.api.template import Message
from edgemoe.console.text_files import read_bytes
from edgemoe.errors import ContextExceeded, UserError
from edgemoe.models.store_model import StoreModel
from edgemoe.storage.convert.config import WRAPPED_IN
from edgemoe.storage.files.untrusted import shortened
from edgemoe.storage.store.dense import VISION_NAME
from edgemoe.vision.forms import form_of, lacks_kernel
from edgemoe.vision.prompt import Pictures
from edgemoe.vision.reader import MOST_BYTES, Picture

MOST_PICTURES = 64
"""Most pictures of one prompt."""

_TYPES = ("image", "image_url", "input_image")
"""Types of parts that are pictures."""

_DATA_URL = re.compile(r"data:[\w.+/-]*;base64,", re.ASCII)
_WANTED = "a picture as bytes, as a path, or as a data: URL in base64"


def picture_part(data: bytes) -> dict[str, Any]:
    """Returns the part of a message that is a picture, as JSON has it.

    >>> picture_part(b"abc")
    {'type': 'image_url', 'image_url': {'url': 'data:;base64,YWJj'}}

    Args:
        data: the bytes of its file.
    """
    return {"type": "image_url", "image_url": {"url": f"data:;base64,{base64.b64encode(data).decode()}"}}


def bytes_of(part: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a picture's file.

    >>> bytes_of({"type": "image", "image": b"abc"}), bytes_of(picture_part(b"abc"))
    (b'abc', b'abc')

    Args:
        part: {"type": "image", "image": bytes, path or URL}, or {"type": "image_url", "image_url": {"url": URL}}.

    Raises:
        UserError: it is another object, a URL that is not data:, text that is no base64, or a file that cannot be read.
    """
    given = part.get("image", part.get("image_url"))
    given = given.get("url") if isinstance(given, Mapping) else given
    if isinstance(given, bytes):
        return given
    if isinstance(given, Path):
        return read_bytes(given, MOST_BYTES)
    if not isinstance(given, str):
        raise UserError(_WANTED, shortened(given), "send its bytes")
    head = _DATA_URL.match(given)
    if head is None and ":" not in given:
        raise UserError(
            _WANTED,
            f"the text {shortened(given[:40])}",
            "send its bytes, or in Python its path as a pathlib.Path",
        )
    if head is None:
        raise UserError(_WANTED, shortened(given[:40]), "send its bytes: addresses are not opened")
    return decoded(given[head.end() :])


def decoded(text: str) -> bytes:
    """Returns the bytes of a picture that comes as base64.

    Raises:
        UserError: the text is no base64, or too long.
    """
    if len(text) > MOST_BYTES * 4 // 3 + 4:
        raise UserError(
            f"a picture of at most {MOST_BYTES} bytes", f"{len(text)} characters", "send a smaller one"
        )
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UserError("a picture in base64", shortened(str(error)), "encode its bytes in base64") from error


def has_pictures(messages: Sequence[Message]) -> bool:
    """Whether a message has a part that is a picture."""
    return any(_is_picture(part) for message in messages for part in _parts(message))


def _parts(message: Message) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, list | tuple) else ()


def _is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _TYPES


def without_pictures(message: Message, part: Mapping[str, Any]) -> Message:
    """Returns a message that has `part` in place of each picture."""
    if not any(map(_is_picture, _parts(message))):
        return message
    parts = [dict(part) if _is_picture(each) else each for each in _parts(message)]
    return {**message, "content": parts}


class ModelPictures:
    """The pictures of one model's messages. Thread-safe.

    Args:
        store: the model's store.
        least: the smallest sufficient limit, for messages, bytes.
    """

    def __init__(self, store: StoreModel, least: int) -> None:
        self._store, self._form = store, form_of(store.config)
        self._pictures: Pictures | None = None
        if self._form and store.shape.vision:
            self._pictures = Pictures(store.directory, store.manifest, self._form, store.device, least)

    @property
    def taken(self) -> bool:
        """Whether messages may have pictures."""
        return self._pictures is not None

    def split(
        self, messages: Sequence[Message], context: int | None = None
    ) -> tuple[Sequence[Message], list[Picture]]:
        """Returns messages that say where pictures are, as chat templates read them, and the pictures in their order.

        Args:
            messages: the messages of a prompt.
            context: tokens that a prompt must be below, its pictures alone; None: any number.

        Raises:
            ContextExceeded: the first of the pictures have more tokens; the others were not decoded.
            UserError: there are pictures, and the model takes none; a picture is broken or too large; too many.
            ModelRefused: the processor's settings are broken.
        """
        if not has_pictures(messages):
            return messages, []
        found = self._require()
        parts = [part for message in messages for part in _parts(message) if _is_picture(part)]
        if len(parts) > MOST_PICTURES:
            raise UserError(
                f"at most {MOST_PICTURES} pictures in a prompt", f"{len(parts)}", "leave earlier ones out"
            )
        plain = [without_pictures(message, {"type": "image"}) for message in messages]
        read = list[Picture]()
        for part in parts:
            read.append(found.read(bytes_of(part)))
            if context is not None and (tokens := sum(one.tokens for one in read)) >= context:
                wanted = f"pictures of fewer than {context} tokens in a prompt, as the context holds no more"
                raise ContextExceeded(wanted, f"{tokens} or more", "leave pictures out, or raise --context")
        return plain, read

    def placed(self, tokens: list[int], pictures: Sequence[Picture]) -> list[int]:
        """Returns a prompt's tokens with the pictures' own in place of the tokens that stand for them.

        Raises:
            UserError: there are more or fewer such tokens than pictures.
        """
        return self._require().placed(tokens, pictures) if pictures else tokens

    def _require(self) -> Pictures:
        """The pictures of a model that takes some.

        Raises:
            UserError: it takes none, with the reason.
        """
        if self._pictures:
            return self._pictures
        config, files = self._store.config, self._store.manifest.files
        wanted, name = "a model that takes pictures", config.get(WRAPPED_IN) or config["model_type"]
        if self._form is None:
            raise UserError(wanted, f"model_type {name}: this model takes text alone", "send text")
        if VISION_NAME not in files:
            action = (
                "add it with `edgemoe convert CHECKPOINT STORE`, which leaves all else in the store as it is"
            )
            raise UserError(wanted, f"a store of {name} without its vision tower", action)
        if lacks_kernel(config, self._store.device):
            wanted = f"the compiled kernel on a CPU, for pictures of {name}"
            raise UserError(wanted, "a GPU" if self._store.device else "none", "run the model on the CPU")
        raise UserError(wanted, "--no-vision", "leave the option out")
