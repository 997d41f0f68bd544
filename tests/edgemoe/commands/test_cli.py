"""The command line: its output, its exit codes, and the modules it loads."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from programs import ForkedPython, run_forked
from safetensors.torch import load_file
from small_store import flip

from edgemoe import __version__
from edgemoe.chat import transcript
from edgemoe.console.sizes import format_least, format_size, parse_size
from edgemoe.kernels.native import library as native
from edgemoe.models.heat import NAME as HEAT
from edgemoe.storage.record.planes import dequantize, quantize
from edgemoe.storage.store.manifest import MANIFEST_NAME, Manifest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = (
    "chat",
    "serve",
    "convert",
    "compensate",
    "inspect",
    "verify",
    "plan",
    "models",
    "rm",
    "doctor",
    "bench",
    "eval",
)
HEAVY = {
    "torch",
    "transformers",
    "numpy",
    "prompt_toolkit",
    "huggingface_hub",
    "matplotlib",
    "rich",
    "jinja2",
}
ANSWER = {
    "text",
    "prompt_tokens",
    "cached_tokens",
    "new_tokens",
    "ttft_s",
    "tpot_s",
    "hit_rate",
    "ssd_bytes_per_token",
    "levels",
    "peak_vram_bytes",
    "vram_limit_bytes",
    "finish_reason",
    "stop_string",
}
PLAN = (
    "vram_limit_bytes",
    "dense_bytes",
    "kv_bytes",
    "workspace_bytes",
    "long_step_bytes",
    "staging_bytes",
    "plane_bytes",
    "minimum_vram_bytes",
)


def edgemoe(cache: Path, *arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Runs edgemoe in a new process, with its cached stores in `cache`."""
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    return run_forked("-m", "edgemoe", *arguments, env=environment, input=stdin)


def test_samplers_of_an_answer(run, tiny_store):
    """One token kept is greedy, a stop text ends an answer and is no part of it, and -n -1 goes on to the context."""
    options = ("chat", "-m", tiny_store, "-p", "the fox", "-c", 64, "--json")
    greedy = json.loads(run(*options, "-n", -1, "--temperature", 0)[1])
    assert greedy["finish_reason"] == "context"
    assert json.loads(run(*options, "-n", 0, "--temperature", 1, "--top-k", 1)[1])["text"] == greedy["text"]
    assert json.loads(run(*options, "-n", -1, "--temperature", 1, "--min-p", 1)[1])["text"] == greedy["text"]
    word = greedy["text"].split()[3]
    stopped = json.loads(run(*options, "-n", -1, "--temperature", 0, "--stop", "\0never", "--stop", word)[1])
    assert (stopped["text"], stopped["finish_reason"]) == (greedy["text"].partition(word)[0], "stop")
    assert (stopped["stop_string"], greedy["stop_string"]) == (word, None)
    other = json.loads(run(*options, "-n", -1, "--temperature", 0, "--repeat-penalty", 100)[1])
    assert len(set(other["tokens"])) == len(other["tokens"])
    assert len(set(greedy["tokens"])) < len(greedy["tokens"])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--temperature", 0, "--top-k", 5), "a temperature above 0 for --top-k 5"),
        (("--temperature", 0, "--min-p", 0.1), "a temperature above 0 for --min-p 0.1"),
        (("--stop", ""), "stop strings of a character or more"),
        (("--reasoning", "hide"), "one of dim, fold, show for --reasoning"),
    ],
)
def test_wrong_choices_of_an_answer_are_refused(run, tiny_store, wrong, said):
    """Before the model is loaded, with exit 2."""
    code, _, err = run("chat", "-m", tiny_store, "-p", "the fox", *wrong)
    assert (code, said in err, "loading" in err) == (2, True, False)


def test_an_answer_goes_on_until_the_context_is_full(run, tiny_store):
    """Without --max-new-tokens no number of tokens cuts an answer; it is 512 tokens and more where the context is."""
    ask = ("chat", "-m", tiny_store, "-p", "the fox", "-c", 600, "--temperature", 0, "--json")
    answer = json.loads(run(*ask)[1])
    assert answer["finish_reason"] == "context"
    assert answer["new_tokens"] + answer["prompt_tokens"] == 601  # the last one has no keys and values
    assert answer["new_tokens"] > 512


def test_short_options_and_threads(tiny_store):
    """-m -p -n -c -t are the long names' options, and the kernels compute with the threads that -t names."""
    words = [
        "edgemoe",
        "chat",
        "-m",
        str(tiny_store),
        "-p",
        "the fox",
        "-n",
        "2",
        "-c",
        "64",
        "-t",
        "3",
        "--json",
    ]
    code = (
        f"import sys\nfrom edgemoe.cli import main\nsys.argv = {words}\nassert main() == 0\n"
        "import torch\nfrom edgemoe.kernels.native import library\n"
        "print(torch.get_num_threads(), library.thread_count())\n"
    )
    done = run_forked("-c", code)
    answer, threads = done.stdout.splitlines()
    assert (json.loads(answer)["new_tokens"], threads) == (2, "3 3")


def test_a_kernel_is_forced_without_a_change_of_answer(run, tiny_store):
    """AVX2 gives the answer of the fastest paths; a name that is not here exits 2 and says which are."""
    if not native.available():
        pytest.skip("no compiled kernel on this machine")
    ask = "chat", "-m", tiny_store, "-p", "the fox", "-n", "4", "--temperature", "0"
    answers = [run(*ask, "--json", "--kernel", name) for name in ("auto", "avx2", "auto")]
    assert [code for code, _, _ in answers] == [0, 0, 0]
    assert len({json.loads(out)["text"] for _, out, _ in answers}) == 1
    code, _, err = run(*ask, "--kernel", "avx9")
    assert (code, "expected one of auto, avx2" in err) == (2, True)


@pytest.mark.parametrize(
    ("word", "action"),
    [("run", "`edgemoe chat MODEL` runs a model"), ("cht", "did you mean chat?")],
)
def test_an_unknown_command_names_one_that_exists(run, word, action):
    """Programs like this one have `run`; a word that is close to a command's name is taken for it."""
    code, _, err = run(word, "demo")
    assert (code, f"got '{word}': {action}" in err) == (2, True)


def test_version_and_short_help(run):
    """--version prints the package's version; -h is --help, for each command too."""
    assert run("--version") == (0, f"edgemoe {__version__}\n", "")
    assert run("-h") == run("--help")
    assert run("bench", "-h") == run("bench", "--help")


def test_a_context_beyond_training_gives_a_warning(run, tiny_store, caplog):
    """The warning names both numbers; the model's own maximum gives none."""
    assert run("plan", "-m", tiny_store, "-c", 513)[0] == 0
    assert "--context 513 is more than the 512 tokens" in caplog.text
    caplog.clear()
    assert run("plan", "-m", tiny_store, "-c", 512)[0] == 0
    assert caplog.text == ""


@pytest.fixture
def copied(checkpoint, tmp_path) -> Path:
    """A copy of the checkpoint, for tests that change it."""
    return Path(shutil.copytree(checkpoint, tmp_path / "model"))


def edit_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_chat_converts_a_checkpoint_once(checkpoint, tmp_path):
    """The first use converts and the second does not; a prompt gives one answer, piped lines are turns of one chat."""
    common = ("chat", "--model", checkpoint, "--json", "--max-new-tokens", 4, "--temperature", 0)
    common = (*common, "--plain-codes")
    first = edgemoe(tmp_path, *common, "--prompt", "the quick brown fox")
    assert (first.returncode, "converting" in first.stderr) == (0, True)
    (store,) = (path.parent for path in tmp_path.rglob(MANIFEST_NAME))
    made = {path: path.stat().st_mtime_ns for path in store.iterdir() if path.name != HEAT}
    (line,) = first.stdout.splitlines()
    answer = json.loads(line)
    assert set(answer) >= ANSWER
    assert answer["new_tokens"] == 4
    assert set(answer["levels"]) == {"8", "4", "2", "0"}
    assert set(answer["hit_rate"]) == {"vram", "dram"}
    assert answer["peak_vram_bytes"] > 0

    second = edgemoe(
        tmp_path,
        *common,
        "--levels",
        "8",
        "--vram-limit",
        "4MB",
        stdin="the quick brown fox\n\nand the lazy dog\n",
    )
    assert (second.returncode, "converting" in second.stderr) == (0, False)
    assert made.items() <= {path: path.stat().st_mtime_ns for path in store.iterdir()}.items()
    turns = [json.loads(line) for line in second.stdout.splitlines()]
    assert [turn["vram_limit_bytes"] for turn in turns] == [4_000_000] * 2
    assert (turns[0]["text"], turns[0]["cached_tokens"]) == (answer["text"], 0)
    assert turns[1]["cached_tokens"] >= turns[0]["prompt_tokens"]


def test_chat_for_people(run, tiny_store):
    """stdout has the answer only; stderr has the plan and the cost of the answer."""
    ask = ("chat", "--model", tiny_store, "--prompt", "the fox", "--max-new-tokens", 3, "--context", 64)
    code, out, err = run(*ask)
    answer = json.loads(run(*ask, "--json")[1])
    assert (code, out) == (0, answer["text"] + "\n")
    assert "all 16 experts fit at 8 bits" in err
    assert re.search(
        r"^3 tokens at [\d.]+ tok/s, first after [\d.]+ s · experts: \d+ % from memory", err, re.M
    )
    assert "8.5 bits per weight · memory " in err
    assert "cut at 3 tokens (--max-new-tokens)\n" in err
    _, _, err = run(*ask, "--stats")
    assert "first token      after" in err
    assert f"in all {format_size(answer['bytes_read']['ssd'])} from disk" in err


def test_model_and_prompt_need_no_option(run, tiny_store):
    """`edgemoe chat MODEL PROMPT` is the same as with --model and --prompt; neither may be given twice.

    Every command with --model takes the model so.
    """
    assert run("plan", tiny_store)[1] == run("plan", "--model", tiny_store)[1]
    more = ("--max-new-tokens", 3, "--context", 64, "--temperature", 0)
    named = run("chat", "--model", tiny_store, "--prompt", "the fox", *more)[1]
    assert run("chat", tiny_store, "the fox", *more)[:2] == (0, named)
    for words, message in (
        ((tiny_store, "--model", tiny_store), "one model"),
        ((tiny_store, "the fox", "-p", "x"), "one prompt"),
        (
            ("the fox",),
            "a model as the first argument, got 'the fox': for a prompt, write edgemoe chat demo 'the fox'",
        ),
    ):
        code, out, err = run("chat", *words)
        assert (code, out, message in err) == (2, "", True)


def test_chat_at_scheduled_levels(tiny_store, tmp_path):
    """4/0 skips experts and reports their number; /set changes the levels of later turns and is no turn itself."""
    turns = "the quick brown fox\n/set levels 4\nand the lazy dog\n/set levels 4/2\n/set retention 0.5\nonce more\n"
    done = edgemoe(
        tmp_path,
        *("chat", "--model", tiny_store, "--json", "--max-new-tokens", 3, "--temperature", 0),
        *("--levels", "4/0", "--retention", "0.75"),
        stdin=turns,
    )
    assert done.returncode == 0
    skipping, whole, mixed = (json.loads(line) for line in done.stdout.splitlines())
    assert skipping["levels"]["0"] > 0
    assert 0 < skipping["effective_retention"] < 1
    assert skipping["bytes_read"]["ssd"] > 0
    assert (whole["levels"]["0"], whole["effective_retention"]) == (0, 1)
    assert mixed["effective_retention"] < 1
    assert mixed["reused"] > 0
    assert [line for line in done.stderr.splitlines() if line.startswith("set: ")] == [
        "set: levels 4",
        "set: levels 4/2, retention 0.75",
        "set: levels 4/2, retention 0.5",
    ]


def test_streamed_json(run, tiny_store):
    """A line for each piece of text comes before the answer's; together they are its text."""
    ask = ("chat", "-m", tiny_store, "-p", "the fox", "-n", 8, "-c", 64, "--temperature", 0, "--json")
    *pieces, answer = map(json.loads, run(*ask, "--stream")[1].splitlines())
    assert {*map(tuple, pieces)} == {("delta",)}
    assert "".join(piece["delta"] for piece in pieces) == answer["text"]
    assert json.loads(run(*ask)[1])["text"] == answer["text"]


def test_continue(run, tiny_store, monkeypatch, tmp_path):
    """The last conversation of --continue goes on; without one the command is refused."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.with_name("cache")))
    ask = ("chat", "-m", tiny_store, "-p", "the fox", "-n", 3, "-c", 128, "--json")
    code, out, err = run(*ask, "--continue")
    assert (code, out, "a conversation to continue, got none" in err) == (2, "", True)
    assert run(*ask)[0] == 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "edgemoe").mkdir()
    messages = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three"}]
    transcript.save(tmp_path / "edgemoe" / "last-conversation.json", messages)
    alone, after = (json.loads(run(*ask, *more)[1]) for more in ((), ("--continue",)))
    assert after["prompt_tokens"] > alone["prompt_tokens"]
    kept = transcript.load(tmp_path / "edgemoe" / "last-conversation.json")
    assert [*kept[:2], kept[2]["content"], kept[3]["content"]] == [*messages, "the fox", after["text"]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--stream", "-p", "x"), "--json with --stream"),
        (("--file", "README.md"), "a prompt for --file"),
        (("--file", "no-such-file", "-p", "x"), "no such file"),
    ],
)
def test_options_that_need_another_exit_2(run, options, message):
    """They are refused before the model is looked up."""
    code, out, err = run("chat", "-m", "there-is-none", *options)
    assert (code, out, message in err) == (2, "", True)


@pytest.mark.parametrize("words", ["levels 8/4", "levels two", "retention 2", "temper 1", "levels"])
def test_a_wrong_set_exits_2_in_a_pipe(run, tiny_store, words):
    """A wrong setting ends a piped chat with the reason: a script must not continue with other settings."""
    options = ("--model", tiny_store, "--levels", "4/2", "--retention", 0.75)
    code, out, err = run("chat", *options, stdin=f"/set {words}\n")
    assert (code, out) == (2, "")
    assert "edgemoe: " in err.splitlines()[-1]


def test_a_slash_begins_a_command_or_a_turn(run, tiny_store):
    """A setting without effect and an unknown command end the chat; a leading space, quotes or a path make a turn."""
    small = ("chat", "--model", tiny_store, "--context", 64)
    code, _, err = run(*small, stdin="/set retention 0.9\n")
    assert (code, "one level for all, 8" in err) == (2, True)
    code, out, err = run(*small, stdin="/settle the matter\n")
    assert (code, out, "id you mean /set?" in err) == (2, "", True)
    turns = ' /settle the matter\n"""/set it"""\n/etc/passwd\n'
    code, out, err = run(*small, "--context", 128, "--max-new-tokens", 2, "--json", stdin=turns)
    assert (code, "set: " in err) == (0, False)
    assert [json.loads(line)["new_tokens"] for line in out.splitlines()] == [2, 2, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prompt", "/set levels 4"), "is a command of the interactive chat"),
        (("--prompt", "x", "--temperature", 0, "--top-p", 0.5), "temperature 0, where there is no choice"),
    ],
)
def test_a_chat_option_without_effect_exits_2(run, tiny_store, options, message):
    """A slash command as the only prompt, and top-p at temperature 0."""
    code, out, err = run("chat", "--model", tiny_store, "--context", 64, *options)
    assert (code, out) == (2, "")
    assert message in err


def test_unclosed_quotes_exit_2_in_a_pipe(run, tiny_store):
    """An incomplete turn is not answered."""
    code, out, err = run("chat", "--model", tiny_store, "--context", 64, stdin='"""half a\nturn\n')
    assert (code, out, "the end of the input inside the turn" in err) == (2, "", True)


def test_a_closed_pipe_ends_the_program(tiny_store):
    """Writing to a closed stdout exits 1 without a traceback."""
    command = ("-m", "edgemoe", "chat", "--model", tiny_store, "--context", 128, "--prompt", "x")
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with ForkedPython(*command, text=True, **pipes) as process:
        process.stdout.close()
        process.stdout = None
        _, err = process.communicate(timeout=120)
    assert (process.returncode, "Traceback" in err, "Exception" in err) == (1, False, False)


@pytest.mark.parametrize("command", ["chat", "bench"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--levels", ""), "''"),
        (("--bits", "3.5", "--retention", "0.75"), "--retention 0.75 and --bits 3.5"),
        (("--exact", "4", "--bits", "3.5"), "two or more levels for --bits 3.5"),
        (("--levels", "4/2", "--bits", "5"), "mean bits per weight above 2.5, at most 4.5"),
    ],
)
def test_an_option_without_effect_exits_2(run, command, options, message):
    """It is refused before the model is opened."""
    code, out, err = run(command, "--model", "there-is-none", *options)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("bench", "--lynx"), "several sequences at once, for --lynx, got one: give --batch 8"),
        (("bench", "--lynx-beta", "3"), "--lynx for --lynx-beta"),
        (("bench", "--lynx", "--lynx-alpha", "0"), "above 0 for --lynx-alpha"),
        (
            ("serve", "--study", "lynx=on"),
            "several sequences at once, for --lynx, got one: give --parallel 8",
        ),
        (("plan", "--study", "lynx=on"), "several sequences at once, for --lynx, got one: give --parallel 8"),
        (("chat", "--study", "lynx=on"), "several sequences at once, for --lynx, got one: leave --lynx out"),
    ],
)
def test_agreeing_on_experts_without_effect_exits_2(run, options, message):
    """Where one sequence runs at a time, and options of --lynx without it or out of range."""
    command, *given = options
    code, out, err = run(command, "--model", "there-is-none", *given)
    assert (code, out) == (2, "")
    assert message in err


def test_bench_alone_lists_lynx(run):
    """Fewer bits are better at equal bytes, so serve takes --lynx and its two others by --study, as chat does."""
    listing = {command for command in COMMANDS if "--lynx" in run(command, "--help-all")[1]}
    assert listing == {"bench"}
    for name in ("lynx", "lynx-alpha", "lynx-beta"):
        code, out, err = run("serve", "--model", "there-is-none", f"--{name}", "3")
        assert (code, out) == (2, "")
        assert f"write --study {name}=VALUE" in " ".join(err.split())


def test_help_loads_no_heavy_package():
    """--help of edgemoe and of every command exits 0 and imports none of the packages that take long."""
    code = (
        "import sys\nfrom edgemoe.cli import main\n"
        f"for words in [[], *([c] for c in {COMMANDS})]:\n"
        "    sys.argv = ['edgemoe', *words, '--help']\n"
        "    assert main() == 0, words\n"
        f"assert not {HEAVY} & set(sys.modules), {HEAVY} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("Usage: edgemoe") == 1 + len(COMMANDS)
    for command in COMMANDS:
        assert f"Usage: edgemoe {command} " in done.stdout


def test_a_process_exits_with_the_code_of_main(tmp_path):
    """An error is one line on stderr, without a traceback."""
    done = edgemoe(tmp_path, "plan", "--model", tmp_path / "none")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("edgemoe: ")
    assert str(tmp_path / "none") in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--vram-limit", "12 potatoes"), "12 potatoes"),
        (("--vram-limit", "0"), "'0'"),
        (("--dram-limit", "-1GB"), "-1GB"),
        (("--exact", "3"), "8, 4 or 2 bits for --exact"),
        (("--exact", "4", "--levels", "4/2"), "--exact 4 and --levels 4/2"),
        (("--levels", "2/4"), "'2/4'"),
        (("--levels", "4/2", "--retention", "1.2"), "1.2"),
        (("--retention", "0.75"), "one level for all"),
        (("--context", "1"), "--context"),
        (("-c", "1"), "--context"),
        (("--no-such-option",), "no-such-option"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "chat", "bench"])
def test_a_wrong_option_exits_2(run, tiny_store, command, options, message):
    """stdout stays empty, and stderr has the wrong value."""
    code, out, err = run(command, "--model", tiny_store, *options)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("command", ["plan", "chat", "bench"])
def test_a_limit_too_small_exits_3(run, tiny_store, command):
    """The smallest limit that works is in the message, and works."""
    common = ("--model", tiny_store, "--context", 64)
    # A benchmark needs its prompt and its new tokens to fit the context.
    fitting = ("--prompt-tokens", 32, "--new-tokens", 32) if command == "bench" else ()
    code, out, err = run(command, *common, *fitting, "--vram-limit", "1KB")
    least = json.loads(run("plan", *common, "--json")[1])["minimum_vram_bytes"]
    assert (code, out) == (3, "")
    named = re.search(r"expected --vram-limit (\S+) or more .*: use --vram-limit \1( or |$)", err)
    assert least <= parse_size(named[1]) < 1.01 * least
    for enough in (named[1], least):
        assert run("plan", *common, "--vram-limit", enough)[0] == 0
    assert run("plan", *common, "--vram-limit", least - 1)[0] == 3


@pytest.mark.parametrize("limit", [(), ("--vram-limit", "5MB", "--dram-limit", "100KB")])
def test_plan(run, tiny_store, limit):
    """One line of JSON with every field; the parts add up to at most the limit."""
    code, out, _ = run("plan", "--model", tiny_store, *limit, "--json")
    made = json.loads(out)
    assert (code, out.count("\n")) == (0, 1)
    assert all(type(made[name]) is int for name in PLAN)
    assert set(made["experts_resident"]) == {"8", "4", "2"}
    parts = sum(
        made[f"{part}_bytes"] for part in ("dense", "kv", "workspace", "long_step", "staging", "plane")
    )
    assert 0 < parts <= made["vram_limit_bytes"]
    if limit:
        assert (made["vram_limit_bytes"], made["dram_limit_bytes"]) == (5_000_000, 100_000)
    slow, fast = made["expected"]["tok_s"]
    assert 0 < slow < fast < made["expected"]["bound_tok_s"][1]
    text = run("plan", "--model", tiny_store, *limit)[1]
    assert "tokens per second, an estimate with rates that" in " ".join(text.split())
    assert f"smallest limit   --vram-limit {format_least(made['minimum_vram_bytes'])}\n" in text


def test_convert_inspect_verify(run, checkpoint, tmp_path):
    """convert prints the same description as inspect, and verify finds no damage."""
    store = tmp_path / "store"
    code, out, err = run("convert", checkpoint, store, "--max-level", 4, "--dense-bits", 8, "--json")
    assert (code, "converting" in err) == (0, True)
    made = json.loads(out)
    assert (made["experts"], made["max_level"], made["dense_bits"]) == (16, 4, 8)
    code, out, _ = run("inspect", store, "--json")
    assert (code, json.loads(out)) == (0, made)
    code, out, _ = run("inspect", store)
    assert code == 0
    for name in made.keys() - {"codes_by_layer"}:
        assert f"{name.replace('_bytes', ' on disk').replace('_', ' ')}  " in out
    assert f"expert on disk  {format_size(made['expert_bytes'])}\n" in out
    assert "gate_up 64 × 64, down 64 × 32" in out
    assert re.search(r"gate_up +\| 4 +\| 64 ", out)
    code, out, _ = run("verify", store, "--json")
    assert code == 0
    report = json.loads(out)
    assert (report["ok"], report["damage"]) == (True, [])
    assert report["bytes"] > made["expert_bytes"] > 0
    again, _, err = run("convert", checkpoint, store, "--max-level", 4, "--dense-bits", 8)
    assert (again, "converting" in err) == (0, False)
    code, _, err = run("plan", "--model", store, "--exact", 8)
    assert (code, "--max-level" in err) == (2, True)


def test_dense_weights_of_4_bits_are_planned_and_exported(run, checkpoint, tmp_path):
    """The description and the plan have their bytes, verify reads them, and an export has their numbers in bf16."""
    found = {}
    for bits in ("8", "4"):
        code, out, _ = run("convert", checkpoint, tmp_path / bits, "--dense-bits", bits, "--json")
        assert code == 0
        found[bits] = json.loads(out)
    assert found["4"]["dense_bits"] == 4
    stored = load_file(tmp_path / "4/dense.safetensors")
    assert found["4"]["dense_bytes"] < found["8"]["dense_bytes"]
    code, out, _ = run("plan", "--model", tmp_path / "4", "--json")
    planned = sum(tensor.nbytes for tensor in stored.values())
    assert (code, json.loads(out)["dense_bytes"]) == (0, planned)
    code, out, _ = run("verify", tmp_path / "4", "--json")
    assert (code, json.loads(out)["ok"]) == (0, True)
    code, _, _ = run("export", tmp_path / "4", tmp_path / "out", "--format", "safetensors")
    assert code == 0
    name = "model.layers.0.self_attn.q_proj.weight"
    source = load_file(checkpoint / "model.safetensors")[name]
    exported = load_file(next((tmp_path / "out").glob("model*.safetensors")))[name]
    assert stored[name].dtype == torch.uint8
    assert torch.equal(exported, dequantize(*quantize(source.float(), 64), 4).bfloat16())


@pytest.mark.parametrize("options", [("--max-level", 2), ("--dense-bits", 7), ("--layout", "round")])
def test_convert_refuses_a_wrong_option(run, checkpoint, tmp_path, options):
    """Exit 2 with the value in the message; no store is written."""
    code, _, err = run("convert", checkpoint, tmp_path / "store", *options)
    assert code == 2
    assert str(options[1]) in err
    assert not (tmp_path / "store").exists()


def test_a_damaged_store_exits_4(run, damageable):
    """verify lists the damage, and an answer from damaged experts is refused; both exit 4."""
    manifest = Manifest.load(damageable)
    for records in manifest.layers.values():
        for record in records.records:
            flip(damageable / records.file, record.offset + 1)
    code, out, _ = run("verify", damageable, "--json")
    report = json.loads(out)
    assert (code, report["ok"], len(report["damage"])) == (4, False, 16)
    assert "layer 0, expert 3" in report["damage"][3]
    assert run("verify", damageable)[0] == 4
    code, out, err = run("chat", "--model", damageable, "--prompt", "the fox", "--context", 64)
    assert (code, out) == (4, "")
    assert "checksum" in err
    (damageable / MANIFEST_NAME).write_text("{")
    assert run("inspect", damageable)[0] == 4


def test_pickled_weights_are_refused(run, copied, monkeypatch):
    """A checkpoint with pickle only exits 2, and the pickle is never opened."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(copied.parent / "cache"))
    (copied / "model.safetensors").unlink()
    (copied / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    (copied / "pytorch_model.bin").chmod(0)
    code, _, err = run("chat", "--model", copied, "--prompt", "x")
    assert code == 2
    assert "pytorch_model.bin" in err
    assert "pickle" in err


@pytest.mark.parametrize("model_type", ["qwen3_moe", "evil_moe"])
def test_remote_code_is_never_run(run, copied, monkeypatch, model_type):
    """A checkpoint with code runs by transformers' own model class, or is refused where there is none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(copied.parent / "cache"))
    ran = copied.parent / "ran"
    (copied / "modeling.py").write_text(f"open({str(ran)!r}, 'w')\nclass Model: pass\n")
    own = {"AutoConfig": "modeling.Model", "AutoModelForCausalLM": "modeling.Model"}
    edit_json(copied / "config.json", auto_map=own, model_type=model_type)
    code, _, err = run("chat", "--model", copied, "--prompt", "x", "--max-new-tokens", "1")
    assert code == (0 if model_type == "qwen3_moe" else 2)
    assert code == 0 or "evil_moe" in err
    assert not ran.exists()


def test_a_prompt_longer_than_the_context_exits_2(run, tiny_store):
    """The context is in the message."""
    words = ("chat", "--model", tiny_store, "--prompt", "x y " * 40, "--context", 16)
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert "16" in err
    assert "tokens" in err


def test_ctrl_c_exits_130(run, tiny_store, monkeypatch):
    """Without a terminal one Ctrl-C ends the program, with the shell's code and no traceback."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("edgemoe.api.model.Model.run", interrupt)
    code, out, err = run("chat", "--model", tiny_store, "--prompt", "x", "--context", 64)
    assert (code, out) == (130, "")
    assert err.splitlines()[-1] == "edgemoe: interrupted"
