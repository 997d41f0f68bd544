"""tools/plan_table.py: the published models' sizes against what is published, and docs against the tool."""

from __future__ import annotations

from math import prod

import pytest

from edgemoe.kernels.native import library as native
from tools.plan_table import BEGIN, DOCS, END, dense_shapes, rewritten, table
from tools.published_models import CONFIGS

PUBLISHED = {
    "Qwen3-30B-A3B": 30.5,
    "Mixtral-8x7B": 46.7,
    "Qwen3-Next-80B-A3B": 79.7,
    "DeepSeek-V2-Lite": 15.7,
    "Phi-3.5-MoE": 41.9,
    "gpt-oss-20b": 20.9,
}
"""Billions of parameters, as the models' own pages count them."""


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_has_as_many_parameters_as_its_model(name):
    """A size that was copied wrongly would show in the total."""
    dense, experts = dense_shapes(CONFIGS[name])
    total = sum(map(prod, dense.values())) + experts
    assert total / 1e9 == pytest.approx(PUBLISHED[name], abs=0.1)


@pytest.mark.skipif(not native.available(), reason="the table is planned for edgemoe's own kernel")
def test_docs_have_what_the_tool_prints():
    """docs/models.md changes with the plan, or not at all."""
    text = DOCS.read_text(encoding="utf-8")
    assert f"{BEGIN}{table()}{END}" in text
    assert rewritten(text) == text
