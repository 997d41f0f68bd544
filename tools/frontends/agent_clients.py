"""Coding agents' requests, in the shapes of four clients, sent by the clients' own libraries.

Messages    Claude Code: /v1/messages, tools, blocks with cache_control
Responses   Codex: /v1/responses, tools, items of an input
Chat        opencode: /v1/chat/completions, tools
Files       aider: /v1/chat/completions, no tools; files with their contents before the last message
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

FIELDS = {"path": {"type": "string"}, "first_line": {"type": "integer"}, "last_line": {"type": "integer"}}


@dataclass(frozen=True)
class Tool:
    """A function that an agent offers to a model. Its arguments are FIELDS."""

    name: str
    description: str

    @property
    def schema(self) -> dict[str, Any]:
        """The arguments as a JSON schema."""
        return {"type": "object", "properties": FIELDS, "required": ["path"]}


@dataclass(frozen=True)
class Answered:
    """The counts and times of one request.

    Args:
        prompt: tokens of the prompt.
        cached: tokens of it that were not computed again.
        first_ms: milliseconds until the answer's first part.
        calls: ids of the calls in the answer.
    """

    prompt: int
    cached: int
    first_ms: float
    calls: tuple[str, ...] = ()


class Agent(ABC):
    """An agent with one conversation.

    Args:
        url: the server's address.
        system: makes the system prompt from a date.
        tools: the tools.

    Attributes:
        history: the conversation so far, as the client sends it.
    """

    name: str

    def __init__(self, url: str, system: Callable[[str], str], tools: Iterable[Tool]) -> None:
        self.url, self.system, self.tools = url, system, list(tools)
        self.date = "2026-11-27"
        self.history: list[Any] = []

    @abstractmethod
    def say(self, text: str) -> None:
        """Appends a message of the user."""

    @abstractmethod
    def give(self, call: str, text: str) -> None:
        """Appends a call's result."""

    @abstractmethod
    def ask(self) -> Answered:
        """Sends the conversation, and appends the answer."""


class Clock:
    """Measures the time to the first part of a stream."""

    def __init__(self) -> None:
        self._begun, self.first_ms = time.perf_counter(), 0.0

    def part(self) -> None:
        """Notes that a part has come."""
        self.first_ms = self.first_ms or 1000 * (time.perf_counter() - self._begun)


class Messages(Agent):
    """Claude Code: the first message of the user begins with a reminder, the last block of a message is marked."""

    name = "Claude Code (/v1/messages)"

    def say(self, text: str) -> None:
        """Appends blocks of text."""
        blocks = [{"type": "text", "text": text}]
        if not self.history:
            blocks.insert(
                0, {"type": "text", "text": "<system-reminder>\nKeep to CONTRIBUTING.md.\n</system-reminder>"}
            )
        self.history.append({"role": "user", "content": blocks})

    def give(self, call: str, text: str) -> None:
        """Appends a block tool_result, as a message of the user."""
        block = {"type": "tool_result", "tool_use_id": call, "content": [{"type": "text", "text": text}]}
        self.history.append({"role": "user", "content": [block]})

    def ask(self) -> Answered:
        """Streams a message."""
        from anthropic import Anthropic

        tools: list[Any] = [
            {"name": tool.name, "description": tool.description, "input_schema": tool.schema}
            for tool in self.tools
        ]
        system: list[Any] = [{"type": "text", "text": "You are a coding agent."}]
        system.append(
            {"type": "text", "text": self.system(self.date), "cache_control": {"type": "ephemeral"}}
        )
        *before, last = self.history
        *blocks, marked = last["content"]
        marked = marked | {"cache_control": {"type": "ephemeral"}}
        messages = [*before, last | {"content": [*blocks, marked]}]
        clock = Clock()
        with (
            Anthropic(base_url=self.url, api_key="none") as client,
            client.messages.stream(
                model="scripted", max_tokens=1024, system=system, tools=tools, messages=messages
            ) as stream,
        ):
            for event in stream:
                if event.type == "content_block_start":
                    clock.part()
            message = stream.get_final_message()
        content = [block.model_dump(exclude_none=True) for block in message.content]
        self.history.append({"role": "assistant", "content": content})
        cached, rest = message.usage.cache_read_input_tokens or 0, message.usage.input_tokens
        calls = tuple(block.id for block in message.content if block.type == "tool_use")
        return Answered(cached + rest, cached, clock.first_ms, calls)


class Responses(Agent):
    """Codex: instructions, a developer's message, the surroundings with the date as the user's first message."""

    name = "Codex (/v1/responses)"

    def say(self, text: str) -> None:
        """Appends an item message."""
        self.history.append(_item("user", text))

    def give(self, call: str, text: str) -> None:
        """Appends an item function_call_output."""
        self.history.append({"type": "function_call_output", "call_id": call, "output": text})

    def ask(self) -> Answered:
        """Streams a response, of which the server is to store nothing."""
        from openai import OpenAI

        tools: list[Any] = [
            {"type": "function", "name": tool.name, "description": tool.description, "strict": False}
            | {"parameters": tool.schema}
            for tool in self.tools
        ]
        surroundings = (
            f"<environment_context>\n<current_date>{self.date}</current_date>\n</environment_context>"
        )
        begun = [_item("developer", "Commands run without a sandbox."), _item("user", surroundings)]
        clock, response = Clock(), None
        opened: Any = OpenAI(base_url=f"{self.url}/v1", api_key="none")
        with opened as client:
            for event in client.responses.create(
                model="scripted",
                instructions=self.system(""),
                input=[*begun, *self.history],
                tools=tools,
                stream=True,
                store=False,
                include=["reasoning.encrypted_content"],
                prompt_cache_key="one",
            ):
                if event.type == "response.output_item.added":
                    clock.part()
                if event.type == "response.completed":
                    response = event.response
        if response is None or response.usage is None:
            raise ValueError("expected an event response.completed with usage at a stream's end, got none")
        self.history += [item.model_dump(exclude_none=True) for item in response.output]
        cached = response.usage.input_tokens_details.cached_tokens
        calls = tuple(item.call_id for item in response.output if item.type == "function_call")
        return Answered(response.usage.input_tokens, cached, clock.first_ms, calls)


def _item(role: str, text: str) -> dict[str, Any]:
    """A message as an item of a response's input."""
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


class Chat(Agent):
    """opencode: a system message with the date at its end, tools, and answers without their reasoning."""

    name = "opencode (/v1/chat/completions)"

    def say(self, text: str) -> None:
        """Appends a message."""
        self.history.append({"role": "user", "content": text})

    def give(self, call: str, text: str) -> None:
        """Appends a message of the role tool."""
        self.history.append({"role": "tool", "tool_call_id": call, "content": text})

    def messages(self) -> list[Any]:
        """The messages of a request."""
        return [{"role": "system", "content": self.system(self.date)}, *self.history]

    def ask(self) -> Answered:
        """Streams a completion with its usage."""
        from openai import OpenAI

        functions = [
            {"name": tool.name, "description": tool.description, "parameters": tool.schema}
            for tool in self.tools
        ]
        tools = {"tools": [{"type": "function", "function": each} for each in functions]} if functions else {}
        clock, text, calls = Clock(), "", list[dict[str, Any]]()
        usage: Any = None
        opened: Any = OpenAI(base_url=f"{self.url}/v1", api_key="none")
        with opened as client:
            for chunk in client.chat.completions.create(
                model="scripted",
                messages=self.messages(),
                stream=True,
                stream_options={"include_usage": True},
                **tools,
            ):
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    delta = choice.delta
                    if delta.content or delta.tool_calls or getattr(delta, "reasoning_content", None):
                        clock.part()
                    text += delta.content or ""
                    calls += [_call(call) for call in delta.tool_calls or []]
        self.history.append({"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {}))
        cached = usage.prompt_tokens_details.cached_tokens
        return Answered(usage.prompt_tokens, cached, clock.first_ms, tuple(call["id"] for call in calls))


def _call(call: Any) -> dict[str, Any]:
    """A call as a chat's history has it. The server sends each one whole."""
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": "function", "function": function}


class Files(Chat):
    """aider: the files as they are now stand before the last message, after a history that has none of them.

    Attributes:
        files: path -> content.
    """

    name = "aider (/v1/chat/completions)"

    def __init__(self, url: str, system: Callable[[str], str], tools: Iterable[Tool]) -> None:
        super().__init__(url, system, ())
        self.files = dict[str, str]()

    def messages(self) -> list[Any]:
        """The messages of a request, with the files before the last one."""
        written = "\n\n".join(f"{path}\n```\n{content}\n```" for path, content in self.files.items())
        given = f"I have added these files to the chat. Trust them as they are now.\n\n{written}"
        system, *history = super().messages()
        ok = {"role": "assistant", "content": "Ok, changes to these files will be diffs."}
        return [system, *history[:-1], {"role": "user", "content": given}, ok, history[-1]]
