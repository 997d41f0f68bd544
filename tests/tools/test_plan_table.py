"""tools/plan_table.py: the models' sizes against published ones, and the table in docs."""

from __future__ import annotations

from math import prod

import pytest

from edgemoe.kernels.native import library as native
from tools.plan_table import BEGIN, DOCS, END, dense_shapes, rewritten, table
from tools.published_models import CONFIGS

pytestmark = pytest.mark.e2e

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
def test_config_gives_the_models_parameters(name):
    """The parameters of a config equal the published number: a wrong size would change the total."""
    dense, experts = dense_shapes(CONFIGS[name])
    total = sum(map(prod, dense.values())) + experts
    assert total / 1e9 == pytest.approx(PUBLISHED[name], abs=0.1)


@pytest.mark.e2e
@pytest.mark.skipif(not native.available(), reason="the table is planned for edgemoe's own kernel")
def test_docs_contain_the_tools_table():
    """docs/models.md contains the table that the tool prints."""
    text = DOCS.read_text(encoding="utf-8")
    assert f"{BEGIN}{table()}{END}" in text
    assert rewritten(text) == text
