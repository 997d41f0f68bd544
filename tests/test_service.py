"""The container and the unit of systemd agree with the program: files, port, exit codes."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edgemoe.commands.options.serve import AddressOptions
from edgemoe.errors import DamagedData, DoesNotFit, UserError

ROOT = Path(__file__).resolve().parents[1]

UNIT = ROOT / "contrib" / "edgemoe.service"


def test_the_image_gets_what_pip_needs():
    """The packages of the checkout and the files that pyproject.toml and the sdist name, and nothing else."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    kept = {line[1:] for line in lines if line.startswith("!")}
    files = {"LICENSE", "MANIFEST.in", "README.md", "pyproject.toml"}
    assert kept == {"edgemoe", "cache", "prefetch", "storage"} | files
    assert [name for name in kept if not (ROOT / name).exists()] == []


def test_the_image_serves_at_the_default_port():
    """The port that it shows, the one that its health check asks, and the one at which serve listens are the same."""
    text = (ROOT / "Containerfile").read_text()
    shown, health = (
        re.search(r"^EXPOSE (\d+)$", text, re.MULTILINE),
        re.search(r"127\.0\.0\.1:(\d+)/health", text),
    )
    assert shown
    assert health
    assert int(shown[1]) == int(health[1]) == AddressOptions().port
    assert text.index("USER edgemoe") < text.index("ENTRYPOINT")


def test_the_unit_gives_up_where_a_start_changes_nothing():
    """Exit codes of a wrong option, a limit that is too small and a damaged store end the attempts of systemd."""
    (codes,) = re.findall(r"^RestartPreventExitStatus=(.*)$", UNIT.read_text(), re.MULTILINE)
    assert [int(code) for code in codes.split()] == [
        kind.exit_code for kind in (UserError, DoesNotFit, DamagedData)
    ]


@pytest.mark.e2e
def test_systemd_accepts_the_unit(tmp_path):
    """systemd's own check finds no unknown setting; the command of an installation is replaced by one that is here."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("expected systemd-analyze on the path, got none")
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/usr/local/lib/edgemoe/bin/edgemoe", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_demo_is_found_where_an_installer_links_every_file(tmp_path):
    """uv can link the files of a package one by one; the checkpoint is the folder that has the files."""
    from edgemoe.models import demo

    for name in ("models/demo.py", "demo/config.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).symlink_to(ROOT / "edgemoe" / name)
    spec = importlib.util.spec_from_file_location("linked_demo", tmp_path / "models" / "demo.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.DEMO == demo.DEMO == ROOT / "edgemoe" / "demo"
