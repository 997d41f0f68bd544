"""Requests as coding agents have sent them, recorded between each agent and a server; their texts are left out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted import chatml_model, script
from servers import server_of

pytest.importorskip("llguidance")

DATA = Path(__file__).resolve().parents[3] / "data/clients"
DONE = "It is sunny."

CLIENTS = {
    "claude_code": (2, ("Bash", "Read"), "x-anthropic-billing-header"),
    "codex": (2, ("exec_command", "close_agent"), "web_search"),
    "opencode": (2, ("bash", "read"), None),
    "aider": (0, (), None),
}
"""Client -> results of tools in its last request, tools in its prompt, and a text that is not for the model."""


@pytest.fixture(scope="module")
def served(tiny_store) -> Iterator[Any]:
    with server_of(chatml_model(tiny_store, context=8192, parallel=1)) as one:
        yield one


def requests_of(client: str) -> list[dict[str, Any]]:
    recorded = json.loads((DATA / f"{client}.json").read_text(encoding="utf-8"))
    return list(recorded["requests"])


def events(served: Any, request: dict[str, Any], **changes: object) -> list[dict[str, Any]]:
    """Sends a request as it was recorded; returns the events of its stream."""
    body = request["body"] | changes
    response = served.client.post(request["path"], headers=request["headers"], json=body)
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def text_of(stream: list[dict[str, Any]]) -> str:
    """The text of an answer's events, in any of the three protocols."""
    text = ""
    for event in stream:
        delta = event.get("delta") if event.get("type") != "response.reasoning_text.delta" else None
        choices = event.get("choices") or [{}]
        text += delta if isinstance(delta, str) else (delta or {}).get("text") or ""
        text += choices[0].get("delta", {}).get("content") or ""
    return text


@pytest.mark.parametrize("client", CLIENTS)
def test_a_recorded_conversation_is_answered(served, monkeypatch, client):
    """Each of its requests streams an answer; the prompt has its results and tools, and nothing of other parties."""
    prompts = script(monkeypatch, served.serving.model.tokenizer, DONE)
    results, tools, foreign = CLIENTS[client]
    for request in requests_of(client):
        assert text_of(events(served, request)) == DONE
    assert prompts[-1].count("<tool_response>") == results
    assert all(f'"name": "{tool}"' in prompts[-1] for tool in tools)
    assert not (foreign and foreign in prompts[-1])


def test_a_call_says_the_namespace_of_its_tool(served, monkeypatch):
    """In the item of a stream, and in the whole response; a tool without one says none."""
    request = requests_of("codex")[0]
    for name, namespace in (("close_agent", "multi_agent_v1"), ("view_image", None)):
        call = f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
        script(monkeypatch, served.serving.model.tokenizer, call)
        last = events(served, request)[-1]["response"]
        body = request["body"] | {"stream": False}
        whole = served.client.post(request["path"], json=body).json()
        for response in (last, whole):
            (item,) = response["output"]
            assert (item["name"], item.get("namespace")) == (name, namespace)
            assert [tool["type"] for tool in response["tools"]][-2:] == ["namespace", "web_search"]


def test_tokens_of_a_recorded_message_are_counted(served):
    """count_tokens takes what Claude Code sends with its messages."""
    request = requests_of("claude_code")[-1]
    left = ("max_tokens", "stream", "metadata")
    body = {name: value for name, value in request["body"].items() if name not in left}
    response = served.client.post(
        "/v1/messages/count_tokens?beta=true", headers=request["headers"], json=body
    )
    assert response.status_code == 200, response.text
    assert response.json()["input_tokens"] > 100
