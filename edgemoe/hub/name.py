"""Names of models on the Hugging Face Hub."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_ID = re.compile(rf"({_PART}/{_PART})(?::({_PART}))?(?:@([A-Za-z0-9][A-Za-z0-9._/-]{{0,199}}))?", re.ASCII)
_SLUG = re.compile(r"(.+?)--([^@=]+)(?:=([^@]+))?@(.+)", re.ASCII)


@dataclass(frozen=True)
class HubModel:
    """A model on the Hub, as a user names it.

    Args:
        repo: organisation/name.
        revision: a branch, tag or commit.
        gguf: the quantization of a GGUF file in the repository, or the file's name; None: not named.
    """

    repo: str
    revision: str = "main"
    gguf: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubModel | None:
        """Parses `org/name[:quantization][@revision]`; None for any other text."""
        match = _ID.fullmatch(text)
        if not match or ".." in text or "--" in match[1]:
            return None
        return cls(match[1], match[3] or "main", match[2])

    @property
    def name(self) -> str:
        """The name for people: without the revision where that is `main`."""
        file = f":{self.gguf}" if self.gguf else ""
        return f"{self.repo}{file}" + ("" if self.revision == "main" else f"@{self.revision}")

    @property
    def slug(self) -> str:
        """The name as one file name, different for every model, quantization and revision."""
        file = f"={self.gguf}" if self.gguf else ""
        return f"{self.repo}{file}@{self.revision}".replace("/", "--")

    @classmethod
    def from_slug(cls, slug: str) -> HubModel | None:
        """The model of a slug; None for any other text.

        >>> HubModel.from_slug(HubModel("acme/tiny", "v1", "Q4_K_M").slug)
        HubModel(repo='acme/tiny', revision='v1', gguf='Q4_K_M')
        """
        match = _SLUG.fullmatch(slug)
        return cls(f"{match[1]}/{match[2]}", match[4].replace("--", "/"), match[3]) if match else None
