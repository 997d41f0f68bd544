"""The options of `edgemoe chat` alone, and all options of a chat together."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgemoe.commands.options.sampling import SamplingOptions
from edgemoe.console.answer_text import REASONING
from edgemoe.models.options.declared import one_of, option
from edgemoe.models.options.groups import Opening, PrefixCacheOptions


@dataclass(frozen=True)
class TurnOptions:
    """Options of what is answered, and of how answers are printed."""

    prompt: str | None = option("Answer this prompt and exit. Default: turns from stdin.", short="-p")
    system: str | None = option("A message that every answer follows.")
    file: Path | None = option(
        "A UTF-8 text that follows the prompt; text that is piped into stdin follows it too."
    )
    resume: bool = option(
        "Continue the last conversation. A chat at a terminal, and one with this option, is kept for it.",
        False,
        name="--continue",
    )
    stats: bool = option(
        "Print every figure after an answer, as /stats does, instead of one short line.", False
    )
    markdown: bool = option("Render answers as Markdown, at a terminal.", False)
    reasoning: str = option(
        "How a terminal shows what the model thinks before its answer: dim, fold (the number of words only) "
        "or show (as it is).",
        "dim",
        autocompletion=one_of(*REASONING),
    )
    no_wrap: bool = option("Let the terminal break long lines, not edgemoe between words.", False)
    as_json: bool = option("One JSON object per line on stdout.", False, name="--json")
    stream: bool = option(
        'With --json: a line {"delta": TEXT} for each piece of text, before the line of the answer.', False
    )


@dataclass(frozen=True)
class ChatRequest:
    """All options of a chat.

    Args:
        opening, disk, sampling, turns: the groups.
        settings: arguments of run_settings.
        whole: the only prompt with its attachments; None: turns come from stdin.
    """

    opening: Opening
    disk: PrefixCacheOptions
    settings: Mapping[str, Any]
    sampling: SamplingOptions
    turns: TurnOptions
    whole: str | None

    @property
    def kept(self) -> bool:
        """Whether the conversation is kept for --continue."""
        return self.turns.resume or (self.turns.prompt is None and sys.stdin.isatty())
