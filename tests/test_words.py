"""The repository's words and sizes: field English in every text, few modules in every folder."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
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

MODULES_BESIDE_FOLDERS = 5
FILES_IN_A_FOLDER = 14

PACKAGES = ("edgemoe", "prefetch", "cache", "storage", "tests", "tools")
FLAT = {"storage": "its modules import each other in layers; a split into folders makes import circles"}
"""Folders without a limit, with the reason."""


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


def test_edgemoe_has_few_modules_beside_its_folders() -> None:
    """The package itself has the entry points only."""
    modules = [path for path in tracked() if re.fullmatch(r"edgemoe/[^/]+\.py", path)]
    assert len(modules) <= MODULES_BESIDE_FOLDERS, modules


def test_folders_of_code_have_few_files() -> None:
    """No folder of code has more than FILES_IN_A_FOLDER source files, folders of FLAT and of data aside."""
    sources = [Path(path) for path in tracked() if Path(path).suffix in {".py", ".c", ".h"}]
    files = Counter(
        str(path.parent)
        for path in sources
        if path.parts[0] in PACKAGES and not path.is_relative_to("tests/data")
    )
    assert {folder: n for folder, n in files.items() if n > FILES_IN_A_FOLDER and folder not in FLAT} == {}
