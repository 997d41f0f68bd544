"""A model's introduction when a chat begins, from the `introduction` in its generation_config.json."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgemoe.console.printable import printable
from edgemoe.errors import ModelRefused
from edgemoe.storage.files.untrusted import CHECK_ORIGIN, read_json, shortened

_FILE, _KEY = "generation_config.json", "introduction"

_MOST_CHARACTERS, _MOST_EXAMPLES = 200, 5


@dataclass(frozen=True)
class Introduction:
    """A model's name, what it is, and questions to begin with.

    Args:
        name: the name of the model.
        note: one sentence about it; "" for none.
        examples: questions that it has answers to.

    >>> print(*Introduction("tiny", "It only counts.", ("What comes after 3?",)).lines(), sep="\\n")
    tiny: It only counts. For example:
      What comes after 3?
    /help lists the commands of the chat, exit ends it
    """

    name: str
    note: str = ""
    examples: tuple[str, ...] = ()

    def lines(self) -> Iterator[str]:
        """Yields the first screen of a chat, without characters that a terminal would interpret."""
        note = f": {self.note}" if self.note else ""
        yield printable(f"{self.name}{note}{' For example:' if self.examples else ''}")
        yield from (printable(f"  {example}") for example in self.examples)
        yield "/help lists the commands of the chat, exit ends it"


def introduction(directory: Path, name: str) -> Introduction:
    """Reads the introduction of a model.

    Args:
        directory: its store or checkpoint.
        name: the name where a model does not introduce itself.

    Raises:
        ModelRefused: an introduction that is not made of short texts.
    """
    written = read_json(directory, _FILE).get(_KEY) if (directory / _FILE).exists() else None
    if written is None:
        return Introduction(name)
    fields = written if isinstance(written, dict) else {}
    examples = fields.get("examples", [])
    texts = [fields.get("name"), fields.get("note"), *(examples if isinstance(examples, list) else [None])]
    short = all(isinstance(text, str) and len(text) <= _MOST_CHARACTERS for text in texts)
    if not short or len(examples) > _MOST_EXAMPLES:
        raise ModelRefused(
            f"a name, a note and at most {_MOST_EXAMPLES} examples, each a text of at most {_MOST_CHARACTERS} "
            f"characters, for {_KEY} in {directory / _FILE}",
            shortened(written),
            CHECK_ORIGIN,
        )
    return Introduction(fields["name"], fields["note"], tuple(examples))
