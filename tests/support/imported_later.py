"""Packages that a test file uses in its tests alone, imported by the first test that does."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest


def imported_later(name: str) -> ModuleType:
    """Returns a package that is imported when its first attribute is read. Skips the test file where it is missing."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        pytest.skip(f"no package {name}", allow_module_level=True)
    spec.loader = loader = importlib.util.LazyLoader(spec.loader)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
