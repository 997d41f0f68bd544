"""The first screen of a chat: a model's own introduction, its name alone, and texts that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgemoe.errors import ModelRefused
from edgemoe.models.demo import DEMO
from edgemoe.models.introduction import introduction


def written(directory: Path, value: object) -> Path:
    (directory / "generation_config.json").write_text(json.dumps({"introduction": value, "do_sample": False}))
    return directory


def test_a_model_without_an_introduction_has_its_name(tmp_path: Path) -> None:
    """No file, and a file without the key, give the name and /help."""
    assert list(introduction(tmp_path, "org/name").lines()) == [
        "org/name",
        "/help lists the commands of the chat, exit ends it",
    ]
    assert introduction(written(tmp_path, None), "org/name").name == "org/name"


def test_an_introduction_is_shown_without_control_characters(tmp_path: Path) -> None:
    """Name, note and examples of the file are shown; escape sequences in them do not reach a terminal."""
    value = {"name": "tiny\x1b[2J", "note": "It counts.", "examples": ["1, 2?", "3\x07"]}
    assert list(introduction(written(tmp_path, value), "ignored").lines()) == [
        "tiny[2J: It counts. For example:",
        "  1, 2?",
        "  3",
        "/help lists the commands of the chat, exit ends it",
    ]


@pytest.mark.parametrize(
    "value",
    [
        "text",
        {"name": "x"},
        {"name": 3, "note": "", "examples": []},
        {"name": "x", "note": "", "examples": "y"},
        {"name": "x", "note": "", "examples": [3]},
        {"name": "x", "note": "y" * 201, "examples": []},
        {"name": "x", "note": "", "examples": ["y"] * 6},
    ],
)
def test_anything_but_short_texts_is_refused(tmp_path: Path, value: object) -> None:
    """A wrong type, a long text and too many examples are errors that name the file."""
    with pytest.raises(ModelRefused, match=r"generation_config\.json"):
        introduction(written(tmp_path, value), "x")


def test_the_demo_introduces_itself() -> None:
    """The demo's own files name it, say how little it knows, and give three examples."""
    demo = introduction(DEMO, "a path")
    assert demo.name == "edgemoe demo"
    assert "only a few things" in demo.note
    assert len(demo.examples) == 3
