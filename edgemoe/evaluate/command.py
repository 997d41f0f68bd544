"""`edgemoe eval`: its options, and what is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgemoe.options import DEMO, DeviceOption, DramOption, JsonOption, ModelOption, SeedOption, VramOption
from edgemoe.sizes import parse_size
from storage.errors import UserError

if TYPE_CHECKING:
    from edgemoe.evaluate.arms import Arm
    from edgemoe.evaluate.run import EvalReport

EPILOG = (
    "Examples: edgemoe eval --model DIR --text BOOK.txt --reference CHECKPOINT "
    "| edgemoe eval --model DIR --tasks --reference CHECKPOINT --levels 4/2 --retention 0.75 "
    "| edgemoe eval --model DIR --text BOOK.txt --reference CHECKPOINT --study signals --plot kl.png --json"
)


def eval_command(
    model: ModelOption = DEMO,
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text for perplexity, KL and top-1 agreement.")
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            help="Checkpoint whose bf16 model, run by transformers, is compared with. "
            "Default: the demo model where that is measured, else none."
        ),
    ] = None,
    levels: Annotated[
        list[str] | None,
        typer.Option(
            help="A setting, as in 4/2; repeat for more. Default: 8, 4, 2, 4/2, 4/0 and, with --text, 8/4, 8/4/2/0."
        ),
    ] = None,
    retention: Annotated[
        list[float] | None,
        typer.Option(
            help="Mean share of critical experts, 0.5 to 1; repeat for more. Default: 0.75 and, with --text, 0.9, 1."
        ),
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=2, help="Most tokens of the text. Default: 4096.")] = None,
    window: Annotated[
        int | None,
        typer.Option(min=2, max=512, help="Tokens of a window of the text, each run alone. Default: 512."),
    ] = None,
    tasks: Annotated[bool, typer.Option("--tasks", help="Print the chat tasks' accuracy by kind.")] = False,
    task_count: Annotated[
        int, typer.Option(min=0, help="Held-out chat tasks of each kind, for every row of the table.")
    ] = 20,
    study: Annotated[
        list[str] | None,
        typer.Option(help="Rows beside the table: signals, depth, layers or skipping; repeat for more."),
    ] = None,
    reuse: Annotated[
        bool,
        typer.Option(
            "--reuse",
            help="Mixed settings once more, with higher planes used where they are resident; "
            "their decode rows run token by token.",
        ),
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw KL against bits read into this PNG.")] = None,
    vram_limit: VramOption = None,
    dram_limit: DramOption = None,
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure the quality of a list of settings, levels exactly as scheduled, beside the bf16 model's."""
    if reference is None and model == DEMO:
        reference = DEMO
    _check(text, reference, tasks, task_count, study, plot)
    for name, value in (("tokens", tokens), ("window", window)):
        if value is not None and text is None:
            raise UserError(
                f"--{name} {value} was wanted", "there is no text to measure on", "Give --text FILE"
            )
    vram = parse_size(vram_limit) if vram_limit is not None else None
    dram = parse_size(dram_limit) if dram_limit is not None else 0
    arms = _table(levels, retention, reuse=reuse, short=text is None)
    from edgemoe.devices import open_model
    from edgemoe.evaluate.run import EvalRequest, run_eval
    from edgemoe.evaluate.studies import study_arms

    for name in study or ():
        study_arms(name, (), 8)  # a mistake is better told before a conversion than after it
    store = open_model(model, device)
    for name in dict.fromkeys(study or ()):
        arms += study_arms(name, sorted(store.manifest.layers), store.manifest.max_level)
    report = run_eval(
        store,
        EvalRequest(
            text=text,
            reference=reference,
            tokens=tokens or 4096,
            window=window or 512,
            task_count=task_count,
            seed=seed,
            arms=tuple(arms),
            vram_limit=vram,
            dram_limit=dram,
        ),
    )
    _show(report, tasks=tasks, as_json=as_json)
    if plot is not None:
        from edgemoe.evaluate.plot import plot_kl

        plot_kl(report.rows, plot)


def _check(
    text: Path | None,
    reference: Path | None,
    tasks: bool,
    task_count: int,
    study: list[str] | None,
    plot: Path | None,
) -> None:
    """Refuses options that would have no effect, before anything is run."""
    if text is None and not tasks:
        raise UserError(
            "something to measure was wanted", "got neither --text nor --tasks", "Give one or both"
        )
    if tasks and not task_count:
        raise UserError("chat tasks were wanted", "got --task-count 0", "Give --task-count 1 or more")
    if study and text is None:
        raise UserError(
            f"--study {study[0]} was wanted", "there is no text to measure on", "Give --text FILE"
        )
    if plot is not None:
        if text is None or reference is None:
            raise UserError(
                f"a plot of KL was wanted in {plot}",
                "KL needs a text and a reference",
                "Give --text FILE and --reference CHECKPOINT",
            )
        from edgemoe.evaluate.plot import require_matplotlib

        require_matplotlib()


def _table(levels: list[str] | None, retention: list[float] | None, *, reuse: bool, short: bool) -> list[Arm]:
    """The table's settings; `short` is its default without a text."""
    from edgemoe.evaluate.studies import (
        TABLE_LEVELS,
        TABLE_RETENTIONS,
        TASK_LEVELS,
        TASK_RETENTIONS,
        table_arms,
    )
    from edgemoe.settings import parse_levels

    chosen = [parse_levels(each) for each in levels] if levels else TASK_LEVELS if short else TABLE_LEVELS
    if retention and all(len(each) == 1 for each in chosen):
        raise UserError(
            f"--retention {retention[0]} was wanted",
            "every setting has one level for all",
            "Give --levels 4/2 or another pair with it",
        )
    if reuse and all(len(each) == 1 for each in chosen):
        raise UserError(
            "--reuse was wanted",
            "every setting has one level for all",
            "Give --levels 4/2 or another pair with it",
        )
    shares = retention or (TASK_RETENTIONS if short else TABLE_RETENTIONS)
    return table_arms(list(dict.fromkeys(chosen)), list(dict.fromkeys(shares)), reuse=reuse)


def _show(report: EvalReport, *, tasks: bool, as_json: bool) -> None:
    from edgemoe.evaluate.table import claim_lines, quality_lines, task_lines

    if as_json:
        print(json.dumps(report.as_json()))
        return
    blocks = (
        quality_lines(report.rows),
        task_lines(report.rows) if tasks else [],
        claim_lines(report.claims),
    )
    print("\n\n".join("\n".join(lines) for lines in blocks if lines))
