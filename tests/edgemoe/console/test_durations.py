"""Times as people write them."""

from __future__ import annotations

import pytest

from edgemoe.console.durations import parse_duration
from edgemoe.errors import UserError


@pytest.mark.parametrize(
    ("text", "seconds"), [("50ms", 0.05), ("0.05s", 0.05), (" 1.5 s ", 1.5), ("2 ms", 0.002)]
)
def test_durations(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "50", "0ms", "-5ms", "5 minutes", "1e3ms", "ms"])
def test_others_are_refused(text):
    with pytest.raises(UserError, match="a time such as 50ms"):
        parse_duration(text)
