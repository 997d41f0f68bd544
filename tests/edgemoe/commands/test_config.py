"""Options from files and the environment: precedence, refusals, and the output of --print-config."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib

import pytest
import typer
from terminals import ROOT

from edgemoe.bench.prompts import CHOICES
from edgemoe.cache.policies import POLICIES
from edgemoe.cli import app
from edgemoe.commands.options.configured_command import options_of, variable
from edgemoe.errors import UserError
from edgemoe.evaluate.studies import STUDIES
from edgemoe.machine.devices import DEVICES
from edgemoe.policy.settings import CRITICAL, DEPTHS, IN_PLACE, SIGNALS
from edgemoe.prefetch.base import MODES
from edgemoe.storage.record.layout import LAYOUTS


@pytest.fixture
def file(tmp_path):
    """Writes a configuration file."""

    def write(text: str):
        path = tmp_path / "edgemoe.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def printed(run, command: str, *arguments: object) -> tuple[dict[str, object], dict[str, str]]:
    """Reads the output of --print-config: the values that are set, and the source of each."""
    code, out, err = run(command, *arguments, "--print-config")
    assert (code, err) == (0, "")
    origins = {line.split(" = ")[0]: line.rsplit("  # ", 1)[1] for line in out.splitlines() if "  # " in line}
    return tomllib.loads(out)[command], origins


def test_flags_win_over_the_environment_and_that_over_the_file(run, file, monkeypatch):
    """Flags win over variables, variables over the file, and a command's table over the top level."""
    path = file(
        'levels = "4/2"\nretention = 0.6\ncontext = 100\nseed = 1\nruns = 9\n'
        "[chat]\nretention = 0.7\ncontext = 200\n[bench]\nretention = 0.9\n"
    )
    monkeypatch.setenv("EDGEMOE_CONTEXT", "300")
    monkeypatch.setenv("EDGEMOE_SEED", "2")
    values, origins = printed(run, "chat", "--config", path, "--seed", 3)
    assert {name: values[name] for name in ("levels", "retention", "context", "seed")} == {
        "levels": "4/2",
        "retention": 0.7,
        "context": 300,
        "seed": 3,
    }
    assert [origins[name] for name in ("levels", "retention", "context", "seed", "max-new-tokens")] == [
        f"file, {path}",
        f"file, {path}",
        "environment, EDGEMOE_CONTEXT",
        "command line",
        "default",
    ]
    values, _ = printed(run, "bench", "--config", path)
    assert (values["retention"], values["runs"], values["seed"]) == (0.9, 9, 2)
    values, _ = printed(run, "eval", "--config", path)
    assert (values["levels"], values["retention"]) == (["4/2"], [0.6])


def test_a_configuration_equals_flags(run, file, tiny_store, monkeypatch):
    """A command with a file and variables prints the same as with flags."""
    flags = run("plan", "--model", tiny_store, "--context", 64, "--vram-limit", "3MB", "--json")
    path = file(f"[plan]\nmodel = {json.dumps(str(tiny_store))}\ncontext = 64\nvram-limit = 3_000_000\n")
    monkeypatch.setenv("EDGEMOE_JSON", "1")
    monkeypatch.setenv("EDGEMOE_CONFIG", str(path))
    assert run("plan") == flags
    assert json.loads(flags[1])["vram_limit_bytes"] == 3_000_000


def test_the_printed_configuration_is_a_file(run, file):
    """Read as a file it gives the same values, also strings with quotes, signs and non-ASCII characters."""
    words = ("--system", 'say "ü" \\ \t\x7f😀', "--levels", "8/4", "--temperature", 0.25, "--json")
    values, _ = printed(run, "chat", *words)
    code, out, _ = run("chat", *words, "--print-config")
    assert (code, values["system"]) == (0, words[1])
    again, origins = printed(run, "chat", "--config", file(out))
    assert again == values
    assert origins["system"].startswith("file, ")


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vram-limits = 3", "line 1, got 'vram-limits': did you mean 'vram-limit' or"),
        (
            "# seeds\n\nseed = 1\n[bench]\nruns = 3\n[chat]\nruns = 3",
            "the name of an option of chat in FILE, line 7",
        ),
        ("[bench]\nruns = 3\n[chatt]\nseed = 3", "in FILE, line 3, got 'chatt': did you mean 'chat'?"),
        ('system = """\nseeds = 1\n"""\nchat.seeds = 2', "in FILE, line 4, got 'seeds': did you mean 'seed"),
        ("config = 'other.toml'", "'config'"),
        ("json = 'yes'", "true or false for json"),
        ("context = true", "a string or a number for context"),
        ("levels = ['4', '8']", "a string or a number for levels"),
        ("seed = 2020-01-01", "a string or a number for seed"),
        ("seed = 1\ncontext = 'many'", "a value that --context takes in FILE, line 2, got 'many'"),
        ("seed = " + "[" * 5_000 + "]" * 5_000, "too deep"),
        (".".join("a" * 10_000) + " = 1", "a line of more than 128 dots"),
        ("# " + "x" * 70_000, "more than 65536 bytes"),
        ("context = 1", "--context"),
        ("= 3", "a TOML file with options at FILE"),
    ],
)
def test_a_wrong_key_or_value_exits_2(run, file, text, message):
    """Unknown keys, with the nearest known key; values of a wrong type or out of range; a file that is no TOML."""
    path = file(text)
    code, out, err = run("chat", "--config", path, "--print-config")
    assert (code, out) == (2, "")
    assert message.replace("FILE", str(path)) in " ".join(err.split())


def test_a_missing_or_binary_file_exits_2(run, tmp_path):
    """The message has the file's name."""
    for name, content in (("none.toml", None), ("bytes.toml", b"seed = '\xff'")):
        if content:
            (tmp_path / name).write_bytes(content)
        code, out, err = run("plan", "--config", tmp_path / name)
        assert (code, out, name in err) == (2, "", True)


@pytest.fixture
def own_file(tmp_path, monkeypatch):
    """Writes the user's own file of options."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "edgemoe").mkdir()

    def write(text: str):
        path = tmp_path / "edgemoe" / "config.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_the_own_file_is_read_without_an_option(run, file, own_file, monkeypatch):
    """--config names another file in its place, variables and flags win over it, and completion does not read it."""
    assert printed(run, "chat")[1]["seed"] == "default"
    path = own_file("seed = 1\ntop-k = 5\n[chat]\ncontext = 300\ntop-p = 0.5\n")
    monkeypatch.setenv("EDGEMOE_TOP_P", "0.25")
    values, origins = printed(run, "chat", "--top-k", 7)
    names = ("seed", "context", "top-p", "top-k")
    assert [values[name] for name in names] == [1, 300, 0.25, 7]
    assert [origins[name] for name in names[:2]] == [f"file, {path}"] * 2
    assert "context" not in printed(run, "plan")[0]
    values, origins = printed(run, "chat", "--config", file("seed = 2"))
    assert (values["seed"], origins["seed"].endswith("edgemoe.toml"), "context" in values) == (2, True, False)
    own_file("seeds = 1")
    code, _, err = run("chat", "--print-config")
    assert (code, f"{path}, line 1, got 'seeds'" in " ".join(err.split())) == (2, True)
    assert run("chat", "--help")[0] == 0


def test_a_named_model_wins_over_the_own_file(run, own_file, tiny_store):
    """The model as an argument goes before the file's, and --model next to it is refused as before."""
    own_file("model = 'nowhere'\ncontext = 64\n")
    code, out, _ = run("plan", tiny_store, "--json")
    assert (code, json.loads(out)["context"]) == (0, 64)
    values, origins = printed(run, "plan", tiny_store)
    assert (values["model"], origins["model"]) == (str(tiny_store), "command line")
    code, _, err = run("plan", tiny_store, "--model", "nowhere")
    assert (code, err.startswith("edgemoe: expected one model, got")) == (2, True)


def test_a_mistyped_variable_gives_a_warning(run, monkeypatch):
    """A variable close to an option's gives a warning; other variables with the prefix give none."""
    monkeypatch.setenv("EDGEMOE_VRAM_LIMITS", "3GB")
    monkeypatch.setenv("EDGEMOE_HOME_PAGE", "x")
    code, _, err = run("plan", "--print-config")
    assert (code, err) == (0, "edgemoe: EDGEMOE_VRAM_LIMITS sets nothing; did you mean EDGEMOE_VRAM_LIMIT?\n")


def test_every_command_can_be_configured():
    """Every command takes --config and --print-config, and each of its options has a variable."""
    commands = typer.main.get_command(app).commands
    assert {"chat", "plan", "bench", "eval", "convert"} <= set(commands)
    for command in commands.values():
        options = options_of(command)
        assert {"config", "print-config"} <= set(options)
        settable = {name: each for name, each in options.items() if name not in ("print-config", "help-all")}
        assert {each.envvar for each in settable.values()} == {variable(name) for name in settable}
    assert options_of(commands["chat"])["vram-limit"].envvar == "EDGEMOE_VRAM_LIMIT"


@pytest.mark.e2e
def test_shell_completion(tmp_path):
    """bash completes commands, options, names and values after it reads the script of --show-completion."""
    (tmp_path / ".cache/edgemoe/stores/qwen3-0123456789abcdef-cuda").mkdir(parents=True)
    (tmp_path / "edgemoe").write_text(f'#!/bin/sh\nexec {sys.executable} -m edgemoe "$@"\n')
    (tmp_path / "edgemoe").chmod(0o755)
    script = (
        'eval "$(edgemoe --show-completion)"\n'
        "complete -p edgemoe\n"
        'COMP_WORDS=(edgemoe ch); COMP_CWORD=1; _edgemoe_completion edgemoe; echo "${COMPREPLY[@]}"\n'
        'COMP_WORDS=(edgemoe chat --vram); COMP_CWORD=2; _edgemoe_completion edgemoe; echo "${COMPREPLY[@]}"\n'
        'COMP_WORDS=(edgemoe plan -m d); COMP_CWORD=3; _edgemoe_completion edgemoe; echo "${COMPREPLY[@]}"\n'
        'COMP_WORDS=(edgemoe rm qw); COMP_CWORD=2; _edgemoe_completion edgemoe; echo "${COMPREPLY[@]}"\n'
        "COMP_WORDS=(edgemoe bench --levels 8/); COMP_CWORD=3; _edgemoe_completion edgemoe; "
        'echo "${COMPREPLY[@]}"\n'
        "edgemoe --install-completion >&2\n"
    )
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [
        "complete -o default -F _edgemoe_completion edgemoe",
        "chat",
        "--vram-limit",
        "demo",
        "qwen3",
        "8/4 8/4/2/0",
    ]
    assert "_edgemoe_completion" in (tmp_path / ".bash_completions" / "edgemoe.sh").read_text()


def test_completed_values_are_those_of_the_program():
    """Every value that a shell completes is one that the option takes, and none is missing."""
    commands = typer.main.get_command(app).commands
    expected = {
        "depth": DEPTHS,
        "critical": CRITICAL,
        "importance": SIGNALS,
        "speculate": MODES,
        "eviction": POLICIES,
        "in-place": IN_PLACE,
        "device": DEVICES,
        "layout": ("auto", *LAYOUTS),
        "study": STUDIES,  # of eval; elsewhere it sets options of studies
        "prompts": CHOICES,
    }
    seen = set()
    for name, command in commands.items():
        for option, parameter in options_of(command).items():
            if option in expected and (option, name) not in {
                ("study", each) for each in ("chat", "serve", "plan")
            }:
                completed = parameter.shell_complete(typer.Context(command), "")
                assert {each.value for each in completed} == {*expected[option]}, (name, option)
                seen.add(option)
    assert seen == set(expected)


@pytest.mark.e2e
def test_completion_imports_no_heavy_package(tmp_path):
    """The names of models are completed without torch."""
    code = (
        "import sys\nfrom edgemoe.models.options.groups import complete_model\n"
        "assert complete_model('de') == ['demo']\n"
        "assert not {'torch', 'numpy', 'transformers', 'huggingface_hub'} & set(sys.modules)\n"
    )
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", [("bench",), ("eval", "--tasks")])
def test_plain_codes_reach_the_first_use_of_a_model(run, monkeypatch, command):
    """bench and eval open the model as the option and its variable say."""
    opened = list[bool]()

    def stop(opening, **how):
        opened.append(opening.plain_codes)
        raise UserError("no model", "one", "stop here")

    monkeypatch.setattr("edgemoe.models.open.open_model", stop)
    assert run(*command)[0] == run(*command, "--plain-codes")[0] == 2
    monkeypatch.setenv("EDGEMOE_PLAIN_CODES", "true")
    assert run(*command)[0] == 2
    assert opened == [False, True, True]
