"""Names of models on the Hugging Face Hub."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_ID = re.compile(rf"({_PART}/{_PART})(?:@([A-Za-z0-9][A-Za-z0-9._/-]{{0,199}}))?", re.ASCII)


@dataclass(frozen=True)
class HubModel:
    """A model on the Hub, as a user names it.

    Args:
        repo: organisation/name.
        revision: a branch, tag or commit.
    """

    repo: str
    revision: str = "main"

    @classmethod
    def parse(cls, text: str) -> HubModel | None:
        """Parses `org/name` or `org/name@revision`; None for any other text."""
        match = _ID.fullmatch(text)
        if not match or ".." in text or "--" in match[1]:
            return None
        return cls(match[1], match[2] or "main")

    @property
    def name(self) -> str:
        """The name for people: without the revision where that is `main`."""
        return self.repo if self.revision == "main" else f"{self.repo}@{self.revision}"

    @property
    def slug(self) -> str:
        """The name as one file name, different for every model and revision."""
        return f"{self.repo}@{self.revision}".replace("/", "--")
