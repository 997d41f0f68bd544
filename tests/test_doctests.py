"""The examples in docstrings run and print what they show."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest

MODULES = (
    *(
        "edgemoe.storage.base",
        "edgemoe.errors",
        "edgemoe.storage.files.retry",
        "edgemoe.cache.base",
        "edgemoe.prefetch.base",
        "edgemoe.prefetch.counts",
    ),
    *(
        "edgemoe.kernels.base",
        "edgemoe.kernels.activation",
        "edgemoe.policy.compensation",
        "edgemoe.policy.levels",
        "edgemoe.policy.remapping",
    ),
    *(
        "edgemoe.memory.compensator_bytes",
        "edgemoe.memory.limits",
        "edgemoe.storage.compensators.geometry",
        "edgemoe.storage.compensators.ranks",
    ),
    *("edgemoe.experts.assignments", "edgemoe.experts.use", "edgemoe.hub.name", "edgemoe.hub.gguf_files"),
    "tools.timing.decode",
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_are_correct(name):
    """Every example of the module prints its expected output, and there is at least one."""
    failed, attempted = doctest.testmod(import_module(name))
    assert failed == 0
    assert attempted > 0
