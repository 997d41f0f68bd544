"""Chat templates come with a model and are programs: they are rendered in a process that can be killed."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from storage.atomic import write_all
from storage.errors import ModelRefused, UserError

CPU_SECONDS = 2.0
"""Of computing for one rendering; the kernel counts, in whole seconds, and kills."""

WALL_SECONDS = 30.0
"""Until a rendering is given up, however busy the machine is."""

_SLICE_SECONDS = 0.25

SLACK_CHARACTERS = 1 << 20
"""What a template may write beyond four times what it was given."""

Message = Mapping[str, str]


class TemplateRenderer:
    """A process that renders templates, started when first needed and again after one had to be killed.

    Thread-safe; renders one at a time.

    Args:
        cpu_seconds: limit on a rendering's computing.
        wall_seconds: limit on waiting for it.
    """

    def __init__(self, cpu_seconds: float = CPU_SECONDS, wall_seconds: float = WALL_SECONDS) -> None:
        self._cpu_seconds, self._wall_seconds = cpu_seconds, wall_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: weakref.finalize[Any, Any] | None = None

    def start(self) -> None:
        """Starts the process if it is not running, without waiting for it."""
        if self._process is not None:
            return
        script = Path(__file__).with_name("template_process.py")
        # -P: beside the script lie modules of edgemoe, whose names must not hide the standard library's.
        # A process group of its own: Ctrl-C is for whoever waits for the rendering.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,
            bufsize=0,
        )
        self._ended = weakref.finalize(self, _end, self._process)

    def close(self) -> None:
        """Ends the process. Idempotent; the next rendering starts another."""
        if self._ended is not None:
            self._ended()
        self._process = self._ended = None

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The text of a template.

        Raises:
            UserError: the template itself refused its messages.
            ModelRefused: it is broken, or went over a limit of time, memory or size.
        """
        most = SLACK_CHARACTERS + 4 * len(json.dumps(variables, default=str))
        request = {
            "template": template,
            "variables": variables,
            "most": most,
            "seconds": self._cpu_seconds,
        }
        with self._lock:
            try:
                self.start()
                answer = self._exchange(json.dumps(request, default=str).encode() + b"\n", 12 * most)
            except BaseException:
                self.close()  # what it may still answer would be taken for the next one's
                raise
        if "text" in answer:
            return answer["text"]
        wanted, found = "the chat template's text was wanted", _printable(answer["error"])
        if answer["kind"] == "refused":
            raise UserError(wanted, f"the template refuses: {found}", "Change what it refuses")
        raise ModelRefused(wanted, found, "Use a checkpoint whose chat template works")

    def _exchange(self, request: bytes, most: int) -> dict[str, str]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            write_all(process.stdin.fileno(), request)
        except BrokenPipeError:
            raise self._ended_early(process) from None
        # Counted in slices: a program that was itself stopped for a while has not waited all that time.
        patience, answer = self._wall_seconds, bytearray()
        while not answer.endswith(b"\n"):
            if not select.select([process.stdout], [], [], _SLICE_SECONDS)[0]:
                patience -= _SLICE_SECONDS
                if patience <= 0:
                    raise _over(f"it took more than {self._wall_seconds:g} s")
                continue
            piece = process.stdout.read(1 << 16)
            if not piece:
                raise self._ended_early(process)
            answer += piece
            if len(answer) > most:
                raise _over(f"it writes more than {most} bytes")
        parsed: dict[str, str] = json.loads(answer)
        return parsed

    def _ended_early(self, process: subprocess.Popen[bytes]) -> ModelRefused:
        code = process.wait()
        if code == -signal.SIGXCPU:
            return _over(f"it took more than {self._cpu_seconds:g} s of computing")
        return _over(f"rendering it ended its process with code {code}")


def _over(found: str) -> ModelRefused:
    return ModelRefused(
        "the chat template's text was wanted", found, "Use a checkpoint whose chat template works"
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _printable(text: str) -> str:
    """At most 300 characters, without what a terminal would obey."""
    return "".join(c if c.isprintable() else " " for c in text[:300]).rstrip(".")


@cache
def renderer() -> TemplateRenderer:
    """The program's own."""
    return TemplateRenderer()


def render_chat(tokenizer: Any, messages: Sequence[Message]) -> str:
    """A conversation as its model was trained to see it, up to where the assistant speaks.

    What transformers' `apply_chat_template(messages, add_generation_prompt=True, tokenize=False)` gives; without a
    chat template, the bare texts one after another.

    Raises:
        as TemplateRenderer.render.
    """
    if not tokenizer.chat_template:
        return "\n".join(message["content"] for message in messages)
    variables = {
        **tokenizer.special_tokens_map,
        "messages": [dict(message) for message in messages],
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
    }
    return renderer().render(tokenizer.get_chat_template(), variables)


def encode_chat(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation; without a chat template, with those a tokenizer puts around any text.

    Raises:
        as TemplateRenderer.render.
    """
    templated = bool(tokenizer.chat_template)
    return list(tokenizer(render_chat(tokenizer, messages), add_special_tokens=not templated)["input_ids"])
