"""Cases of families that several test files share."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from family_cases import Case


@pytest.fixture(scope="session")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Builds a family's case at its first use."""
    return functools.cache(lambda model_type: Case.made(model_type, tmp_path_factory.mktemp(model_type)))
