"""Conversation files: a round trip, and files that are refused."""

from __future__ import annotations

import errno
import json
import os
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgemoe.chat.transcript import LEFT_OUT, keep_last, load, load_last, save
from edgemoe.errors import UserError

TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hallo ü😀\n\x00"}]
ODD = {"type": "text", "text": {"url": "x"}}
GOOD = {"format": "edgemoe conversation", "version": 1, "messages": TURNS}


@pytest.mark.parametrize("messages", [TURNS, [{"role": "system", "content": "be brief"}, *TURNS, *TURNS]])
def test_a_saved_conversation_loads(tmp_path, messages):
    """Every character is kept; a second save replaces the first."""
    path = tmp_path / "talk.json"
    save(path, TURNS)
    save(path, messages)
    assert load(path) == messages
    assert [p.name for p in tmp_path.iterdir()] == ["talk.json"]


def test_no_other_file_is_overwritten(tmp_path):
    """A file close to the format stays too, and an empty conversation writes no file."""
    for content in ("my notes", "{}", json.dumps(GOOD | {"version": 2})):
        path = tmp_path / "notes"
        path.write_text(content)
        with pytest.raises(UserError, match="a file that is no conversation"):
            save(path, TURNS)
        assert path.read_text() == content
    with pytest.raises(UserError, match="messages to save"):
        save(tmp_path / "new", [])
    assert not (tmp_path / "new").exists()


def test_a_failed_save_leaves_no_file(tmp_path, monkeypatch):
    """A missing directory, a directory as file, and a failing disk are refused by name."""
    for path, message in ((tmp_path / "none" / "talk.json", "No such file"), (tmp_path, "no conversation")):
        with pytest.raises(UserError, match=message) as caught:
            save(path, TURNS)
        assert str(path) in str(caught.value)

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UserError, match="Input/output error"):
        save(tmp_path / "talk.json", TURNS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", 'without "format"'),
        (json.dumps(GOOD | {"version": 2}), "version 2"),
        (json.dumps(GOOD | {"messages": {}}), "a file without messages"),
        (json.dumps(GOOD | {"messages": []}), "a file without messages"),
        (json.dumps(GOOD | {"messages": [TURNS[0]]}), "order of roles"),
        (json.dumps(GOOD | {"messages": TURNS[::-1]}), "order of roles"),
        (json.dumps(GOOD | {"messages": [*TURNS, {"role": "system", "content": "x"}]}), "order of roles"),
        (json.dumps(GOOD | {"messages": [TURNS[0], {"role": "tool", "content": "x"}]}), "order of roles"),
        (json.dumps(GOOD | {"messages": [TURNS[0], {"role": "assistant", "content": 3}]}), "message 1"),
        (json.dumps(GOOD | {"messages": [TURNS[0], {"role": "assistant"}]}), "message 1"),
        (json.dumps(GOOD | {"messages": [TURNS[0], TURNS[1] | {"content": "\ud800"}]}), "message 1"),
        (json.dumps(GOOD | {"messages": [{"role": "user", "content": [ODD]}, TURNS[1]]}), "message 0"),
    ],
)
def test_a_file_of_another_format_is_refused(tmp_path, document, message):
    """The message has the file's name and the fault."""
    path = tmp_path / "talk.json"
    path.write_text(document)
    with pytest.raises(UserError, match=r"talk\.json") as caught:
        load(path)
    assert message in str(caught.value)


def test_a_conversation_too_large_is_kept_without_its_pictures(tmp_path, monkeypatch):
    """Also where an earlier file cannot be loaded: --continue would never work again."""
    part = {"type": "image_url", "image_url": {"url": "data:;base64," + "A" * 2000}}
    turn = {"role": "user", "content": [part, {"type": "text", "text": "what is it"}]}
    conversation = SimpleNamespace(messages=(turn, TURNS[1]), saved_kv=lambda: (None, 0))
    monkeypatch.setattr("platformdirs.user_state_dir", lambda name: str(tmp_path))
    monkeypatch.setattr("edgemoe.chat.transcript.MOST_BYTES", 1000)
    (tmp_path / "last-conversation.json").write_bytes(b"x" * 2000)
    called = []
    keep_last(conversation, lambda: called.append(True))
    (kept, answer), _ = load_last()
    assert (kept["content"], answer) == ([LEFT_OUT, turn["content"][1]], TURNS[1])
    assert called


def test_a_large_or_missing_file_is_refused(tmp_path, monkeypatch):
    """A file above the size limit is not parsed, and not written."""
    save(tmp_path / "talk.json", TURNS)
    monkeypatch.setattr("edgemoe.chat.transcript.MOST_BYTES", 10)
    with pytest.raises(UserError, match="a conversation of at most 10 bytes"):
        save(tmp_path / "more.json", TURNS)
    assert not (tmp_path / "more.json").exists()
    with pytest.raises(UserError, match="more than 10 bytes"):
        load(tmp_path / "talk.json")
    with pytest.raises(UserError, match="no such file"):
        load(tmp_path / "none.json")
    with pytest.raises(UserError, match="got a directory"):
        load(tmp_path)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.sampled_from(["user", "assistant", "system"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "format", "messages"]) | st.text(max_size=3), inner
        )
    ),
    max_leaves=12,
)


@pytest.mark.e2e
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80)
@given(st.binary(max_size=60) | VALUES.map(lambda v: json.dumps(GOOD | {"messages": v}).encode()))
def test_any_file_is_refused_or_loaded(tmp_path, data):
    """Any bytes give a UserError, or messages of two texts each."""
    path = tmp_path / "talk.json"
    path.write_bytes(data)
    try:
        messages = load(path)
    except UserError:
        return
    assert all(
        set(m) == {"role", "content"} and all(isinstance(x, str) for x in m.values()) for m in messages
    )
