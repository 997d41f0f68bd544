"""The repository's own texts: their paths and commands exist, and no machine has left a trace in them."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import typer

from edgemoe.cli import app

ROOT = Path(__file__).resolve().parents[1]

HOMES = "home|root|Users|tmp|work|workspace|mnt|media|opt|srv|scratch|builds"
MACHINE_PATH = re.compile(rf"(?<![\w.~}}>)*-])/(?:{HOMES})/\w")
"""An absolute path that differs from machine to machine: homes, mounts, scratch."""

ADDRESS = re.compile(r"(?<![\w.])(\d{1,3}(?:\.\d{1,3}){3})(?![\w.])")
UNNESTED = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
"""The environment without make's own variables, as these tests run from make too."""

PUBLIC_ADDRESSES = {"127.0.0.1", "0.0.0.0"}
URL = re.compile(r"\b(?:https?|ssh|git)://[^\s\"'`<>()]+")
PRIVATE_HOST = re.compile(r"^[^.]*$|\.(?:local|internal|lan|corp|home|localdomain)$")


def texts() -> Iterator[tuple[Path, str]]:
    """Every text file of the working tree that git does not ignore, with its contents."""
    rules = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    ignored = [".git", *(rule.rstrip("/") for rule in rules)]

    def kept(names: list[str]) -> list[str]:
        return [n for n in sorted(names) if not any(fnmatch.fnmatch(n, rule) for rule in ignored)]

    for directory, subdirectories, files in os.walk(ROOT):
        subdirectories[:] = kept(subdirectories)
        for path in (Path(directory, name) for name in kept(files)):
            try:
                yield path, path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # not a text


def traces(text: str) -> list[str]:
    """Machine paths, addresses and private hosts that a text names."""
    found = [match[0] for match in MACHINE_PATH.finditer(text)]
    found += [address for address in ADDRESS.findall(text) if address not in PUBLIC_ADDRESSES]
    for url in URL.findall(text):
        host = urlsplit(url).hostname or ""
        if host != "localhost" and PRIVATE_HOST.search(host):
            found.append(url)
    return found


def test_no_text_names_a_machine() -> None:
    """No file names a path or host that exists only on the machine it was written on."""
    seen = dict(texts())
    assert ROOT / "README.md" in seen
    assert Path(__file__) in seen
    wrong = {str(path.relative_to(ROOT)): found for path, text in seen.items() if (found := traces(text))}
    assert wrong == {}


@pytest.mark.parametrize(
    "trace",
    [
        "/<home/me/model",
        "'/<tmp/x'",
        "/<Users/me",
        "10.<1.2.3",
        "http:<//builder/log",
        "https:<//ci.internal/1",
    ],
)
def test_a_trace_is_found(trace: str) -> None:
    """The search finds every kind of trace (written here with a mark, or it would find these)."""
    assert traces(f"as in {trace.replace('<', '')} there") != []


@pytest.mark.parametrize(
    "text",
    [
        "/proc/self/io",
        "docs/home/x",
        "https://pypi.org/simple",
        "http://localhost:8000/tmp/x",
        "2.13.0",
        "4/2",
    ],
)
def test_harmless_text_is_no_trace(text: str) -> None:
    """Paths of every machine, relative paths, public hosts and versions are no traces."""
    assert traces(text) == []


def documents() -> list[Path]:
    """The documents of the repository's root, and every document under docs."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def code_in(markdown: str) -> list[str]:
    """The lines of fenced blocks, and the inline code outside them."""
    fences = re.findall(r"^```[^\n]*\n(.*?)^```", markdown, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```[^\n]*\n.*?^```", "", markdown, flags=re.MULTILINE | re.DOTALL)
    return [line for block in fences for line in block.splitlines()] + re.findall(r"`([^`\n]+)`", prose)


def test_commands_in_the_readme_are_in_the_makefile() -> None:
    """Every `make TARGET` in a document exists, and README has the two that matter."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):(?!=)", makefile, re.MULTILINE))
    commands = {
        path: {
            c
            for line in code_in(path.read_text(encoding="utf-8"))
            for c in re.findall(r"\bmake ([a-z][\w-]*)", line)
        }
        for path in documents()
    }
    assert {"chat", "test"} <= commands[ROOT / "README.md"]
    assert {path.name: named - targets for path, named in commands.items() if named - targets} == {}


@pytest.mark.e2e
def test_make_alone_prints_every_target() -> None:
    """`make` and `make help` print a line for every target that is no file, and install nothing."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    if shutil.which("make") is None:
        pytest.skip("make is missing")
    (phony,) = re.findall(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)
    for words in (["make"], ["make", "help"]):
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, env=UNNESTED)
        assert re.findall(r"^make ([a-z][\w-]*)(?: |$)", done.stdout, re.MULTILINE) == phony.split()
        assert len(done.stdout.splitlines()) == len(phony.split())


@pytest.mark.e2e
@pytest.mark.parametrize(("code", "error"), [(0, ""), (130, ""), (3, "Error 3")])
def test_ctrl_c_out_of_a_chat_is_no_error_of_make(code: int, error: str) -> None:
    """`make chat` ends quietly where the chat ends with 130, and keeps the other errors."""
    if shutil.which("make") is None:
        pytest.skip("make is missing")
    # A shell stands for Python, with Python's arguments as its own.
    words = ["make", "-o", ".venv/.installed", "chat", f"PYTHON=sh -c 'exit {code}' sh"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, env=UNNESTED)
    assert (done.returncode, error in done.stderr) == (2 if error else 0, True)
    assert error or not done.stderr


def test_the_readme_has_the_command_line_as_it_is() -> None:
    """Every command and option of edgemoe that README names exists, and it names every command."""
    command_line = typer.main.get_command(app)
    commands = command_line.commands  # type: ignore[attr-defined]
    options = {name: {o for p in c.params for o in p.opts} | {"--help"} for name, c in commands.items()}
    code = code_in((ROOT / "README.md").read_text(encoding="utf-8"))
    named = [match for line in code if (match := re.search(r"(?:^|/)edgemoe (\w+)(.*)", line))]
    assert {match[1] for match in named} == set(commands)
    wrong = [(m[1], o) for m in named for o in re.findall(r"--[a-z-]+", m[2]) if o not in options[m[1]]]
    wrong += [
        ("", line) for line in code if line.startswith("--") and line not in set().union(*options.values())
    ]
    assert wrong == []


def anchors(markdown: str) -> set[str]:
    """The fragments that a document's headings can be linked by."""
    headings = re.findall(r"^#+ +(.+?) *$", markdown, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: Path) -> list[str]:
    """The relative links of a document that lead to no file of the repository, or to no heading of it."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if urlsplit(link).scheme:
            continue
        name, _, fragment = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        inside = target.is_relative_to(ROOT) and target.exists()
        if not inside or (fragment and fragment not in anchors(target.read_text(encoding="utf-8"))):
            broken.append(link)
    return broken


def test_links_resolve(tmp_path: Path) -> None:
    """Every relative link leads to a file of the repository, and its fragment to a heading there."""
    assert {str(path): broken for path in documents() if (broken := broken_links(path))} == {}
    document = tmp_path / "page.md"
    document.write_text("[a](missing.md) [b](https://example.org)\n")
    assert broken_links(document) == ["missing.md"]


@pytest.mark.parametrize(
    "path",
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_named_paths_exist(path: Path) -> None:
    """Every path of the repository that README and the documents next to it name exists."""
    tops = {entry.name for entry in ROOT.iterdir()}
    named = [
        word for code in code_in(path.read_text(encoding="utf-8")) for word in re.findall(r"[\w./-]+", code)
    ]
    inside = [
        word
        for word in named
        if re.fullmatch(r"[\w./-]+\.(?:py|md|toml)|[\w.-]+/[\w./-]*", word) and word[0] != "/"
    ]
    # `.venv/…` is made by make, and a two-level setting such as 4/2 is no path.
    ours = [
        word for word in inside if word.partition("/")[0] in tops - {".venv"} or word.endswith((".py", ".md"))
    ]
    assert [word for word in ours if not (ROOT / word).exists()] == []


def test_the_readme_is_short() -> None:
    """A newcomer reads README in a few minutes: at most 1,500 words, tables and commands included."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1500


def test_every_decision_has_a_status_and_a_line_in_the_index() -> None:
    """A decision's status stands under its title, and the index links it with the same title."""
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    for path in sorted(folder.glob("[0-9]*.md")):
        title, _, status = path.read_text(encoding="utf-8").splitlines()[:3]
        number, _, name = title.removeprefix("# ").partition(": ")
        assert path.name.startswith(f"{number}-")
        assert status.startswith(("Status: accepted", "Status: superseded by "))
        assert f"| {number} | [{name}]({path.name}) |" in index
