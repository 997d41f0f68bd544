"""Standard streams that are closed, full or of another encoding: one line of error, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from programs import ROOT, ForkedPython

from edgemoe.console.streams import require_text
from edgemoe.errors import UserError


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of a shell, in which $edgemoe is the program."""
    variables = {"edgemoe": f"{sys.executable} -m edgemoe", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["sh", "-c", command],
        env=os.environ | variables | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("redirection", "reason"),
    [
        (">/dev/full", "No space left on device"),
        (">&-", "a closed one"),
        ("| { exec <&-; sleep 0; }; false", ""),
    ],
)
@pytest.mark.parametrize("words", ["--version", "chat --print-config"])
def test_a_stdout_that_takes_no_output(redirection, reason, words):
    """The program exits 1, and stderr has one line with the reason."""
    done = shell(f"$edgemoe {words} {redirection}")
    assert (done.returncode, "Traceback" in done.stderr, "Exception" in done.stderr) == (1, False, False)
    if reason:
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"edgemoe: expected a stdout that takes output, got {reason}: ")


@pytest.mark.e2e
def test_a_closed_stdin_or_stderr_is_no_fault():
    """A command that needs neither runs."""
    done = shell("$edgemoe --version <&- 2>&-")
    assert (done.returncode, done.stdout.split()[0]) == (0, "edgemoe")


@pytest.mark.e2e
def test_an_encoding_without_a_character():
    """A character that stdout's encoding lacks is a question mark."""
    code = "from edgemoe.console.streams import standard_streams\nwith standard_streams():\n    print('caf\\u00e9')"
    done = shell(f'{sys.executable} -c "$code"', code=code, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout, done.stderr) == (0, "caf?\n", "")


def test_bytes_that_are_no_text_are_refused():
    """The message has the byte and its place."""
    with pytest.raises(UserError, match="byte 0xe9 after 3 characters"):
        require_text(b"caf\xe9".decode(errors="surrogateescape"), "a turn")
    require_text("café 你好 🙂", "a turn")


ENVIRONMENTS = {
    "C": {"PYTHONIOENCODING": "utf-8:surrogateescape"},
    "others": {"PYTHONIOENCODING": "utf-8:strict"},
}
"""Locale -> the variable by which a fork treats bytes of no text as a new Python does in this locale."""


@pytest.mark.e2e
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_a_text_of_another_encoding_is_refused(locale):
    """Latin-1 on stdin is refused in every locale."""
    code = (
        "import sys\nfrom edgemoe.console.streams import require_text, standard_streams\n"
        "with standard_streams():\n    require_text(sys.stdin.readline(), 'a turn')\n"
    )
    read = f"printf 'caf\\351\\n' | {sys.executable} -c \"$code\""
    done = shell(read, code=code, LC_ALL=locale, PYTHONUTF8="0")
    assert (done.returncode, "byte 0xe9 after 3 characters" in done.stderr) == (1, True)


@pytest.mark.e2e
@pytest.mark.parametrize("locale", ENVIRONMENTS)
def test_a_turn_of_another_encoding_exits_2(tiny_store, locale):
    """Latin-1 on a chat's stdin, of which Python keeps the bytes in the C locale, and refuses them in others."""
    pipe, environment = subprocess.PIPE, os.environ | ENVIRONMENTS[locale]
    command = ("-m", "edgemoe", "chat", "--model", tiny_store, "--context", 64)
    with ForkedPython(*command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        out, err = process.communicate(b"caf\xe9\n", 120)
    assert (process.returncode, out, b"Traceback" in err) == (2, b"", False)
    assert b"utf-8 text" in err
