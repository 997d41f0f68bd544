"""Commands import what they need: each in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
from terminals import environment

pytestmark = pytest.mark.e2e

HEAVY = ("torch", "transformers", "tokenizers", "huggingface_hub", "rich")

SCRIPT = """
import sys, edgemoe.cli
sys.argv = ["edgemoe", *sys.argv[2:]]
try:
    edgemoe.cli.main()
finally:
    print(*sorted(set({names}) & set(sys.modules)), file=sys.stderr)
"""


def imported(home, names, *arguments):
    """Runs a command; returns its stdout and which of `names` it has imported."""
    script = SCRIPT.format(names=list(names))
    done = subprocess.run(
        [sys.executable, "-c", script, "-", *map(str, arguments)],
        env=environment(home),
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout, done.stderr.splitlines()[-1].split()


@pytest.mark.parametrize(
    "command", [["--version"], ["--help"], ["models"], ["rm", "small", "--yes"], ["chat", "--help"]]
)
def test_light_commands_import_nothing_heavy(tmp_path, command):
    """Listings, removal and help answer before torch would be imported."""
    assert imported(tmp_path, HEAVY, *command)[1] == []


def test_stores_are_listed_and_described_without_torch(tmp_path, tiny_store):
    """`inspect` reads a manifest, and `models` headers too."""
    cached = tmp_path / "cache" / "edgemoe" / "stores"
    cached.mkdir(parents=True)
    (cached / "tiny").symlink_to(tiny_store)
    out, heavy = imported(tmp_path, HEAVY, "models")
    assert ("ready" in out or "8/4/2" in out, heavy) == (True, [])
    out, heavy = imported(tmp_path, HEAVY, "inspect", tiny_store)
    assert ("bits per weight" in out, heavy) == (True, [])


def test_a_plan_of_a_store_needs_no_transformers(tmp_path, tiny_store):
    """A plan's own arithmetic is torch's; model code is not imported."""
    out, heavy = imported(tmp_path, ["transformers", "torch"], "plan", "--model", tiny_store)
    assert ("smallest limit" in out, heavy) == (True, ["torch"])


def test_a_chat_does_not_import_the_compiler(tmp_path, tiny_store):
    """torch's compiler takes longer to import than torch, and no step uses it."""
    options = ("--model", tiny_store, "--prompt", "hi", "--max-new-tokens", 2, "--context", 64)
    out, heavy = imported(tmp_path, ["torch", "torch._dynamo", "torch._inductor"], "chat", *options)
    assert (bool(out), heavy) == (True, ["torch"])


def test_the_compiler_works_after_a_chat_has_left_it_out():
    """A program that uses edgemoe and torch.compile has both, in either order; an unknown name is the real one."""
    script = """
import sys, torch
from edgemoe.machine.model_code import without_compiler
with without_compiler():
    import transformers.modeling_utils
    assert "torch.fx.experimental.symbolic_shapes" not in sys.modules
    assert torch.compiler.disable(len) is len
assert "torch._dynamo" not in sys.modules and torch.distributed.is_available()
with without_compiler():
    assert torch._dynamo.config.recompile_limit > 0
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]
with without_compiler():
    assert torch.compiler.disable(len) is not len
"""
    subprocess.run([sys.executable, "-c", script], check=True)
