"""tools.timing.delta_net: a line for each way to compute a prompt."""

from __future__ import annotations

import pytest
from availability import needs_native

from tools.timing import delta_net

pytestmark = [pytest.mark.e2e, needs_native]


def test_every_way_has_a_line(capsys):
    """On a small hidden state and few tokens; a layer's products are a part of its time."""
    delta_net.main(["--tokens", "3", "--runs", "2", "--hidden", "64"])
    lines = [line.split(" ms  ") for line in capsys.readouterr().out.splitlines()]
    assert [name for _, name in lines] == [
        "transformers, bf16",
        "transformers, products by this program",
        "this program",
        "its products",
    ]
    assert all(float(milliseconds) > 0 for milliseconds, _ in lines)
