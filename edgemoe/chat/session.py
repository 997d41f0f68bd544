"""A running chat: its conversation, and how answers are printed and counted."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from edgemoe.chat.answer_lines import LABEL, answer_line, stats_lines
from edgemoe.chat.conversation import Conversation
from edgemoe.console.answer_text import DEFAULT_LOOK, AnswerText, Look, open_text
from edgemoe.console.input import in_colour
from edgemoe.console.prefill import prefilling
from edgemoe.console.streams import require_text
from edgemoe.console.width import say
from edgemoe.engine.engine import Engine
from edgemoe.engine.generate import Answer
from edgemoe.errors import UserError


@dataclass
class Totals:
    """Sums over a chat's answers, whose number has no bound."""

    answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0

    def add(self, answer: Answer) -> None:
        """Counts an answer."""
        self.answers += 1
        self.prompt_tokens += answer.prompt_tokens
        self.cached_tokens += answer.cached_tokens
        self.new_tokens += answer.new_tokens


@dataclass(frozen=True)
class Printing:
    """How a chat prints answers.

    Args:
        as_json: whether answers are JSON lines.
        stream: whether each piece of text is a JSON line too.
        stats: whether every figure that /stats prints follows an answer, instead of one short line.
        look: how answers look at a terminal.
    """

    as_json: bool = False
    stream: bool = False
    stats: bool = False
    look: Look = DEFAULT_LOOK


class Chat:
    """The state of a chat that slash commands act on.

    Args:
        engine: computes the answers.
        conversation: answers the turns.
        printing: how answers are printed.
        on_answer: called after every answer.
    """

    def __init__(
        self,
        engine: Engine,
        conversation: Conversation,
        printing: Printing,
        *,
        on_answer: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine, self.conversation, self._answered = engine, conversation, on_answer
        self._printing = printing
        self.totals = Totals()
        self.last: Answer | None = None
        """The last answer."""
        self.cancelled: str | None = None
        """The last question, if its answer was cancelled."""

    def ask(self, prompt: str) -> None:
        """Answers a turn on stdout. Ctrl-C drops the turn and keeps it for `regenerate`.

        Raises:
            UserError: the prompt is no text; and from Conversation.ask.
        """
        require_text(prompt, "a turn")
        self.cancelled, attached = None, self.conversation.attached
        try:
            self._show(self._answered_by(partial(self.conversation.ask, prompt, on_shift=self._shifted)))
        except UserError:
            if attached > self.conversation.attached:
                self.say("the turn is refused, and its pictures are dropped: /image attaches them again")
            raise
        except KeyboardInterrupt:
            self.cancelled = prompt
            raise

    def regenerate(self) -> None:
        """Answers the cancelled question, or answers the last question again and replaces its answer."""
        if self.cancelled is not None:
            self.ask(self.cancelled)
            return
        if self.conversation.sampling.temperature == 0 and self.conversation.messages:
            self.say("at temperature 0 the answer stays the same; /set temperature 0.7 changes that")
        self._show(self._answered_by(partial(self.conversation.regenerate, on_shift=self._shifted)))

    def say(self, text: str, style: str = "", indent: int = 2) -> None:
        """Prints lines for people on stderr (console.width.say)."""
        say(text, style, indent)

    def _answered_by(self, answer: Callable[[Callable[[str], None]], Answer]) -> Answer:
        """Streams an answer, below a line that shows how far its prompt is."""
        text: AnswerText | None = None
        with prefilling(self.conversation.prompt_read) as end:

            def stream(piece: str) -> None:
                nonlocal text
                end()
                if self._printing.stream:
                    print(json.dumps({"delta": piece}), flush=True)
                elif not self._printing.as_json:
                    text = text or open_text(self._printing.look, reasons=self.conversation.reasons)
                    text.write(piece)

            try:
                return answer(stream)
            finally:
                end()
                if text:
                    text.close()
                elif not self._printing.as_json and sys.exc_info()[0] is None:
                    print(flush=True)

    def _shifted(self, messages: int) -> None:
        self.say(
            f"(the context is full: the oldest {messages} message{'' if messages == 1 else 's'} left it; "
            "/save writes all of them)"
        )

    def _show(self, answer: Answer) -> None:
        self.last = answer
        self.totals.add(answer)
        self._answered()
        if self._printing.as_json:
            print(json.dumps(answer.as_json()), flush=True)
            return
        cost = (
            "\n".join(stats_lines(answer))
            if self._printing.stats
            else answer_line(answer, device=bool(self.engine.device), least_bits=self.engine.settings.bits)
        )
        indent = LABEL if self._printing.stats else 2
        self.say(cost, "\x1b[2m" if in_colour(sys.stderr) else "", indent)
