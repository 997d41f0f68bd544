"""Records the experts that a model's routers choose on a text with transformers; a trace is a file of JSON lines.

The first line of a trace is an object with the fields of TraceSource. Then comes one line per step and MoE layer, in
the order in which they run: a list of [layer, expert, level], each expert once, without skipped experts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from edgemoe.errors import DamagedData, EdgemoeError, UserError
from edgemoe.policy.damage import Damage
from edgemoe.policy.levels import LevelPolicy
from edgemoe.policy.settings import RunSettings, format_levels, parse_levels
from edgemoe.storage.base import LEVELS, ExpertKey

Group = dict[ExpertKey, int]
"""The experts that one layer requests in one step -> level, above 0."""

Choices = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Layer -> the experts its router chose, int64 [T, k], and their gate weights [T, k]."""


@dataclass(frozen=True)
class TraceSource:
    """The settings and the model that a trace is of, as far as a memory plan depends on them.

    Args:
        levels: as on the command line.
        retention, critical: of the settings.
        layers: of the model.
        experts: in a layer.
        top_k: experts of a token.
    """

    levels: str
    retention: float
    critical: str
    layers: int
    experts: int
    top_k: int

    def __post_init__(self) -> None:
        if min(self.layers, self.experts, self.top_k) < 1 or not self.settings.levels:
            raise ValueError("a model has layers, experts and experts of a token")

    @property
    def settings(self) -> RunSettings:
        """The settings of the requests."""
        levels = parse_levels(self.levels)
        return RunSettings(levels=levels, retention=self.retention, critical=self.critical)


@dataclass(frozen=True)
class Trace:
    """Requests in their order, and where they come from."""

    source: TraceSource
    groups: list[Group]


def read_trace(path: Path) -> Trace:
    """Reads a trace.

    Raises:
        UserError: there is no such file.
        DamagedData: the file has no requests, its first line does not name its source, or a later line is no list of
            [layer, expert, level]; names the first such line.
    """
    if not path.is_file():
        raise UserError(f"a trace at {path}", "no such file", "record one with --save-trace")
    trace = []
    with path.open(encoding="utf-8") as lines:
        source = _source(path, next(lines, ""))
        for number, line in enumerate(lines, 2):
            try:
                group = {ExpertKey(layer, expert): level for layer, expert, level in json.loads(line)}
            except (ValueError, TypeError):
                group = {}
            if not group or not all(type(n) is int for key in group for n in key) or not _levels(group):
                raise DamagedData(
                    f"[[layer, expert, level], …] in line {number} of {path}",
                    repr(line.strip()[:60]),
                    "record the trace again",
                )
            trace.append(group)
    if not trace:
        raise DamagedData(f"requests in {path}", "none", "record the trace again")
    return Trace(source, trace)


def _source(path: Path, line: str) -> TraceSource:
    try:
        return TraceSource(**json.loads(line))
    except (ValueError, TypeError, AttributeError, EdgemoeError):
        fields = ", ".join(TraceSource.__annotations__)
        raise DamagedData(
            f"{fields} in line 1 of {path}", repr(line.strip()[:60]), "record the trace again"
        ) from None


def _levels(group: Group) -> bool:
    return all(level in LEVELS and level for level in group.values())


def write_trace(trace: Trace, path: Path) -> None:
    """Writes a trace in the form that read_trace reads."""
    with path.open("w", encoding="utf-8") as lines:
        lines.write(json.dumps(asdict(trace.source)) + "\n")
        for group in trace.groups:
            lines.write(json.dumps([[*key, level] for key, level in group.items()]) + "\n")


def record(
    checkpoint: Path, text: Path, settings: RunSettings, *, tokens: int, context: int, prompt: int
) -> Trace:
    """Runs a text through transformers' model and records the experts that the routers choose.

    The text is cut into windows. Each window's first tokens are one step, like a prompt; each later token is a step of
    its own, like a decoded one, but taken from the text.

    Args:
        checkpoint: a Hugging Face model directory; loaded whole, in bf16, on the CPU.
        text: a UTF-8 file.
        settings: levels, retention and rounding of the requests.
        tokens: tokens from the start of the text; the last window may be shorter.
        context: tokens in a window.
        prompt: tokens at the start of a window that are one step; may be 0.

    Raises:
        UserError: no checkpoint, a checkpoint without routed experts, an empty text, or sizes that contradict.
    """
    if not 0 <= prompt < context or tokens < 1:
        raise UserError(
            "tokens in windows longer than their prompts",
            f"{tokens} tokens, windows of {context}, prompts of {prompt}",
            "shorten the prompt, or read more tokens",
        )
    ids = _tokens(checkpoint, text)[:tokens]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    modules = {name: m for name, m in model.named_modules() if hasattr(m, "_apply_gate")}
    if not modules:
        raise UserError(f"routed experts in {checkpoint}", "none", "use an MoE model")
    experts = next(iter(modules.values())).gate_up_proj.shape[0]
    layers = model.config.num_hidden_layers
    policy: LevelPolicy | None = None
    groups: list[Group] = []
    for start in range(0, len(ids), context):
        window = torch.tensor([ids[start : start + context]])
        choices = _choices(model, modules, window)
        policy = policy or _policy(settings, layers, experts, choices)
        groups.extend(_groups(choices, policy, prompt, window.shape[1]))
    top_k = next(iter(choices.values()))[0].shape[1]
    levels = format_levels(settings.levels)
    source = TraceSource(levels, settings.retention, settings.critical, layers, experts, top_k)
    return Trace(source, groups)


def _policy(settings: RunSettings, layers: int, experts: int, choices: Choices) -> LevelPolicy:
    """The policy of the requests; where damage decides, with typical errors and the first window's gate weights."""
    numbers = sorted(choices)
    chosen, gates = (torch.stack([choices[layer][part] for layer in numbers]) for part in (0, 1))
    return LevelPolicy(settings, range(layers), experts, Damage.typical(numbers, experts, chosen, gates))


def _tokens(checkpoint: Path, text: Path) -> list[int]:
    """Tokenizes a whole text by a checkpoint's tokenizer."""
    if not (checkpoint / "config.json").is_file() or (checkpoint / "store.json").exists():
        raise UserError(
            f"a checkpoint at {checkpoint}", "another directory", "name a Hugging Face model directory"
        )
    ids: list[int] = AutoTokenizer.from_pretrained(checkpoint)(text.read_text(encoding="utf-8"))["input_ids"]
    if not ids:
        raise UserError(f"a text in {text}", "an empty file", "name another")
    return ids


def _choices(model: Any, modules: dict[str, Any], window: torch.Tensor) -> Choices:
    """Runs int64 [1, T] tokens through the model; returns the choices of every router."""
    choices: Choices = {}

    def record_layer(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        choices[layers[module]] = inputs[1], inputs[2]

    layers = {module: int(re.findall(r"\.(\d+)\.", name)[0]) for name, module in modules.items()}
    with ExitStack() as hooks, torch.inference_mode():
        for module in layers:
            hooks.callback(module.register_forward_pre_hook(record_layer).remove)
        model(window, use_cache=False, logits_to_keep=1)
    return choices


def _groups(choices: Choices, policy: LevelPolicy, prompt: int, tokens: int) -> Iterator[Group]:
    """Yields the groups of one window of `tokens` tokens, whose first `prompt` are one step."""
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
