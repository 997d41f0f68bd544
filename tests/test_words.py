"""The repository's words: field English in every text."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Joined from parts, so that this file does not contain the words that it looks for.
PERSONS = ["no" + "body", "some" + "body", "who" + "ever", "every" + "body", "any" + "body"]
WORDS = [*PERSONS, "as" + "ked", "to" + "ld", "in " + "peace"]
FORBIDDEN = re.compile(rf"(?<![A-Za-z])(?:{'|'.join(WORDS)})(?![A-Za-z])", re.IGNORECASE)
"""Words for persons that do not describe programs, also as a part of an identifier between underscores or digits."""

REPORT_NAMES = re.compile(rf"[vd]ram_limit_{WORDS[5]}_bytes")
"""Fields of `bench --json`, whose names never change."""


def tracked() -> list[str]:
    """Paths of the files that git tracks, or nothing outside a git checkout."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("the tracked files are known only in a git checkout")
    return [path for path in listed.split("\0") if path and (ROOT / path).is_file()]


def released(text: str) -> str:
    """The text of a changelog before its first released section."""
    return re.split(r"^## \[?\d", text, maxsplit=1, flags=re.MULTILINE)[0]


def forbidden_in(text: str) -> list[str]:
    """`line: word` of each forbidden word in a text, except in names of a report that are kept as they are."""
    lines = enumerate(REPORT_NAMES.sub("", text).splitlines(), 1)
    return [f"{number}: {match[0]}" for number, line in lines for match in FORBIDDEN.finditer(line)]


@pytest.mark.e2e
def test_every_text_uses_field_english() -> None:
    """Code, tests and docs contain none of the words; licences, data and released changes are exempt."""
    found = {}
    for path in tracked():
        raw = path.endswith(".json") and path.startswith(("docs/benchmarks/", "edgemoe/demo/"))
        raw = raw or path == "edgemoe/calibrate/text.txt"  # a novel
        if Path(path).name == "LICENSE" or path.startswith("tests/data/") or raw:
            continue
        try:
            text = (ROOT / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if words := forbidden_in(released(text) if path == "CHANGELOG.md" else text):
            found[path] = words
    assert found == {}


@pytest.mark.parametrize("word", WORDS)
def test_each_word_is_found(word: str) -> None:
    """A word is found in prose in any case, and as a part of an identifier."""
    assert forbidden_in(f"a line\n{word.capitalize()}.") == [f"2: {word.capitalize()}"]
    assert forbidden_in(f"test_{word}_2()") == [f"1: {word}"]


@pytest.mark.parametrize("text", ["tas" + "ked", "s" + WORDS[6], "everyone", "in pieces", "any body"])
def test_other_words_are_allowed(text: str) -> None:
    """A forbidden word inside a longer word does not count."""
    assert forbidden_in(text) == []
