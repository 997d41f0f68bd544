"""Packages that a test file uses in its tests alone, imported by the first test that does."""

from __future__ import annotations

from importlib import import_module, util
from types import ModuleType
from typing import Any

import pytest


class Later(ModuleType):
    """Stands for a package, which is imported when a public attribute is read.

    pytest reads private attributes of everything in a test file while it collects tests.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(import_module(self.__name__), name)


def imported_later(name: str) -> ModuleType:
    """Returns a stand-in that imports a package at its first use. Skips the test file where the package is missing."""
    if util.find_spec(name) is None:
        pytest.skip(f"no package {name}", allow_module_level=True)
    return Later(name)
