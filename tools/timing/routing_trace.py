"""What a model's routers ask for on a text, step by step: recorded with transformers, kept as JSON lines.

A trace has one line per step and MoE layer, in the order in which they run: a list of [layer, expert, level],
each expert once. Skipped experts are not in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from edgemoe.policy.levels import LevelPolicy
from edgemoe.policy.settings import RunSettings
from storage.base import LEVELS, ExpertKey
from storage.errors import DamagedData, UserError

Group = dict[ExpertKey, int]
"""The experts that one layer wants in one step -> level, above 0."""

Choices = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Layer -> the experts its router chose, int64 [T, k], and their gate weights [T, k]."""


def read_trace(path: Path) -> list[Group]:
    """A trace from a file.

    Raises:
        UserError: there is no such file.
        DamagedData: it is empty, or naming the first line that is no list of [layer, expert, level].
    """
    if not path.is_file():
        raise UserError(f"a trace was wanted at {path}", "no such file", "Record one with --save-trace")
    trace = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                group = {ExpertKey(layer, expert): level for layer, expert, level in json.loads(line)}
            except (ValueError, TypeError):
                group = {}
            if not group or not all(type(n) is int for key in group for n in key) or not _levels(group):
                raise DamagedData(
                    f"[[layer, expert, level], …] was wanted in line {number} of {path}",
                    f"got {line.strip()[:60]!r}",
                    "Record the trace again",
                )
            trace.append(group)
    if not trace:
        raise DamagedData(f"requests were wanted in {path}", "it is empty", "Record the trace again")
    return trace


def _levels(group: Group) -> bool:
    return all(level in LEVELS and level for level in group.values())


def write_trace(trace: list[Group], path: Path) -> None:
    """The counterpart of read_trace."""
    with path.open("w", encoding="utf-8") as lines:
        for group in trace:
            lines.write(json.dumps([[*key, level] for key, level in group.items()]) + "\n")


def record(
    checkpoint: Path, text: Path, settings: RunSettings, *, tokens: int, context: int, prompt: int
) -> list[Group]:
    """Runs a text through transformers' model and writes down what the routers choose.

    The text is cut into windows. Each window's first tokens are one step, as of a prompt; the others are a
    step each, as if decoded, with the text deciding what comes next.

    Args:
        checkpoint: a Hugging Face model directory; loaded whole, in bf16, on the CPU.
        text: UTF-8.
        settings: levels, retention and depth of what is asked for.
        tokens: of the text to run, from its start; the last window may be shorter.
        context: tokens in a window.
        prompt: tokens of a window that are one step; 0: none are.

    Raises:
        UserError: not a checkpoint, or one without routed experts; an empty text; or sizes that make no sense.
    """
    if not 0 <= prompt < context or tokens < 1:
        raise UserError(
            "some tokens in windows longer than their prompts were wanted",
            f"got {tokens} tokens, windows of {context}, prompts of {prompt}",
            "Shorten the prompt",
        )
    ids = _tokens(checkpoint, text)[:tokens]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    modules = {name: m for name, m in model.named_modules() if hasattr(m, "_apply_gate")}
    if not modules:
        raise UserError(f"routed experts were wanted in {checkpoint}", "there are none", "Use a MoE model")
    experts = next(iter(modules.values())).gate_up_proj.shape[0]
    policy = LevelPolicy(settings, model.config.num_hidden_layers, experts)
    trace: list[Group] = []
    for start in range(0, len(ids), context):
        window = torch.tensor([ids[start : start + context]])
        choices = _choices(model, modules, window)
        trace.extend(_groups(choices, policy, prompt, window.shape[1]))
    return trace


def _tokens(checkpoint: Path, text: Path) -> list[int]:
    """All of a text, by a checkpoint's tokenizer."""
    if not (checkpoint / "config.json").is_file() or (checkpoint / "store.json").exists():
        raise UserError(
            f"a checkpoint was wanted at {checkpoint}", "it is none", "Give a Hugging Face model directory"
        )
    ids: list[int] = AutoTokenizer.from_pretrained(checkpoint)(text.read_text(encoding="utf-8"))["input_ids"]
    if not ids:
        raise UserError(f"a text was wanted in {text}", "it is empty", "Give another")
    return ids


def _choices(model: Any, modules: dict[str, Any], window: torch.Tensor) -> Choices:
    """What every router chooses for int64 [1, T] tokens."""
    choices: Choices = {}

    def note(module: Any, given: tuple[torch.Tensor, ...]) -> None:
        choices[layers[module]] = given[1], given[2]

    layers = {module: int(re.findall(r"\.(\d+)\.", name)[0]) for name, module in modules.items()}
    with ExitStack() as hooks, torch.inference_mode():
        for module in layers:
            hooks.callback(module.register_forward_pre_hook(note).remove)
        model(window, use_cache=False, logits_to_keep=1)
    return choices


def _groups(choices: Choices, policy: LevelPolicy, prompt: int, tokens: int) -> Iterator[Group]:
    """One window's part of the trace."""
    first = min(prompt, tokens)
    steps = [(0, first)] * (first > 0) + [(row, row + 1) for row in range(first, tokens)]
    levels = {
        layer: torch.cat(
            [
                policy.levels(layer, index[:first], weights[:first], None, decode=False)
                if first
                else index[:0],
                policy.levels(layer, index[first:], weights[first:], None, decode=True),
            ]
        ).tolist()
        for layer, (index, weights) in choices.items()
    }
    experts = {layer: index.tolist() for layer, (index, _) in choices.items()}
    for start, end in steps:
        for layer in choices:
            group = {
                ExpertKey(layer, expert): level
                for row in range(start, end)
                for expert, level in zip(experts[layer][row], levels[layer][row], strict=True)
                if level
            }
            if group:
                yield group
