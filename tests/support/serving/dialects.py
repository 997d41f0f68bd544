"""How a client of each protocol writes a chat, and reads its answers, errors and streams, in the protocol's words."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass
class Said:
    """The parts of an answer, in any protocol.

    Args:
        end: the protocol's words for its end.
        usage: tokens of the prompt, of these the kept ones (None: the protocol does not say), and of the answer.
    """

    thought: str = ""
    text: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    end: object = None
    usage: tuple[int, int | None, int] = (0, None, 0)


class Dialect(ABC):
    """A protocol, as its client sees it.

    Attributes:
        path: where chats are posted.
        prompt: the field of the conversation.
        stream_type: the content-type of a stream.
        ping: a sign of life in a stream.
        ends: reason of an answer's end -> the protocol's words for it; a client cannot ask for a missing one.
        forces_calls: whether a client can require calls, forbid them, or allow one at most.
        kinds: status -> the type of an error; None: errors have none.
    """

    path: str
    prompt = "messages"
    stream_type = "text/event-stream; charset=utf-8"
    ping = ": ping"
    ends: ClassVar[Mapping[str, object]]
    forces_calls = True
    kinds: ClassVar[Mapping[int, str | None]]

    @abstractmethod
    def body(self, said: Sequence[dict[str, Any]], stream: bool = False, **fields: Any) -> dict[str, Any]:
        """The body of a chat.

        `fields` has limit (tokens), stop (a text), tools ((name, schema) of each), choice (required, none, or a tool's
        name), one_call (True), schema, and thinking (False).
        """

    def question(self, text: str) -> list[dict[str, Any]]:
        """The turn of a user."""
        return [{"role": "user", "content": text}]

    @abstractmethod
    def answered(self, whole: dict[str, Any], result: str) -> list[dict[str, Any]]:
        """An answer that the client sends back, with a result of each of its calls."""

    @abstractmethod
    def whole(self, answer: dict[str, Any]) -> Said:
        """Reads an answer that is one object."""

    @abstractmethod
    def streamed(self, text: str) -> Said:
        """Reads a stream to its end."""

    @abstractmethod
    def error(self, body: dict[str, Any]) -> tuple[str, str | None]:
        """(message, type) of an error object, which has nothing else."""

    @abstractmethod
    def failed(self, text: str) -> str:
        """The message of the error that ends a stream."""


def tool(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A tool as OpenAI's chats and ollama have it."""
    return {"type": "function", "function": {"name": name, "description": "x", "parameters": schema}}


def data_of(text: str) -> list[dict[str, Any]]:
    """The objects of a stream of server-sent events."""
    lines = [line for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def present_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}


_OPENAI_KINDS = {
    **dict.fromkeys((400, 401, 403, 404, 405, 413), "invalid_request_error"),
    **{429: "rate_limit_error", 503: "unavailable_error", 504: "server_error"},
}


class OpenAIChat(Dialect):
    """/v1/chat/completions."""

    path = "/v1/chat/completions"
    kinds: ClassVar = _OPENAI_KINDS
    ends: ClassVar = {
        "own": "stop",
        "stop": "stop",
        "limit": "length",
        "context": "length",
        "calls": "tool_calls",
    }

    def body(self, said, stream=False, *, tools=(), schema=None, choice=None, one_call=False, **fields):
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}} if schema else None
        named = {"type": "function", "function": {"name": choice}}
        return present_fields(
            {
                "messages": list(said),
                "stream": stream,
                "stream_options": {"include_usage": True} if stream else None,
                "max_tokens": fields.get("limit"),
                "stop": fields.get("stop"),
                "tools": [tool(*each) for each in tools] or None,
                "tool_choice": choice if choice in (None, "required", "none") else named,
                "parallel_tool_calls": False if one_call else None,
                "response_format": form,
                "chat_template_kwargs": {"enable_thinking": False}
                if fields.get("thinking") is False
                else None,
            }
        )

    def answered(self, whole, result):
        message = whole["choices"][0]["message"]
        del message["refusal"]
        message.pop("reasoning_content", None)  # as OpenAI's own types, which have none
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": result}
            for call in message.get("tool_calls", ())
        ]
        return [message, *results]

    def whole(self, answer):
        (choice,) = answer["choices"]
        return self._said([choice["message"]], choice["finish_reason"], answer["usage"])

    def streamed(self, text):
        chunks = data_of(text)
        assert text.endswith("data: [DONE]\n\n")
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert choices[0]["delta"]["role"] == "assistant"
        (end,) = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        return self._said([choice["delta"] for choice in choices], end, chunks[-1]["usage"])

    def _said(self, parts, end, usage):
        calls = [call["function"] for part in parts for call in part.get("tool_calls", ())]
        return Said(
            "".join(part.get("reasoning_content") or "" for part in parts),
            "".join(part.get("content") or "" for part in parts),
            [(call["name"], json.loads(call["arguments"])) for call in calls],
            end,
            (
                usage["prompt_tokens"],
                usage["prompt_tokens_details"]["cached_tokens"],
                usage["completion_tokens"],
            ),
        )

    def error(self, body):
        assert body.keys() == {"error"}
        assert body["error"].keys() == {"message", "type", "param", "code"}
        return body["error"]["message"], body["error"]["type"]

    def failed(self, text):
        return self.error(data_of(text)[-1])[0]


class OpenAIResponses(OpenAIChat):
    """/v1/responses, with the error object of OpenAI's chats."""

    path, prompt = "/v1/responses", "input"
    ends: ClassVar = {
        "own": ("completed", None),
        "limit": ("incomplete", {"reason": "max_output_tokens"}),
        "context": ("incomplete", {"reason": "max_output_tokens"}),
        "calls": ("completed", None),
    }

    def body(self, said, stream=False, *, tools=(), schema=None, choice=None, one_call=False, **fields):
        form = {"format": {"type": "json_schema", "name": "a", "schema": schema}} if schema else None
        listed = [
            {"type": "function", "name": name, "description": "x", "parameters": of} for name, of in tools
        ]
        return present_fields(
            {
                "model": "any",
                "input": list(said),
                "stream": stream,
                "max_output_tokens": fields.get("limit"),
                "tools": listed or None,
                "tool_choice": choice
                if choice in (None, "required", "none")
                else {"type": "function", "name": choice},
                "parallel_tool_calls": False if one_call else None,
                "text": form,
                "reasoning": {"effort": "none"} if fields.get("thinking") is False else None,
            }
        )

    def answered(self, whole, result):
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": result}
            for item in whole["output"]
            if item["type"] == "function_call"
        ]
        return [*whole["output"], *results]

    def whole(self, answer):
        texts = {"reasoning": "", "message": ""}
        for item in answer["output"]:
            if item["type"] in texts:
                texts[item["type"]] += item["content"][0]["text"]
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        usage = answer["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        return Said(
            texts["reasoning"],
            texts["message"],
            [(call["name"], json.loads(call["arguments"])) for call in calls],
            (answer["status"], answer["incomplete_details"]),
            (usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]),
        )

    def streamed(self, text):
        events = data_of(text)
        said, last = self.whole(events[-1]["response"]), events[-1]
        assert last["type"] == f"response.{last['response']['status']}"
        for kind, whole in (("reasoning_text", said.thought), ("output_text", said.text)):
            pieces = [event["delta"] for event in events if event["type"] == f"response.{kind}.delta"]
            assert "".join(pieces) == whole
        done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
        assert [(event["name"], json.loads(event["arguments"])) for event in done] == said.calls
        return said

    def failed(self, text):
        last = data_of(text)[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        return last["response"]["error"]["message"]


class Anthropic(Dialect):
    """/v1/messages."""

    path, ping = "/v1/messages", 'event: ping\ndata: {"type":"ping"}'
    ends: ClassVar = {
        "own": ("end_turn", None),
        "stop": ("stop_sequence", " three"),
        "limit": ("max_tokens", None),
        "context": ("model_context_window_exceeded", None),
        "calls": ("tool_use", None),
    }
    kinds: ClassVar = {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        405: "invalid_request_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
    }

    def body(self, said, stream=False, *, tools=(), schema=None, choice=None, one_call=False, **fields):
        listed = [{"name": name, "description": "x", "input_schema": of} for name, of in tools]
        kind = {None: "auto", "required": "any", "none": "none"}.get(choice, "tool")
        chosen = {"type": kind, "name": choice if kind == "tool" else None}
        form = {"format": {"type": "json_schema", "schema": schema}} if schema else None
        return present_fields(
            {
                "model": "any",
                "messages": list(said),
                "stream": stream,
                "max_tokens": fields.get("limit") or 10**6,
                "stop_sequences": [fields["stop"]] if "stop" in fields else None,
                "tools": listed or None,
                "tool_choice": present_fields({**chosen, "disable_parallel_tool_use": one_call or None})
                if choice or one_call
                else None,
                "output_config": form,
                "thinking": {"type": "disabled"} if fields.get("thinking") is False else None,
            }
        )

    def answered(self, whole, result):
        calls = [block for block in whole["content"] if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call["id"], "content": result} for call in calls]
        answer = {"role": "assistant", "content": whole["content"]}
        return [answer, {"role": "user", "content": results}] if results else [answer]

    def whole(self, answer):
        said, usage = Said(), answer["usage"]
        for block in answer["content"]:
            if block["type"] == "tool_use":
                said.calls.append((block["name"], block["input"]))
            elif block["type"] == "thinking":
                said.thought += block["thinking"]
            else:
                said.text += block["text"]
        kept = usage["cache_read_input_tokens"]
        said.end = (answer["stop_reason"], answer["stop_sequence"])
        said.usage = (usage["input_tokens"] + kept, kept, usage["output_tokens"])
        return said

    def streamed(self, text):
        events, blocks = data_of(text), list[dict[str, Any]]()
        assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
        for event in events:
            if event["type"] == "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append({**event["content_block"], "json": ""})
            elif event["type"] == "content_block_delta":
                delta, block = event["delta"], blocks[event["index"]]
                name = delta["type"].removesuffix("_delta")
                block["json" if name == "input_json" else name] += delta[
                    "partial_json" if name == "input_json" else name
                ]
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = json.loads(block["json"])
        end = events[-2]
        assert end["type"] == "message_delta"
        return self.whole({"content": blocks, **end["delta"], "usage": end["usage"]})

    def error(self, body):
        assert (body.keys(), body["type"]) == ({"type", "error"}, "error")
        assert body["error"].keys() == {"type", "message"}
        return body["error"]["message"], body["error"]["type"]

    def failed(self, text):
        return self.error(data_of(text)[-1])[0]


class Ollama(Dialect):
    """/api/chat."""

    path, stream_type, forces_calls = "/api/chat", "application/x-ndjson", False
    ping = '"message":{"role":"assistant","content":""},"done":false}'
    ends: ClassVar = {"own": "stop", "stop": "stop", "limit": "length", "context": "length", "calls": "stop"}
    kinds: ClassVar = dict.fromkeys((400, 401, 403, 404, 405, 413, 429, 503, 504))

    def body(self, said, stream=False, *, tools=(), schema=None, **fields):
        options = {"num_predict": fields.get("limit"), "stop": fields.get("stop")}
        return present_fields(
            {
                "model": "any",
                "messages": list(said),
                "stream": stream,
                "options": present_fields(options),
                "tools": [tool(*each) for each in tools] or None,
                "format": schema,
                "think": fields.get("thinking"),
            }
        )

    def answered(self, whole, result):
        message = whole["message"]
        for call in message.get("tool_calls", ()):
            del call["id"]  # as ollama's own client, which has none
        return [
            message,
            *({"role": "tool", "tool_name": "x", "content": result} for _ in message.get("tool_calls", ())),
        ]

    def whole(self, answer):
        return self._said([answer])

    def streamed(self, text):
        lines = [json.loads(line) for line in text.splitlines()]
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        return self._said(lines)

    def _said(self, lines):
        parts, end = [line["message"] for line in lines], lines[-1]
        calls = [call["function"] for part in parts for call in part.get("tool_calls", ())]
        assert [call["index"] for call in calls] == list(range(len(calls)))
        return Said(
            "".join(part.get("thinking", "") for part in parts),
            "".join(part["content"] for part in parts),
            [(call["name"], call["arguments"]) for call in calls],
            end["done_reason"],
            (end["prompt_eval_count"], None, end["eval_count"]),
        )

    def error(self, body):
        assert body.keys() == {"error"}
        return body["error"], None

    def failed(self, text):
        return self.error(json.loads(text.splitlines()[-1]))[0]


DIALECTS = {
    "openai_chat": OpenAIChat(),
    "openai_responses": OpenAIResponses(),
    "anthropic": Anthropic(),
    "ollama": Ollama(),
}
