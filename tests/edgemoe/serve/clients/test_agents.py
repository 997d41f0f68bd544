"""Conversations of coding agents, sent by the libraries of their clients: nothing is computed twice."""

from __future__ import annotations

import pytest
from scripted import chatml_model, script
from servers import server_of

from tools.frontends.agent_clients import Messages, Tool
from tools.frontends.agents import CLIENTS, Replay, answer, replay_client

SLACK = 8
"""Fewer tokens are not worth a copy (edgemoe.engine.kept_sequences.LEAST_TOKENS)."""


@pytest.mark.e2e
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind is Messages else pytest.mark.folders, id=kind.__name__)
        for kind in CLIENTS
    ],
)
@pytest.mark.folders
def test_nothing_is_computed_twice(tiny_store, monkeypatch, kind):
    """A conversation, a change within it, another date, two agents in turn: only new tokens are computed."""
    pytest.importorskip("anthropic")
    monkeypatch.setattr("tools.frontends.agents.TOOLS", [Tool("read_file", "Reads.")])
    with server_of(chatml_model(tiny_store, context=4096, parallel=2)) as server:
        tokenizer = server.serving.model.tokenizer
        replay = Replay(tokenizer, script(monkeypatch, tokenizer, answer))
        pieces = iter([f"result {number}: {'x' * number}" for number in range(99)])
        replay_client(replay, kind, server.url, "Change as little as you can.", pieces, tasks=1)
    samples = replay.samples
    assert {sample.part for sample in samples} == {
        "a conversation",
        "an earlier message changed",
        "the next day",
        "two agents in turn",
    }
    assert all(0 <= sample.computed - sample.new < SLACK for sample in samples)
    assert min(sample.new / sample.prompt for sample in samples) < 0.5
