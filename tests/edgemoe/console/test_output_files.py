"""edgemoe/console/output_files.py: what could not be written is refused before it is measured."""

from __future__ import annotations

import sys

import pytest

from edgemoe.console.output_files import require_folders, require_plot
from storage.errors import UserError


def test_files_that_can_be_written_pass(tmp_path, monkeypatch):
    """One that is there, one that is not, one in the folder of the process, and none at all."""
    (tmp_path / "old.json").write_text("old")
    monkeypatch.chdir(tmp_path)
    require_folders(tmp_path / "old.json", tmp_path / "new.json", type(tmp_path)("new.json"), None)
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]


@pytest.mark.parametrize(
    ("name", "found"), [("no/x.json", "no folder"), ("file/x.json", "no folder"), ("there", "a folder is")]
)
def test_files_that_cannot_are_named(tmp_path, name, found):
    """A folder that is missing or a file, and a folder where a file is to be; whichever of several it is."""
    (tmp_path / "file").touch()
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match=found) as caught:
        require_folders(None, tmp_path / "fine", tmp_path / name)
    assert name in caught.value.wanted
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["x.png", "x.PNG", "x.svg"])
def test_plots_that_matplotlib_draws_pass(tmp_path, name):
    """Whatever case their ending is in."""
    pytest.importorskip("matplotlib")
    require_plot(tmp_path / name)
    require_plot(None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "found"), [("no/x.png", "no folder"), ("x.doc", "none of"), ("x", "none of")]
)
def test_plots_that_it_would_not_are_named(tmp_path, name, found):
    """No folder, an ending that it does not know, or none."""
    pytest.importorskip("matplotlib")
    with pytest.raises(UserError, match=found):
        require_plot(tmp_path / name)


def test_without_matplotlib_it_is_told_how_to_get_it(tmp_path, monkeypatch):
    """None in sys.modules is what import takes for not installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="pip install") as caught:
        require_plot(tmp_path / "x.png")
    assert caught.value.exit_code == 2
