"""The only prompt of a chat, with a file and with what is piped into stdin."""

from __future__ import annotations

import io
import os
import sys
from contextlib import ExitStack
from functools import partial

import pytest

from edgemoe.console import attachments
from edgemoe.console.attachments import whole_prompt
from edgemoe.errors import UserError


@pytest.fixture
def stdin(monkeypatch):
    """Puts a file in the place of stdin."""
    return partial(monkeypatch.setattr, sys, "stdin")


@pytest.fixture
def pipe(stdin):
    """Makes bytes the contents of a pipe on stdin."""
    with ExitStack() as opened:

        def make(data: bytes) -> None:
            reading, writing = os.pipe()
            os.write(writing, data)
            os.close(writing)
            stdin(opened.enter_context(os.fdopen(reading)))

        yield make


def test_a_prompt_alone(stdin):
    """Without a file, and with a stdin that is no pipe, the prompt is unchanged."""
    stdin(io.StringIO("another program's"))
    assert whole_prompt("a prompt", None) == "a prompt"
    with open(os.devnull) as null:  # noqa: PTH123
        stdin(null)
        assert whole_prompt("a prompt", None) == "a prompt"


def test_a_file_and_a_pipe_follow(pipe, stdin, tmp_path):
    """The file comes first; empty lines separate the parts, and an empty pipe adds nothing."""
    (tmp_path / "notes").write_text("one\ntwo\n\n", encoding="utf-8")
    pipe("größer 🙂\n".encode())
    assert whole_prompt("sum up", tmp_path / "notes") == "sum up\n\none\ntwo\n\ngrößer 🙂"
    pipe(b"")
    assert whole_prompt("sum up", None) == "sum up"
    with (tmp_path / "notes").open() as file:
        stdin(file)
        assert whole_prompt("sum up", None) == "sum up\n\none\ntwo"


def test_what_is_no_text_is_refused(pipe, tmp_path, monkeypatch):
    """Other encodings, folders, missing files and too much text are refused with their name."""
    pipe(b"caf\xe9")
    with pytest.raises(UserError, match="UTF-8 text in stdin"):
        whole_prompt("x", None)
    for path, found in ((tmp_path, "directory"), (tmp_path / "none", "no such file")):
        with pytest.raises(UserError, match=found):
            whole_prompt("x", path)
    monkeypatch.setattr(attachments, "MOST_BYTES", 3)
    pipe(b"four")
    with pytest.raises(UserError, match="text in stdin, got more"):
        whole_prompt("x", None)
