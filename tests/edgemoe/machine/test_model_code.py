"""machine/model_code.py: transformers' advice is left out within the block alone."""

from __future__ import annotations

import logging

from transformers.utils import logging as transformers_logging

from edgemoe.machine.model_code import without_advice


def test_advice_is_left_out_within_the_block():
    """Warnings are not enabled in it, and are as before after it."""
    logger = transformers_logging.get_logger("transformers.models")
    before = logger.isEnabledFor(logging.WARNING)
    with without_advice():
        assert not logger.isEnabledFor(logging.WARNING)
        assert logger.isEnabledFor(logging.ERROR)
    assert logger.isEnabledFor(logging.WARNING) == before
