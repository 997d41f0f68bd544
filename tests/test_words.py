"""The repository's words: field English in every text, and texts and names that need no decoding."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import wording

ROOT = Path(__file__).resolve().parents[1]

# Joined from parts, so that this file does not contain the words that it looks for.
PERSONS = ["no" + "body", "some" + "body", "who" + "ever", "every" + "body", "any" + "body"]
WORDS = [*PERSONS, "as" + "ked", "to" + "ld", "in " + "peace"]
FORBIDDEN = re.compile(rf"(?<![A-Za-z])(?:{'|'.join(WORDS)})(?![A-Za-z])", re.IGNORECASE)
"""Words for persons that do not describe programs, also as a part of an identifier between underscores or digits."""

REPORT_NAMES = re.compile(rf"[vd]ram_limit_{WORDS[5]}_bytes")
"""Fields of `bench --json`, whose names never change."""


PACKAGES = ("edgemoe", "storage", "prefetch", "cache", "tools", "tests")

EXEMPT = ("tests/support/wording.py", "tests/test_words.py")
"""Files that contain the patterns as patterns."""

MOST_PLACES = 48
"""Most places of patterns in all packages together: what is left are ordinary uses of these words."""


MOST_IN_DOCUMENTS = 10
"""Most places in documents, except the changelog, decisions and benchmarks, which say what was true on a day."""


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


def package_of(path: str) -> str:
    """The folder under which a file is counted, such as storage or edgemoe/kv."""
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] in ("edgemoe", "tests") and len(parts) > 2 else parts[0]


@pytest.mark.e2e
def test_texts_and_names_need_no_decoding() -> None:
    """The patterns of tests/support/wording.py are rare in comments, docstrings, messages and names."""
    counts, listed = Counter[str](), []
    for path in tracked():
        if path.startswith(PACKAGES) and path.endswith((".py", ".c", ".h")) and path not in EXEMPT:
            for place in wording.places(path, (ROOT / path).read_text(encoding="utf-8")):
                counts[package_of(path)] += 1
                listed.append(f"{path}:{place.line}: {place.kind}")
    assert counts.total() <= MOST_PLACES, "\n".join([f"{dict(counts)}", *listed])


@pytest.mark.e2e
def test_documents_need_no_decoding() -> None:
    """The patterns that prose can have are rare in documents for readers of today."""
    dated = ("CHANGELOG.md", "docs/decisions/", "docs/benchmarks/", "tests/data/")
    listed = []
    for path in tracked():
        if path.endswith(".md") and not path.startswith(dated):
            places = wording.places(path, (ROOT / path).read_text(encoding="utf-8"))
            listed += [f"{path}:{place.line}: {place.kind}" for place in places]
    assert len(listed) <= MOST_IN_DOCUMENTS, "\n".join(listed)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ('    """Loads.\n\n    Args:\n        engine: of the conversation.\n    """\n', ["argument"]),
        ('    """Loads.\n\n    Args:\n        engine: the engine.\n    """\n', []),
        ('"""What a file has."""\n', ["first line"]),
        ('"""Reads the blocks, and those of others."""\n', ["pronoun", "first line"]),
        ('"""A store whose layers have experts."""\n', []),
        ("# 5 bits a weight, one file a layer\n", ["per", "per"]),
        ("# reads a layer, and counts a token\n", []),
        ("# bytes behind the last token\n", ["aside"]),
        ("# its bits are those of a row alone\n", ["pronoun"]),
        ("def read(path: str, wanted: int) -> None:\n", ["name"]),
        (
            "def read(\n    chosen: int,\n    *,\n    of: str = format(1),\n    kept: int = 0,\n) -> None:\n",
            ["name"] * 2,
        ),
        ("        self.size, self.found = 1, 2\n", ["name"]),
        ("\nclass Room:\n    used: int\n", ["name"]),
        ("\ndef read() -> None:\n    used: int = 0\n", []),
        ("        wanted = read(kept)\n", []),
    ],
)
def test_each_pattern_is_found(text: str, kinds: list[str]) -> None:
    """A pattern is found where a reader meets it, and nowhere else."""
    assert [place.kind for place in wording.places("file.py", text)] == kinds
