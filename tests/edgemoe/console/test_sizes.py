"""Parsing and formatting sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgemoe.console.sizes import format_least, format_size, parse_size
from edgemoe.errors import UserError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("12GB", 12_000_000_000),
        ("11.5GiB", 12_348_030_976),
        ("800MB", 800_000_000),
        ("12345678", 12345678),
        (" 1 kib ", 1024),
        ("7b", 7),
        ("2TB", 2_000_000_000_000),
        ("12G", 12_000_000_000),
        ("12g", 12_000_000_000),
        ("12Gi", 12 << 30),
        ("12 GB", 12_000_000_000),
        ("1.5 k", 1500),
        ("2.01GB", 2_010_000_000),
    ],
)
def test_a_size_is_parsed(text, size):
    """GB is a power of 1000, GiB of 1024, a B may be left out, no unit means bytes."""
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "GB", "-1GB", "0", "0.2", "1e9", "12 gigs", "nan", "1,5GB", "12GBB", "12iB", "12i", "\u0661G"],
)
def test_a_wrong_size_is_refused(text):
    """The message has the text."""
    with pytest.raises(UserError, match="12GB") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("text", ["12", "99999", "0.5"])
def test_a_size_whose_unit_was_forgotten_is_refused(text):
    """`--vram-limit 12` says 12 GB: a number of bytes as small as that has its B, and the message says so."""
    with pytest.raises(
        UserError, match=f"which is .*write {text}GB or {text}MB" if text != "0.5" else "12GB"
    ):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1500, "1.5 KB"),
        (999_600, "1 MB"),
        (2_650_000_000, "2.65 GB"),
        (3e12, "3 TB"),
    ],
)
def test_sizes_are_shown_in_powers_of_1000(size, text):
    """Three significant digits."""
    assert format_size(size) == text


@given(st.integers(1, 10**15))
def test_a_least_size_suffices_as_an_option(size):
    """The smallest size that a message names is short, enough when it is copied, and at most 1 % too much."""
    text = format_least(size)
    assert size <= parse_size(text) <= size + size // 100
    assert len(text) <= len("1.23GB")
