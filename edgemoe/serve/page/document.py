"""The page: one static document of several sources, and the headers that allow its own style and script alone."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

STYLES = ("colours", "layout", "chat", "monitor")
"""The sources of the style, in their order."""

SCRIPTS = (
    "basics",
    "markdown",
    "inline",
    "conversations",
    "pictures",
    "settings",
    "requests",
    "messages",
    "chat",
    "attach",
    "charts",
    "heat",
    "monitor",
    "about",
    "start",
)
"""The sources of the script, in their order: a source calls earlier ones as it is read, and any later."""

Page = tuple[bytes, dict[str, str]]
"""The document, and its headers."""


@cache
def page() -> Page:
    """Joins the page. Its headers allow its own style and script by their hashes, and requests to this server alone."""
    style = "".join(source(f"{name}.css") for name in STYLES)
    script = '"use strict";\n' + "".join(source(f"{name}.js") for name in SCRIPTS)
    document = source("page.html").replace("/* style */", style).replace("/* script */", script)
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return document.encode(), headers


def source(name: str) -> str:
    """Reads a source of the page, a file of this folder."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
