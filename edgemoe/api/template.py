"""Renders chat templates, which are untrusted programs of a model, in a process that can be killed."""

from __future__ import annotations

import json
import select
import signal
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

from edgemoe.api.message_forms import forms_of
from edgemoe.errors import TemplateFailed, UserError
from edgemoe.storage.files.atomic import write_all
from edgemoe.storage.files.untrusted import foreign_code

CPU_SECONDS = 2.0
"""CPU time for one rendering; the operating system counts whole seconds, and kills."""

WALL_SECONDS = 30.0
"""Time until a rendering is given up, on a busy machine too."""

_SLICE_SECONDS = 0.25
"""Time of one wait for output."""

SLACK_CHARACTERS = 1 << 20
"""Characters that a template may write beyond four times the length of its variables."""

_WANTED = "text from the chat template"

Message = Mapping[str, Any]
"""{"role": system, user, assistant or tool, "content": text, or null with calls}; an assistant's may have `tool_calls`,
each {"id", "type": "function", "function": {"name", "arguments": object}}, and `reasoning_content`; a tool's has
`tool_call_id`."""


class TemplateRenderer:
    """A process that renders templates. Starts on first use, and again after it was killed.

    Thread-safe; renders one template at a time.

    Args:
        cpu_seconds: limit on the CPU time of a rendering.
        wall_seconds: limit on the wait for a rendering.
    """

    def __init__(self, cpu_seconds: float = CPU_SECONDS, wall_seconds: float = WALL_SECONDS) -> None:
        self._cpu_seconds, self._wall_seconds = cpu_seconds, wall_seconds
        self._lock = threading.Lock()
        self._process: Popen[bytes] | None = None
        self._ended: weakref.finalize[Any, Any] | None = None

    def start(self) -> Popen[bytes]:
        """Starts the process if it is not running; does not wait for it."""
        if self._process is not None:
            return self._process
        script = Path(__file__).with_name("template_process.py")
        # -P keeps the script's directory, whose modules could hide the standard library's, off the import path.
        # With a process group of its own the process gets no Ctrl-C; the parent handles it.
        command = [sys.executable, "-P", str(script)]
        self._process = Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, process_group=0, bufsize=0)
        self._ended = weakref.finalize(self, _end, self._process)
        return self._process

    def close(self) -> None:
        """Ends the process. Idempotent; the next rendering starts a new process."""
        if self._ended is not None:
            self._ended()
        self._process = self._ended = None

    def render(
        self, template: str, variables: Mapping[str, Any], forms: Sequence[Sequence[Message]] = ((),)
    ) -> str:
        """Renders a template.

        Args:
            template: jinja2 source.
            variables: the template's, but for `messages`; JSON.
            forms: forms of the messages, of which the first is taken that the template takes (forms_of).

        Raises:
            UserError: the template refuses its messages.
            TemplateFailed: the template is broken, or exceeds a limit of time, memory or size.
        """
        length = len(json.dumps([variables, forms[0]], default=str))
        most = SLACK_CHARACTERS + 4 * length
        request = {
            "template": template,
            "variables": variables,
            "forms": forms,
            "most": most,
            "seconds": self._cpu_seconds,
        }
        with self._lock:
            try:
                answer = self._exchange(self.start(), request, 12 * most)
            except BaseException:
                self.close()  # a late answer would be taken for the next rendering's
                raise
        if "text" in answer:
            return answer["text"]
        found = _printable(answer["error"])
        if answer["kind"] == "refused":
            raise UserError(_WANTED, f"a refusal by the template: {found}", "change the refused message")
        raise _refused(found)

    def _exchange(self, process: Popen[bytes], request: Mapping[str, Any], limit: int) -> dict[str, str]:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            write_all(process.stdin.fileno(), json.dumps(request, default=str).encode() + b"\n")
        except BrokenPipeError:
            raise self._ended_early(process) from None
        # Counted in slices, so that time in which this program was stopped does not count.
        patience, answer = self._wall_seconds, bytearray()
        while not answer.endswith(b"\n"):
            if not select.select([process.stdout], [], [], _SLICE_SECONDS)[0]:
                patience -= _SLICE_SECONDS
                if patience <= 0:
                    raise _refused(f"more than {self._wall_seconds:g} s")
                continue
            piece = process.stdout.read(1 << 16)
            if not piece:
                raise self._ended_early(process)
            answer += piece
            if len(answer) > limit:
                raise _refused(f"more than {limit} bytes")
        parsed: dict[str, str] = json.loads(answer)
        return parsed

    def _ended_early(self, process: Popen[bytes]) -> TemplateFailed:
        code = process.wait()
        if code == -signal.SIGXCPU:
            return _refused(f"more than {self._cpu_seconds:g} s of computing")
        return _refused(f"a process that ended with code {code}")


def _refused(finding: str) -> TemplateFailed:
    return TemplateFailed(_WANTED, finding, "use a checkpoint whose chat template works")


def _end(process: Popen[bytes]) -> None:
    with process:  # closes its pipes and waits for its end
        process.kill()


def _printable(text: str) -> str:
    """The first 300 characters, with spaces in place of characters that a terminal would interpret."""
    return "".join(c if c.isprintable() else " " for c in text[:300]).rstrip(".")


@cache
def renderer() -> TemplateRenderer:
    """The renderer of this program."""
    return TemplateRenderer()


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    more: Mapping[str, object] | None = None,
    *,
    to_answer: bool = True,
) -> str:
    """Renders a conversation by its model's chat template.

    Equals transformers' `apply_chat_template(messages, add_generation_prompt=to_answer, tokenize=False, **more)`;
    without a chat template, the texts joined by newlines. Where the template cannot read the messages as they are, they
    take another form (forms_of).

    Args:
        tokenizer: the tokenizer of the model.
        messages: the conversation.
        more: further variables of the template, JSON, such as `tools`; none replaces the messages.
        to_answer: up to the begin of the next answer.

    Raises:
        UserError, ModelRefused: from TemplateRenderer.render.
    """
    if not tokenizer.chat_template:
        return "\n".join(_text_of(message["content"]) for message in messages)
    tools = (more or {}).get("tools")
    with foreign_code("a chat template and special tokens that transformers finds"):
        template, special = tokenizer.get_chat_template(tools=tools), tokenizer.special_tokens_map
    variables = {
        **special,
        "tools": None,
        **(more or {}),
        "documents": None,
        "add_generation_prompt": to_answer,
    }
    return renderer().render(template, variables, forms_of(messages, template))


def _text_of(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """The text of a message, whose content may be a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.get("text") or "" for part in content)


def check_template(tokenizer: Any) -> None:
    """Renders a conversation of two questions.

    Raises:
        UserError, ModelRefused: from TemplateRenderer.render.
    """
    roles = ("user", "assistant", "user")
    render_chat(tokenizer, [{"role": role, "content": "x"} for role in roles])


def encode_chat(
    tokenizer: Any, messages: Sequence[Message], more: Mapping[str, object] | None = None
) -> list[int]:
    """Encodes a conversation as token ids; without a chat template, with the tokenizer's special tokens around it.

    The length is not compared with the tokenizer's own limit, as the engine knows the context.

    Args:
        tokenizer: the model's tokenizer.
        messages: the conversation.
        more: further variables of the chat template, such as `tools`.

    Raises:
        UserError, ModelRefused: from TemplateRenderer.render; the tokenizer cannot encode the text.
    """
    return encode_text(tokenizer, render_chat(tokenizer, messages, more))


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Encodes a text that render_chat has written, or a part of it that begins at a special token.

    Raises:
        ModelRefused: the tokenizer cannot encode it.
    """
    templated = bool(tokenizer.chat_template)
    with foreign_code("a tokenizer and a tokenizer_config.json that encode text"):
        return list(tokenizer(text, add_special_tokens=not templated, verbose=False)["input_ids"])
