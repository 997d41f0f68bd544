"""Result files that cannot be written are refused before a measurement."""

from __future__ import annotations

import sys

import pytest

from edgemoe.console.output_files import require_folders, require_plot
from edgemoe.errors import UserError


def test_writable_files_pass(tmp_path, monkeypatch):
    """An existing file, a new one, one in the current folder, and None."""
    (tmp_path / "old.json").write_text("old")
    monkeypatch.chdir(tmp_path)
    require_folders(tmp_path / "old.json", tmp_path / "new.json", type(tmp_path)("new.json"), None)
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]


@pytest.mark.parametrize(
    ("name", "words"), [("no/x.json", "no folder"), ("file/x.json", "no folder"), ("there", "a folder")]
)
def test_unwritable_files_are_refused(tmp_path, name, words):
    """A missing folder, a file in the place of a folder, and a folder in the place of a file."""
    (tmp_path / "file").touch()
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match=words) as caught:
        require_folders(None, tmp_path / "fine", tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["x.png", "x.PNG", "x.svg"])
def test_drawable_plots_pass(tmp_path, name):
    """The suffix may be in any case."""
    pytest.importorskip("matplotlib")
    require_plot(tmp_path / name)
    require_plot(None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "words"), [("no/x.png", "no folder"), ("x.doc", "suffix"), ("x", "suffix")])
def test_undrawable_plots_are_refused(tmp_path, name, words):
    """A missing folder, an unknown suffix, and no suffix."""
    pytest.importorskip("matplotlib")
    with pytest.raises(UserError, match=words):
        require_plot(tmp_path / name)


def test_without_matplotlib_the_message_has_its_installation(tmp_path, monkeypatch):
    """None in sys.modules makes an import fail as for a missing package."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="-m pip install 'matplotlib") as caught:
        require_plot(tmp_path / "x.png")
    assert caught.value.exit_code == 2
