"""Answers of the Hub that are read up to a size and for a time, whatever a server sends."""

from __future__ import annotations

import json
import time
from typing import Any
from urllib.parse import quote

from huggingface_hub import constants
from huggingface_hub.hf_api import ModelInfo
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status, validate_repo_id

from edgemoe.errors import UserError

TIMEOUT = 5.0
"""Seconds until the first byte of an answer, and between two pieces of it."""

LISTING_BYTES = 32 << 20
"""Bytes of a list of a model's files: 100,000 of them."""

LISTING_SECONDS = 60.0
"""Seconds in which it must have come."""

ERROR_BYTES = 1 << 20
"""Bytes of the body of an error."""

_OF_THE_BODY = ("content-encoding", "content-length", "transfer-encoding")
"""Headers that say how a body was sent."""


def model_info(repo: str, revision: str | None) -> ModelInfo:
    """Returns the commit and the files of a model, with their sizes and hashes.

    Args:
        repo: the model's name.
        revision: a branch, a tag or a commit; None: the default branch.

    Raises:
        UserError: the list is too large, or too slow.
        Exception: what huggingface_hub and the HTTP library raise about a name, a connection or an answer.
    """
    validate_repo_id(repo)
    path = f"{constants.ENDPOINT}/api/models/{repo}"
    if revision:
        path += f"/revision/{quote(revision, safe='')}"
    with get_session().stream(
        "GET", path, params={"blobs": True}, headers=build_hf_headers(), timeout=TIMEOUT
    ) as response:
        require_success(response, repo)
        raw = received(response, f"the list of the files of {repo}", LISTING_BYTES, LISTING_SECONDS)
    made: Any = ModelInfo  # its constructor has no types
    found: ModelInfo = made(**json.loads(raw))
    return found


def require_success(response: Any, repo: str) -> None:
    """Raises huggingface_hub's error for a response that is one, whose body is read up to ERROR_BYTES."""
    if response.is_error:
        raw = received(response, f"an error of the Hub about {repo}", ERROR_BYTES, LISTING_SECONDS)
        kept = {name: value for name, value in response.headers.items() if name not in _OF_THE_BODY}
        whole = type(response)(response.status_code, headers=kept, content=raw, request=response.request)
        hf_raise_for_status(whole)


def received(response: Any, name: str, limit: int, seconds: float | None = None) -> bytes:
    """Reads the body of a response.

    Args:
        response: streamed by huggingface_hub's session.
        name: a name of what is read, for errors.
        limit: largest number of bytes.
        seconds: time in which all of it must have come; None: no limit.

    Raises:
        UserError: there is more, or it takes longer.
    """
    parts, end = bytearray(), time.monotonic() + (seconds or 0)
    for piece in response.iter_bytes():
        parts += piece
        if len(parts) > limit:
            raise UserError(f"{name} of at most {limit} bytes", "more", "check HF_ENDPOINT")
        if seconds is not None and time.monotonic() > end:
            raise UserError(
                f"{name} within {seconds:g} s", "a part of it", "check HF_ENDPOINT, and try again"
            )
    return bytes(parts)
