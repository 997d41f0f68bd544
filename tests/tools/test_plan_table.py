"""tools/plan_table.py: the models' sizes against published ones, and the table in docs."""

from __future__ import annotations

from math import prod

import pytest
from pairwise import few

from edgemoe.errors import ModelRefused
from edgemoe.kernels.native import library as native
from edgemoe.models.published.announced import announced_checkpoint
from edgemoe.models.published.sizes import PUBLISHED
from tools.plan_table import BEGIN, DOCS, rewritten

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("name", few(PUBLISHED, [*PUBLISHED][:2]))
def test_config_gives_the_models_parameters(name):
    """The parameters of a config equal the published number: a wrong size would change the total."""
    checkpoint = announced_checkpoint(name)
    total = sum(prod(checkpoint[tensor].shape) for tensor in checkpoint.names())
    assert total / 1e9 == pytest.approx(PUBLISHED[name].billions, abs=0.1)
    with pytest.raises(ModelRefused, match=PUBLISHED[name].repository):
        checkpoint[min(checkpoint.names())].read()


@pytest.mark.skipif(not native.available(), reason="the table is planned for edgemoe's own kernel")
def test_docs_contain_the_tools_table():
    """docs/models.md contains the table that the tool prints."""
    text = DOCS.read_text(encoding="utf-8")
    assert BEGIN in text
    assert rewritten(text) == text
