"""The chat in a real terminal: editing, commands, history, Ctrl-C and Ctrl-D; dumb terminals and pipes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess

import pytest
from programs import ForkedPython, run_forked
from terminals import ROOT, Terminal, environment

pytestmark = pytest.mark.e2e

LONG = ("--max-new-tokens", 400, "--context", 512)
"""Options for an answer long enough to be interrupted."""


ANSWER_BEGINS = r"\x1b\[\?2004l(?:\x1b\[[0-9;?]*[A-Za-z]|\s)*[^\s\x1b]"
"""The line editor's last escape sequence and the first character after it."""

COMMANDS = ("help", "clear", "regen", "set", "system", "save", "load", "stats", "mem", "exit")


WATCH_IMPORTS = """
import sys
class Watch:
    opened = False
    def find_spec(self, name, path=None, target=None):
        if name in ("prompt_toolkit", "rich.live", "rich.markdown", "markdown_it") and Watch.opened:
            print("imported late:", name, flush=True)
        if name == "edgemoe.models.store_model":
            print("torch is imported", flush=True)
        module = sys.modules.get("edgemoe.engine.engine")
        if module and not hasattr(module, "watched") and hasattr(module, "Engine"):
            module.watched, begin = True, module.Engine.__init__
            def note(*arguments, **named):
                Watch.opened = True
                print("engine opened", flush=True)
                begin(*arguments, **named)
            module.Engine.__init__ = note
sys.meta_path.insert(0, Watch())
"""
"""A sitecustomize.py that names modules for terminals which are imported once an engine is being opened.

And says when torch has been imported: before edgemoe.models.store_model.
"""


@pytest.fixture
def options(tiny_store):
    """Options of a chat with short, reproducible answers."""
    return ("chat", "--model", tiny_store, "--temperature", 0, "--max-new-tokens", 3, "--context", 256)


def test_a_chat_at_a_terminal(options, tmp_path):
    """One session: the plan, reuse between answers, every command, several lines, completion, Ctrl-D."""
    saved = tmp_path / "talk.json"
    with Terminal(tmp_path, *options, "--levels", "8/4", "--stats") as terminal:
        start = terminal.ready()
        assert "loading torch" in start
        assert re.search(r"loading [^\n]*kB", start)
        assert "limit " in start
        assert "memory limit" in start
        first = terminal.enter("the quick brown fox")
        assert "; 0 of " in first
        second = terminal.enter("and the lazy dog")
        (reused,) = (line for line in second.splitlines() if "prompt tokens were kept" in line)
        assert int(re.search(r"; (\d+) of ", reused)[1]) > 10
        assert "saved 4 messages" in terminal.enter(f"/save {saved}")
        assert re.search("all answers +2, with 6 tokens", terminal.enter("/stats"))
        memory = terminal.enter("/mem")
        assert re.search(r"in memory now +16 of 16 experts: \d+ at 8 bits", memory)
        assert "peak " in memory

        listed = terminal.enter("/he\t")
        assert [name for name in COMMANDS if f"  /{name} " not in listed] == []
        assert "set: levels 8/4, retention 0.9" in terminal.enter("/set retent\t0.9")
        assert "retention       0.9" in terminal.enter("/set")
        assert "id you mean /set?" in terminal.enter("/sett levels 8")
        assert "above 0, at most 1" in terminal.enter("/set retention 2")
        assert "system message set" in terminal.enter("/system be brief")
        assert "be brief" in terminal.enter("/system")

        again = terminal.enter("/regen")
        assert "at temperature 0 the answer stays the same" in again
        assert "first token" in again
        assert "cleared" in terminal.enter("/clear")
        assert "nothing has been answered yet" in terminal.enter("/regen")
        assert "loaded 4 messages" in terminal.enter(f"/load {saved}")
        terminal.process.send('"""the fox\r')
        terminal.until(r"\.\.\.")
        assert "first token" in terminal.enter('/help"""')
        assert "saved 6 messages" in terminal.enter(f"/save {saved}")
        refused = terminal.enter("word " * 300)
        assert re.search(r"edgemoe: .*\b256\b", refused)
        assert "/clear removes all turns" in refused
        terminal.process.sendcontrol("d")
        assert terminal.end()[0] == 0
    roles = [(m["role"], m["content"]) for m in json.loads(saved.read_text())["messages"]]
    assert roles[0] == ("user", "the quick brown fox")
    assert roles[4] == ("user", "the fox\n/help")


def test_the_first_screen_of_the_demo(tmp_path, demo_cache):
    """Without --model a terminal shows the demo's name, how little it knows, three examples and /help."""
    with Terminal(tmp_path, "chat", XDG_CACHE_HOME=str(demo_cache)) as terminal:
        start = terminal.ready()
        screen = start[start.index("edgemoe demo") :].splitlines()
        assert "knows only a few things" in screen[0]
        assert [line[:2] for line in screen[1:4]] == ["  "] * 3
        assert screen[4].startswith("/help")
        assert "The capital of France is Paris." in terminal.enter(screen[1].strip())
        assert "g-a-r-d-e-n" in terminal.enter(screen[2].strip())
        assert "17 + 25 = 42" in terminal.enter(screen[3].strip())
        terminal.process.sendcontrol("d")
        assert terminal.end()[0] == 0


def test_a_terminals_editor_is_no_part_of_the_models_memory(tmp_path, demo_cache):
    """With Markdown too: the modules that draw a terminal take 5 MB and more, and the plan of the demo leaves less."""
    options = ("--vram-limit", "27MB", "-c", 192, "--markdown")
    # Nothing that draws a terminal has been imported by the process that is forked.
    with Terminal(tmp_path, "chat", *options, XDG_CACHE_HOME=str(demo_cache)) as terminal:
        terminal.ready()
        terminal.enter("What is the capital of France?")
        peak = re.search(r"peak +([0-9.]+) MB of 27 MB", terminal.enter("/mem"))
        assert peak is not None
        assert float(peak[1]) < 25


def test_what_draws_an_answer_is_imported_before_the_model(tmp_path, tiny_store):
    """With one prompt at a terminal neither prompt_toolkit nor Markdown is imported once an engine is being opened.

    The line that says that torch is loaded is shown while it is. test_answer_text has the imports without Markdown.
    """
    (tmp_path / "sitecustomize.py").write_text(WATCH_IMPORTS)
    options = ("-p", "the fox", "-n", 3, "-c", 64, "--markdown")
    watched = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    with Terminal(tmp_path, "chat", "--model", tiny_store, *options, forked=False, **watched) as terminal:
        code, shown = terminal.end()
    assert (code, "engine opened" in shown) == (0, True)
    assert "imported late" not in shown
    assert shown.index("loading torch") < shown.index("torch is imported")


def test_several_lines_and_other_programs_commands(options, tmp_path):
    """Alt-Enter and a trailing backslash make lines, /? and /bye are obeyed, and --continue goes on.

    A model without an introduction is named as on the command line.
    """
    with Terminal(tmp_path, *options) as terminal:
        assert f"{options[2]}\r\n/help" in terminal.ready()
        assert "/regen" in terminal.enter("/?")
        assert "first after" in terminal.enter("one\x1b\rtwo")
        terminal.process.send("three\\\r")
        terminal.until(r"\.\.\.")
        assert "first after" in terminal.enter("four")
        terminal.process.send("/bye\r")
        assert terminal.end()[0] == 0
    again = ("-m", "edgemoe", *options, "--continue", "--json")
    done = run_forked(*again, env=environment(tmp_path), input="five\n")
    assert (done.returncode, json.loads(done.stdout)["new_tokens"]) == (0, 3)
    kept = json.loads((tmp_path / "state" / "edgemoe" / "last-conversation.json").read_text())
    assert [m["content"] for m in kept["messages"][::2]] == ["one\ntwo", "three\nfour", "five"]


def test_history_and_ctrl_c(options, tmp_path):
    """Ctrl-C cancels an answer, empties a line, and exits 130 at an empty prompt; history is kept."""
    with Terminal(tmp_path, *options, *LONG) as terminal:
        terminal.ready()
        terminal.process.send("cancelled at once\r\x03")
        assert "(cancelled" in terminal.ready()
        terminal.process.send("the quick brown fox\r")
        terminal.until(ANSWER_BEGINS)
        terminal.process.sendcontrol("c")
        assert "(cancelled" in terminal.ready()
        terminal.process.send("half a line")
        terminal.until("half a line")
        terminal.process.sendcontrol("c")
        assert "max-new-tokens  400" in terminal.enter("/set")
        assert "set: max-new-tokens 2" in terminal.enter("/set max-new-tokens 2")
        assert "2 tokens at" in terminal.enter("/regen")
        assert re.search("all answers +1, with 2 tokens", terminal.enter("/stats"))
        terminal.process.send("\x12quick")
        terminal.until("i-search.*quick")
        terminal.process.sendcontrol("c")
        assert re.search("all answers +1, with 2 tokens", terminal.enter("/stats"))
        terminal.process.sendcontrol("c")
        code, end = terminal.end()
        assert (code, "interrupted" in end, "Traceback" in terminal.output) == (130, True, False)
    with Terminal(tmp_path, *options, NO_COLOR="1") as terminal:
        terminal.ready()
        typed_since = ("/set", "/set max-new-tokens 2", "/regen", "/stats")
        assert "the quick brown fox" in terminal.enter("\x1b[A" * (len(typed_since) + 1))
        assert "first after" in terminal.output
        terminal.process.send("/exit\r")
        assert terminal.end()[0] == 0
        assert set(re.findall(r"\x1b\[([0-9;]*)m", terminal.output)) <= {"0", ""}


def test_a_dumb_terminal(options, tmp_path):
    """TERM=dumb: plain prompts and answers without an escape byte; commands and quotes work."""
    with Terminal(tmp_path, *options, ready="(> |[.][.][.] )$", TERM="dumb") as terminal:
        terminal.ready()
        assert "first after" in terminal.enter("the fox")
        assert terminal.enter('"""two').endswith("... ")
        assert "first after" in terminal.enter('lines"""')
        assert "id you mean /save?" in terminal.enter("/sav x")
        terminal.process.sendcontrol("c")
        assert terminal.end()[0] == 130
        assert "\x1b" not in terminal.output


def test_a_pipe(options, tmp_path):
    """stdout has answers only, without introduction, prompts or escapes; exit ends the chat, Ctrl-C exits 130."""
    turns = 'the fox\n/stats\n"""the\ndog"""\nexit\nnever read\n'
    done = run_forked("-m", "edgemoe", *options, env=environment(tmp_path), input=turns)
    assert (done.returncode, "\x1b" in done.stdout + done.stderr) == (0, False)
    assert done.stderr.count(", first after ") == 2
    assert re.search("all answers +1, with 3 tokens", done.stderr)
    assert "first after" not in done.stdout
    assert "> " not in done.stdout
    assert "/help" not in done.stdout + done.stderr
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = ("-m", "edgemoe", *options, *LONG)
    with ForkedPython(
        *command, env=environment(tmp_path), bufsize=0, start_new_session=True, **pipes
    ) as process:
        process.stdin.write(b"the fox\n")
        assert process.stdout.read(1), process.stderr.read().decode()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert err.decode().splitlines()[-1] == "edgemoe: interrupted"


@pytest.mark.parametrize(
    ("dram", "limit"),
    [pytest.param((), 12, marks=pytest.mark.folders), (("--dram-limit", "2MB"), 14)],
    ids=["one", "two tiers"],
)
def test_what_is_typed_and_pasted_is_no_part_of_the_peak(tiny_store, tmp_path, dram, limit):
    """Lines of 100 KB that are pasted and removed again add nothing; the limits of both tiers count together."""
    options = ("chat", "--model", tiny_store, "-n", 3, "-c", 1024, "--vram-limit", "12MB", *dram)
    with Terminal(tmp_path, *options) as terminal:
        terminal.ready()
        terminal.enter("the fox")  # a kernel may take memory that it keeps at first
        peaks = [terminal.enter("the fox")]
        for _ in range(2):
            terminal.process.send("\x1b[200~" + "lazy dog " * 12_000 + "\x1b[201~")
            peaks.append(terminal.enter("\x15the fox"))
    first, *_, last = (re.search(rf"([\d.]+) of {limit} MB", each) for each in peaks)
    assert first
    assert last
    assert abs(float(last[1]) - float(first[1])) < 1.5, peaks
