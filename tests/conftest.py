"""Options of all tests, and the fixtures of tests/support/shared_fixtures.py where tests run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

# Without a GPU Triton's kernels run in its interpreter. Triton reads this when torch._dynamo imports it.
os.environ.setdefault("TRITON_INTERPRET", "0" if Path("/dev/nvidiactl").exists() else "1")

# Without caches of compiled modules, which the environment may forbid, hundreds of processes compile the package, and
# each of pytest's own rewrites the asserts of every test.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# No test reads the options of the user who runs it: neither variables nor the file.
for name in [name for name in os.environ if name.startswith("EDGEMOE_")]:
    del os.environ[name]
NO_OPTIONS = TemporaryDirectory(prefix="edgemoe-config-")
os.environ["XDG_CONFIG_HOME"] = NO_OPTIONS.name


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--configurations",
        type=int,
        default=3,
        metavar="N",
        help="ways in which each family's tokens are computed (test_families_rows)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Imports the fixtures, and torch with them, except where this process only hands tests to others."""
    if not config.getoption("numprocesses", None) or config.option.collectonly:
        config.pluginmanager.import_plugin("fast_lane")
        config.pluginmanager.import_plugin("shared_fixtures")
