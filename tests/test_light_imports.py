"""Commands import only the modules that they need: one new process runs them, the smallest first."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from terminals import ROOT, environment

from edgemoe.families.kept import _kept
from edgemoe.families.table import family_of
from edgemoe.storage.convert.config import bounded_config
from edgemoe.storage.files.untrusted import read_json

pytestmark = pytest.mark.e2e

HEAVY = ("torch", "transformers", "tokenizers", "huggingface_hub")

DRAWING = ("rich", "prompt_toolkit", "matplotlib")
"""Packages of terminals and plots, which no command imports whose output is a pipe."""

COMPILERS = ("torch._dynamo", "torch._inductor", "triton")
"""torch's compiler takes longer to import than torch, and no step uses it."""

SCRIPT = f"""
import json, sys
from edgemoe.cli import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["edgemoe", *words]
    code = main()
    imported = set({[*HEAVY, *DRAWING, *COMPILERS]}) & set(sys.modules)
    print(json.dumps([code, sorted(imported)]), file=sys.stderr)
    print(chr(0), end="", flush=True)
import triton
"""


def test_commands_import_what_they_need(tmp_path, tiny_store, monkeypatch):
    """Listings, removal and help answer without torch, a plan without transformers, a piped chat without a compiler.

    A Triton that is installed is not imported, and can be imported by name afterwards.
    """
    cached, double = tmp_path / "cache" / "edgemoe" / "stores", tmp_path / "triton"
    cached.mkdir(parents=True)
    (cached / "tiny").symlink_to(tiny_store)
    double.mkdir()
    (double / "__init__.py").write_text("print('a double')\n")
    store = ("--model", str(tiny_store))
    chat = ("chat", *store, "--prompt", "hi", "--max-new-tokens", "2", "--context", "64")
    light = [("--version",), ("--help",), ("chat", "--help"), ("models",), ("inspect", str(tiny_store))]
    commands = [*light, ("rm", "small", "--yes"), ("plan", *store), chat]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _kept.cache_clear()
    family_of(
        bounded_config(read_json(tiny_store, "config.json"))
    )  # a plan derives a config that is new to it
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(commands)],
        env=environment(tmp_path, PYTHONPATH=os.pathsep.join((str(tmp_path), str(ROOT)))),
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    codes, imported = zip(
        *(json.loads(line) for line in done.stderr.splitlines() if line[0] == "["), strict=True
    )
    *shown, rest = done.stdout.split("\0")
    out = dict(zip(commands, shown, strict=True))
    assert codes == (*[0] * len(light), 2, 0, 0)
    assert imported[:-2] == ([],) * (len(light) + 1)
    assert ("ready" in out[commands[3]] or "8/4/2" in out[commands[3]], rest) == (True, "a double\n")
    assert "bits per weight" in out[commands[4]]
    assert ("smallest limit" in out[commands[-2]], imported[-2]) == (True, ["torch"])
    assert bool(out[chat].strip())
    assert not {*imported[-1]} & {*DRAWING, *COMPILERS} or torch.cuda.is_available()


def test_the_compiler_works_after_a_chat_has_left_it_out():
    """A program that uses edgemoe and torch.compile has both, in either order; an unknown name is the real one.

    So is a module of the compiler, such as torchvision imports: a fork of the program, which has imported nothing of
    the compiler either, uses that first.
    """
    script = """
import os, sys, torch
from edgemoe.machine.model_code import without_compiler
with without_compiler():
    import transformers.modeling_utils
    assert "torch.fx.experimental.symbolic_shapes" not in sys.modules
    assert torch.compiler.disable(len) is len
assert "torch._dynamo" not in sys.modules and torch.distributed.is_available()
forked = os.fork()
with without_compiler():
    if forked:
        assert torch._dynamo.config.recompile_limit > 0
    else:
        assert __import__("torch._dynamo.utils")._dynamo.utils.__spec__.origin
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]
with without_compiler():
    assert torch.compiler.disable(len) is not len
if forked:
    assert os.waitpid(forked, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True)
