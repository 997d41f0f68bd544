"""--help of commands with many options, --help-all, and the settings of --study."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
import typer

from edgemoe.cli import app
from edgemoe.commands.options.configured_command import options_of
from edgemoe.commands.options.help_sections import SECTIONS
from edgemoe.models.options.settings import HotLimitOptions, StudyOptions


def listed(text: str) -> list[str]:
    """The options that a help describes, in its order."""
    options, _, _ = text.partition("\n  Examples: ")
    return re.findall(r"^  (?:-\w, )?--([a-z][a-z-]*)", options, re.MULTILINE)


@pytest.mark.parametrize("command", SECTIONS)
def test_help_shows_twelve_options_and_how_to_see_the_others(run, command):
    """The model and its limits are among them; --config, --help-all and --help follow."""
    code, out, _ = run(command, "--help")
    options = listed(out)
    assert code == 0
    assert len(set(options[:12])) == 12
    assert {"model", "vram-limit", "dram-limit", "context"} < set(options[:12])
    assert options[12:] == ["config", "help-all", "help"]


@pytest.mark.parametrize("command", SECTIONS)
def test_help_all_shows_every_option(run, command):
    """Every option that the command takes, and --help, each once, in sections of at most 20."""
    code, out, _ = run(command, "--help-all")
    taken = options_of(typer.main.get_command(app).commands[command])
    assert code == 0
    assert sorted(listed(out)) == sorted([*taken, "help"])


def test_options_of_studies_are_options_of_bench_and_eval_alone():
    """chat, serve and plan take them by --study; the two limits of hotness stay options."""
    commands = typer.main.get_command(app).commands
    studies = {each.name.replace("_", "-") for each in fields(StudyOptions)}
    limits = {each.name.replace("_", "-") for each in fields(HotLimitOptions)}
    for name, command in commands.items():
        taken = set(options_of(command))
        assert (studies & taken == set()) == (name not in ("bench", "eval")), name
        assert (limits <= taken) == (name in ("chat", "serve", "bench", "eval")), name
    assert studies <= set(options_of(commands["bench"]))


@pytest.mark.e2e
@pytest.mark.parametrize("command", ["chat", "serve", "plan"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--study", "dept=equal"), "got 'dept=equal': write KEY=VALUE, KEY one of rule, depth"),
        (("--study", "depth"), "got 'depth': write KEY=VALUE"),
        (("--levels", "4/2", "--study", "depth=sine"), "--depth cosine or equal, got 'sine'"),
        (("--study", "importance=load"), "two or more levels for --importance load"),
        (("--levels", "4/2", "--study", "heavy-hitters=0.2"), "--importance gate, which counts none"),
        (("--study", "hot-margin=much"), "a number for --study hot-margin, got 'much'"),
        (("--study", "renormalise=yes"), "on or off for --study renormalise, got 'yes'"),
    ],
)
def test_a_wrong_study_exits_2(run, command, options, message):
    """With the messages that the options of bench have, before the model is opened."""
    code, out, err = run(command, "--model", "there-is-none", *options)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())


def test_an_option_of_studies_elsewhere_says_how_to_write_it(run):
    """A name that is near no key is an error as any wrong option."""
    code, _, err = run("chat", "--depth", "equal")
    wanted = "got --depth, an option of bench and eval alone: write --study depth=VALUE"
    assert (code, wanted in " ".join(err.split())) == (2, True)
    code, _, err = run("eval", "--lynx", "on")  # its --study names studies, which have no values
    assert (code, "got --lynx, an option of bench alone: give it to bench" in " ".join(err.split())) == (
        2,
        True,
    )
    assert run("chat", "--dept", "equal")[0] == 2


def test_studies_come_from_the_file_and_the_environment(run, tmp_path, monkeypatch):
    """As keys and as a list, at the top and under the command's name, and as words of a variable."""
    file = tmp_path / "edgemoe.toml"
    file.write_text('[chat]\nstudy = ["depth=equal", "scan=off"]\n')
    assert 'study = ["depth=equal", "scan=off"]' in run("chat", "--config", file, "--print-config")[1]
    file.write_text('depth = "equal"\n[chat]\nrenormalise = true\nstudy = ["scan=off"]\nhot-warmup = 3\n')
    keys = '"depth=equal", "renormalise=on", "scan=off", "hot-warmup=3"'
    assert f"study = [{keys}]  # file" in run("chat", "--config", file, "--print-config")[1]
    assert 'depth = "equal"  # file' in run("bench", "--config", file, "--print-config")[1]
    monkeypatch.setenv("EDGEMOE_STUDY", "critical=ceil eviction=lru-pool")
    out = run("chat", "--print-config")[1]
    assert 'study = ["critical=ceil", "eviction=lru-pool"]  # environment, EDGEMOE_STUDY' in out
