"""A command while it imports packages."""

from __future__ import annotations

import gc

import pytest

from edgemoe.console.loading import starting


def test_packages_are_imported_without_garbage_collection():
    """It runs again after the block, and after an import that fails."""
    with starting("loading"):
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), starting("loading"):
        raise ImportError
    assert gc.isenabled()
