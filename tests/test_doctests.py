"""The examples in docstrings run and print what they show."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest


@pytest.mark.parametrize("name", ["storage.base", "storage.errors"])
def test_the_examples_of_a_module_are_correct(name):
    """Every example of the module prints its expected output, and there is at least one."""
    failed, attempted = doctest.testmod(import_module(name))
    assert failed == 0
    assert attempted > 0
