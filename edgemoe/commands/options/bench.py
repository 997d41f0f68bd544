"""The options of `edgemoe bench` alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgemoe.errors import UserError
from edgemoe.models.options.declared import one_of, option
from edgemoe.models.options.groups import (
    CodesOptions,
    ComputeOptions,
    KVOptions,
    LimitOptions,
    ModelOptions,
    SizeOptions,
)

FORMATS = ("md", "csv", "json", "jsonl")


@dataclass(frozen=True)
class PromptOptions:
    """Options that are fields of a BenchRequest."""

    prompt_file: Path | None = option(
        "Text to take prompts from. Default: conversations of the demo's tasks."
    )
    prompts: str = option(
        "text, random (tokens; their routing is not a text's), or both as arms.",
        "text",
        autocompletion=one_of("text", "random", "both"),
    )
    prompt_tokens: int = option("Tokens of each prompt.", 64, min=1)
    new_tokens: int = option("Tokens decoded after it.", 64, min=2)
    runs: int = option("Runs of each row, cold and warm, rows in turn.", 3, min=1)


@dataclass(frozen=True)
class BatchOptions:
    """Options of several requests at once."""

    batch: str | None = option(
        "Numbers of sequences at once, such as 1,2,4,8,16,32: a row each, with times from arrival, tokens/s next to "
        "the bound, and experts active in a step. --runs is the number of requests for each place."
    )
    arrival: str | None = option(
        "With --batch: closed (the next request comes when an answer ends) or poisson:RATE, in requests per second. "
        "Default: closed."
    )
    chunk: int | None = option(
        "With --batch: tokens of a prompt in one step. Default: as many as --prefill-rows where one sequence runs; "
        "where several run, at most 2048, and 128 on a GPU.",
        min=1,
    )
    every: int | None = option(
        "With --batch: decode steps between two chunks while answers run; 0: prompts first. Default: 0 with closed "
        "arrivals, so that every step has a token of each sequence; else 4.",
        min=0,
    )


@dataclass(frozen=True)
class ReportOptions:
    """Options of the rows and of the report, and of what is measured with them."""

    ablation: str | None = option(
        "Load on demand, cache, prefetch and levels, each added in its row: paper, by DyMoE's rules, or ours. Other "
        "options hold for every row that they have an effect on."
    )
    synthetic: str | None = option(
        "A model of random weights instead of --model. It is as fast as a real model of its shape: w1 (a third of "
        "Qwen3-30B-A3B's layers, 9.7 billion parameters), qwen3-30b-a3b, demo, small or tiny. The first use makes it, "
        "in the cache's folder `synthetic`, and prints its path.",
        autocompletion=one_of("w1", "qwen3-30b-a3b", "demo", "small", "tiny"),
    )
    quality: Path | None = option("Report of `edgemoe eval --json` on the same store, merged by settings.")
    plot: Path | None = option("Image file to draw the rows into.")
    trace: Path | None = option(
        "JSON file for a timeline of one more run of each row, for chrome://tracing or Perfetto: "
        "computing, waiting, copies, and reads by each reader, a lane each. Prints what new tokens wait for."
    )
    seed: int = option("Seed of everything random.", 0)
    output: str | None = option(
        "md, csv, json or jsonl. Default: md.", name="--format", autocompletion=one_of(*FORMATS)
    )
    as_json: bool = option("The same as --format json.", False, name="--json")
    full: bool = option(
        "Print all tables as Markdown, with every part of the times, bytes by tier, reads ahead and the conditions, "
        "instead of one short table.",
        False,
    )


@dataclass(frozen=True)
class BenchOptions(CodesOptions, ComputeOptions, SizeOptions, KVOptions, LimitOptions, ModelOptions):
    """Options of the model and of its limits."""


def format_of(output: str | None, as_json: bool) -> str:
    """Returns the format of --format or --json."""
    if as_json and output not in (None, "json"):
        raise UserError("one output format", f"--json and --format {output}", "leave one of them out")
    chosen = "json" if as_json else output or "md"
    if chosen not in FORMATS:
        raise UserError(f"one of {', '.join(FORMATS)} for --format", repr(chosen), "choose one of them")
    return chosen


def require_batch(batches: BatchOptions, options: ReportOptions) -> None:
    """Refuses options of batches without --batch, and options of other rows next to it."""
    if batches.batch is None:
        given = [name for name, value in vars(batches).items() if value is not None]
        action = "give --batch 1,2,4,8 with it"
    else:
        given = [name for name in ("ablation", "quality", "trace") if getattr(options, name)]
        action = "leave one of the two out"
    if given:
        needed = "--batch" if batches.batch is None else "--batch alone"
        raise UserError(f"{needed} for --{given[0]}", "none" if batches.batch is None else "both", action)
