"""Answers with calls, found again by id or by what they say, within a bound."""

from __future__ import annotations

from types import SimpleNamespace

from edgemoe.api import replay
from edgemoe.api.answer_reader import Call
from edgemoe.api.replay import Replays


def answer(city: str) -> SimpleNamespace:
    """The result of a reader that has found one call in an answer."""
    return SimpleNamespace(
        texts={"reasoning_content": "hm"}, calls=[Call("weather", {"city": city, "days": 2})]
    )


def message(city: str, *, id: str | None = None) -> dict:
    """The answer as a client sends it back, with its arguments in another order."""
    function = {"name": "weather", "arguments": {"days": 2, "city": city}}
    return {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [{"id": id, "function": function}],
    }


def test_an_answer_is_found_by_id_or_by_what_it_says(monkeypatch):
    """The latest of equal answers is found; one that has left is not found, and leaves no entry."""
    monkeypatch.setattr(replay, "MOST_TURNS", 2)
    replays, oslo = Replays(), answer("Oslo")
    replays.add([1], oslo)
    assert list(replays.of(message("Oslo")).tokens) == [1]
    assert list(replays.of(message("Oslo", id=oslo.calls[0].id)).tokens) == [1]
    assert replays.of(message("Oslo", id="call_1")) is None
    assert replays.of(message("Rome")) is None
    assert replays.of({**message("Oslo"), "reasoning_content": None}) is None
    replays.add([2], answer("Oslo"))
    replays.add([3], answer("Rome"))  # the first of Oslo leaves
    assert list(replays.of(message("Oslo")).tokens) == [2]
    replays.add([4], answer("Bern"))
    assert replays.of(message("Oslo")) is None
    assert list(replays.of(message("Rome")).tokens) == [3]
    assert len(replays._alike) == len(replays._turns) == 2
