"""Text files that options name: a fault of one is a message in words."""

from __future__ import annotations

import pytest

from edgemoe.console.text_files import read_text
from edgemoe.errors import UserError


def test_faults_of_a_text_file_are_words(tmp_path):
    """A missing file, a directory and other bytes than text are distinguished, without a number of the system's."""
    (tmp_path / "bytes").write_bytes(b"ab\xff")
    for name, found in (("none", "no such file"), ("", "a directory"), ("bytes", "not UTF-8, at position 2")):
        with pytest.raises(UserError, match=found) as caught:
            read_text(tmp_path / name, "--text")
        assert "Errno" not in str(caught.value)


def test_a_text_is_read_up_to_a_number_of_characters(tmp_path):
    """All of it, or its first characters."""
    (tmp_path / "text").write_text("tier é block", encoding="utf-8")
    assert read_text(tmp_path / "text", "--text") == "tier é block"
    assert read_text(tmp_path / "text", "--text", 6) == "tier é"
