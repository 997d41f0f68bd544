"""Measures a model that tools.training.train_demo trained, and writes its model card and figures next to it.

    python -m tools.model_card DIR

DIR is the trainer's --out. Reads DIR/run (held-out tokens, log, recipe) and DIR/model; writes README.md, loss.png,
routing.png and figures.json into DIR/model.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgemoe.errors import UserError
from tools.command_line import failed, make_parser
from tools.training.batches import Chats
from tools.training.curve import draw_curve
from tools.training.repeated_text import STRETCH, repeated_fraction
from tools.training.report import accuracy, held_out_batches, losses
from tools.training.routing import draw_routing, hot_load, loads, overlap
from tools.training.tasks import training_tasks
from tools.training.trigram import Trigram

TRIGRAM_TASKS = 100_000
"""Generated tasks that the trigram model counts: about as many as the network was trained on."""

HEADER = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [qwen3_moe, moe, edgemoe]
---
"""


@dataclass(frozen=True)
class Figures:
    """The figures of the card.

    Args:
        run: the trainer's run.json.
        last: the last line of its log.
        parameters: number of the model's parameters.
        weight_bytes: bytes of its safetensors file.
        repeated: domain -> fraction of its held-out tokens that are in the training text (repeated_text.py).
        perplexity: domain -> the model's perplexity per token on held-out tokens.
        trigram: domain -> the trigram model's perplexity on the same tokens.
        accuracy: kind of task -> fraction of `count` held-out tasks answered right.
        count: held-out tasks of each kind.
        hot_load: domain -> each layer's fraction of tokens that go to the hottest quarter of experts.
        overlap: pair of domains -> each layer's fraction of hot experts in common.
    """

    run: dict[str, Any]
    last: dict[str, Any]
    parameters: int
    weight_bytes: int
    repeated: dict[str, float]
    perplexity: dict[str, float]
    trigram: dict[str, float]
    accuracy: dict[str, float]
    count: int
    hot_load: dict[str, list[float]]
    overlap: dict[str, list[float]]


def count_trigrams(tokenizer: Any, run: Path) -> Trigram:
    """Counts the trigrams of the whole training text and of generated tasks."""
    texts = [np.load(run / f"{domain}-training.npy") for domain in ("prose", "python")]
    chats = Chats(tokenizer)
    tasks = islice(training_tasks(2), TRIGRAM_TASKS)
    return Trigram([*texts, *(np.array(chats.encode(t.turns)[0]) for t in tasks)], len(tokenizer))


def finished_run(directory: Path) -> tuple[Path, Path]:
    """The folders run and model of a trainer's --out.

    Raises:
        UserError: there is no finished run.
    """
    run, shipped = directory / "run", directory / "model"
    if not ((run / "run.json").exists() and (shipped / "model.safetensors").exists()):
        raise UserError("the --out of a finished training run", str(directory), "train first")
    return run, shipped


def measure(directory: Path, rows: int, count: int) -> Figures:
    """Measures the figures of the card on the shipped bf16 weights in float32, and draws both pictures.

    Args:
        directory: the trainer's --out.
        rows: held-out windows of each domain.
        count: held-out tasks of each kind.

    Raises:
        UserError: `directory` has no finished run.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, shipped = finished_run(directory)
    tokenizer = AutoTokenizer.from_pretrained(shipped)
    model = AutoModelForCausalLM.from_pretrained(shipped, dtype=torch.float32).eval()
    texts = {domain: np.load(run / f"{domain}-held.npy") for domain in ("prose", "python")}
    batches = held_out_batches(tokenizer, texts, rows)
    trigram = count_trigrams(tokenizer, run)
    routed = loads(model, batches)
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    draw_curve(log, shipped / "loss.png")
    draw_routing(routed, shipped / "routing.png")
    return Figures(
        run=json.loads((run / "run.json").read_text()),
        last=log[-1],
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        weight_bytes=(shipped / "model.safetensors").stat().st_size,
        repeated={
            domain: repeated_fraction(np.load(run / f"{domain}-training.npy"), held_out)
            for domain, held_out in texts.items()
        },
        perplexity={name: math.exp(loss) for name, loss in losses(model, batches).items()},
        trigram={name: math.exp(trigram.loss(each)) for name, each in batches.items()},
        accuracy=accuracy(model, tokenizer, count),
        count=count,
        hot_load={name: hot_load(load) for name, load in routed.items()},
        overlap={f"{a} / {b}": overlap(routed[a], routed[b]) for a, b in combinations(routed, 2)},
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def percents(values: Sequence[float]) -> list[str]:
    """Formats fractions as whole percentages."""
    return [f"{100 * value:.0f} %" for value in values]


def card(figures: Figures) -> str:
    """The text of README.md."""
    return HEADER + "\n".join(
        (_what(figures), _data(figures), _training(figures), _quality(figures), _routing(figures))
    )


def _what(figures: Figures) -> str:
    shape = figures.run["size"]
    return f"""# edgemoe demo model

A small mixture-of-experts chat model in the Qwen3-MoE architecture, trained from random weights on a CPU. It exists so
that edgemoe can be shown and tested without a download: it answers a few kinds of small questions in many wordings,
says of all others that it is a small demo, with an example of what to ask, and reads prose and Python well enough for
perplexities to mean something. It knows nothing else; do not use it for anything else.

{shape["layers"]} layers, hidden size {shape["hidden"]}, {shape["experts"]} experts of {shape["inner"]} in every layer,
top-{shape["top_k"]}, {shape["vocabulary"]} tokens (byte-level BPE, digits apart): {figures.parameters / 1e6:.1f} M
parameters, {figures.weight_bytes / 1e6:.1f} MB in bf16. Trained on windows of up to 512 tokens.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModelForCausalLM.from_pretrained(".")
chat = [{{"role": "user", "content": "What is the capital of France?"}}]
given = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
print(tokenizer.decode(model.generate(**given, max_new_tokens=32)[0]))
```
"""


def _data(figures: Figures) -> str:
    files = figures.run["files"]
    repeated = ", ".join(f"{name} {100 * share:.1f} %" for name, share in figures.repeated.items())
    return f"""## Data and licences
- **Prose**: {files["prose"]["training"]} books of Project Gutenberg, in the public domain in the USA;
  {files["prose"]["held_out"]} more held out whole.
- **Python**: {files["python"]["training"]} files of CPython {figures.run["versions"]["python"]}'s standard library (PSF
  licence, version 2); {files["python"]["held_out"]} more held out whole.
- **Tasks**: generated by `edgemoe/evaluate/tasks.py`, Apache-2.0 like this model. Rules (sums, sorting, comparing) are
  held out by their numbers in every wording; finite tables (times tables, capitals, spelling, reversing, Python) by one
  wording of each row, whose other wordings are trained on. Chats that continue a paragraph come from the books; they
  have no single right answer and are not scored. Neither are small talk and the refusals of all other questions
  (`tools/training/chats`), of which 200 wordings are held out for the tests.

Held-out tokens in stretches of {STRETCH} or more that the training text contains as well: {repeated}.
For these tokens the perplexity is too good.

No data was scraped, and nothing was generated by another model.
"""


def _training(figures: Figures) -> str:
    run, last, earlier = figures.run, figures.last, figures.run.get("earlier")
    commands = "\n".join([*(earlier["commands"] if earlier else []), *run["commands"]])
    before = ""
    if earlier:
        minutes = earlier["elapsed_s"] / 60
        before = f"""The last command with `--from` started from the model of the commands before it, trained for
{earlier["step"]:,} steps, {earlier["tokens"]:,} tokens and {minutes:.0f} minutes in all. From then on:
"""
    threads = f"{run['threads']} thread{'s' * (run['threads'] > 1)}"
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    return f"""## Training
```
{commands}
```
{before}Seed {run["seed"]}; {last["step"]:,} steps, {last["tokens"]:,} tokens, {last["elapsed_s"] / 60:.0f} minutes of
running time on {run["device"]} with {threads}, shared with other programs ({versions}). A step has
{run["chat_tokens"]:,} tokens of chat, of which only answers count, and {run["text_tokens"]:,} of text. AdamW, peak rate
{run["recipe"]["rate"]:g}, cosine over running time, balance loss {run["recipe"]["balance"]:g} against a running mean of
each expert's load.

![held-out loss and task accuracy](loss.png)
"""


def _quality(figures: Figures) -> str:
    domains = [
        [name, f"{value:.2f}", f"{figures.trigram[name]:.2f}"] for name, value in figures.perplexity.items()
    ]
    overall = sum(figures.accuracy.values()) / len(figures.accuracy)
    kinds = [[kind, *percents([share])] for kind, share in figures.accuracy.items()]
    return f"""## Quality
Held-out perplexity per token, of answers only for tasks. The trigram model (interpolated absolute discounting, same
tokenizer) counted the whole training text, of which the network saw a part.

{table(["domain", "this model", "trigram"], domains)}
Held-out tasks answered exactly right, greedily, {figures.count} of each kind:

{table(["kind", "right"], [*kinds, ["**all**", *percents([overall])]])}"""


def _routing(figures: Figures) -> str:
    layers = [f"layer {i}" for i in range(len(next(iter(figures.hot_load.values()))))]
    skew = [[name, *percents(values)] for name, values in figures.hot_load.items()]
    common = [[name, *percents(values)] for name, values in figures.overlap.items()]
    return f"""## Routing
Share of (token, slot) pairs that go to a domain's hottest quarter of experts; 25 % would be perfectly even:

{table(["domain", *layers], skew)}
Share of those hottest experts that two domains have in common; 25 % would be chance:

{table(["domains", *layers], common)}
![load of each expert by layer and domain](routing.png)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = make_parser("tools.model_card", __doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="the trainer's --out")
    parser.add_argument("--rows", type=int, default=64, help="held-out windows of each domain")
    parser.add_argument("--count", type=int, default=100, help="held-out tasks of each kind")
    options = parser.parse_args(argv)
    try:
        figures = measure(options.directory, options.rows, options.count)
    except UserError as error:
        return failed("tools.model_card", error)
    shipped = options.directory / "model"
    (shipped / "README.md").write_text(card(figures))
    (shipped / "figures.json").write_text(json.dumps(asdict(figures), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
