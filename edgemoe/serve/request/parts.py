"""The parts of a message's content: text and pictures."""

from __future__ import annotations

from typing import Any

from edgemoe.serve.errors import ApiError
from edgemoe.serve.request.fields import Fields, Name


class ImageURL(Fields):
    """A picture as a data: URL in base64. `detail` says nothing: a picture has as many tokens as its size gives it."""

    url: str
    detail: Name | None = None


class Part(Fields):
    """A part of a message's content."""

    type: Name
    text: str | None = None
    image_url: ImageURL | str | None = None

    def as_part(self) -> dict[str, Any]:
        """The part that the API takes.

        Raises:
            ApiError: it is neither text nor a picture.
        """
        if self.type == "text":
            return {"type": "text", "text": self.text or ""}
        given = self.image_url.url if isinstance(self.image_url, ImageURL) else self.image_url
        if self.type != "image_url" or given is None:
            message = f"expected parts of type text, or image_url with a URL, got {self.type!r}: leave it out"
            raise ApiError(400, message, param="messages", code="unsupported_content")
        return {"type": "image_url", "image_url": {"url": given}}
