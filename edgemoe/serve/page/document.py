"""The page: one static document, and the headers that allow its own style and script alone."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

Page = tuple[bytes, dict[str, str]]
"""The file, and its headers."""


@cache
def page() -> Page:
    """Reads the page. Its headers allow its own style and script by their hashes, and requests to this server alone."""
    raw = Path(__file__).with_name("page.html").read_bytes()
    style, script = (_hash(raw, tag) for tag in (b"style", b"script"))
    policy = (
        f"default-src 'none'; style-src '{style}'; script-src '{script}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return raw, headers


def _hash(raw: bytes, tag: bytes) -> str:
    (inside,) = re.findall(b"<%b>(.*?)</%b>" % (tag, tag), raw, re.DOTALL)
    return "sha256-" + base64.b64encode(hashlib.sha256(inside).digest()).decode()
