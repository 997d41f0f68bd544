"""Options that commands share, and the settings that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from storage.errors import UserError

if TYPE_CHECKING:
    from edgemoe.policy.settings import RunSettings

DEMO = Path(__file__).parents[1] / "demo"
"""The checkpoint that comes with edgemoe, trained by tools/training/train_demo.py."""

ModelOption = Annotated[
    Path,
    typer.Option(
        "--model",
        help="A converted store; or a checkpoint's directory, a GGUF file or a model of the Hugging Face Hub "
        "(org/name[@revision]), which is converted on first use. Default: the demo model that comes with edgemoe.",
        show_default=False,
    ),
]
VramOption = Annotated[
    str | None,
    typer.Option(
        "--vram-limit",
        help="Hard limit on all memory of the model: weights, KV, workspace, experts. 12GB, 11.5GiB, 800MB or bytes. "
        "Without a GPU it is a capped arena in RAM; on a GPU the driver's memory counts too. Default: everything "
        "resident, or the machine's free memory.",
    ),
]
DramOption = Annotated[
    str | None,
    typer.Option(
        "--dram-limit", help="Hard limit on the second tier of experts, in RAM. Default: no second tier."
    ),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        help="Device to compute on: cpu, cuda, or auto, which is cuda where torch finds a GPU and Triton is installed.",
    ),
]
ExactOption = Annotated[
    int | None, typer.Option("--exact", help="Compute every expert at exactly this many bits: 8, 4 or 2.")
]
LevelsOption = Annotated[
    str | None,
    typer.Option(
        "--levels",
        help="Bits per expert from critical to sub-critical: 4/2, 4/0 (skip), 8/4, 8/4/2/0, or one level for all. "
        "Planes already in memory are used. Default: the store's highest level.",
    ),
]
RetentionOption = Annotated[
    float | None,
    typer.Option(
        "--retention", help="Mean fraction of critical experts over the layers, 0.5 to 1. Default: 0.75."
    ),
]
ImportanceOption = Annotated[
    str | None,
    typer.Option(
        "--importance",
        help="What makes an expert critical in prefill: load, heavy-hitters, heavy-hitters-mean, "
        "heavy-hitters-last, mix, gate or random. Default: gate.",
    ),
]
HeavyHittersOption = Annotated[
    float | None,
    typer.Option(
        "--heavy-hitters",
        help="Fraction of a prompt's tokens that are heavy hitters, for an --importance that counts them. "
        "Default: 0.5.",
    ),
]
EvictionOption = Annotated[
    str | None, typer.Option("--eviction", help="What leaves a full tier: lfru, lru-planes or lru-experts.")
]
SpeculateOption = Annotated[
    str | None,
    typer.Option(
        "--speculate",
        help="Look-ahead: read the experts predicted for the next layer: off, base (2 bits only), full, or "
        "auto (as long as it pays). Default: auto.",
    ),
]
CpuExpertsOption = Annotated[
    str | None,
    typer.Option(
        "--cpu-experts",
        help="With --device cuda and --dram-limit: off moves every expert that VRAM lacks; auto computes some of them "
        "in DRAM on the CPU, for each new token, if a measurement at the start finds that faster; never with "
        "--exact. Default: auto.",
    ),
]
ContextOption = Annotated[
    int | None,
    typer.Option("--context", min=2, help="Tokens of context. Default: the model's, at most 4096."),
]
KeepSourceOption = Annotated[
    bool, typer.Option("--keep-source", help="Keep the downloaded checkpoint of a Hub model, in the cache.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of everything random.")]
StoreArgument = Annotated[Path, typer.Argument(help="Store directory.")]

SPECULATE = "auto"
"""Default of --speculate. The library's own default, in RunSettings, is off."""

CPU_EXPERTS = "auto"
"""Default of --cpu-experts without --exact. The library's own default, in RunSettings, is off."""


def run_settings(
    max_level: int,
    *,
    exact: int | None = None,
    levels: str | None = None,
    retention: float | None = None,
    importance: str | None = None,
    heavy_hitters: float | None = None,
    eviction: str | None = None,
    speculate: str | None = None,
    cpu_experts: str | None = None,
) -> RunSettings:
    """Makes the settings of a command line.

    Args:
        max_level: of the store; the level of every expert where neither `exact` nor `levels` is given.
        exact ... cpu_experts: values of the options; None stands for an option's default.

    Raises:
        UserError: a value out of its range, two options that exclude each other, or an option without effect.
    """
    from edgemoe.policy.settings import RunSettings

    chosen = _given_levels(exact, levels) or (max_level,)
    if exact is not None and cpu_experts == "auto":
        raise UserError(
            f"results that do not depend on the contents of VRAM, for --exact {exact}",
            "--cpu-experts auto",
            "leave one of the two out",
        )
    ranking = {"retention": retention, "importance": importance, "heavy_hitters": heavy_hitters}
    for name, value in ranking.items():
        if value is not None and len(chosen) == 1:
            raise UserError(
                f"two or more levels for --{name.replace('_', '-')} {value}",
                f"one level for all, {chosen[0]}",
                "give --levels 4/2 or another pair with it",
            )
    others: dict[str, Any] = ranking | {
        "eviction": eviction,
        "speculate": speculate or SPECULATE,
        "cpu_experts": cpu_experts or ("off" if exact else CPU_EXPERTS),
    }
    given = {name: value for name, value in others.items() if value is not None}
    settings = RunSettings(levels=chosen, exact=exact is not None, **given)
    if heavy_hitters is not None:
        _require_heavy_hitters(settings)
    return settings


def _given_levels(exact: int | None, levels: str | None) -> tuple[int, ...] | None:
    """Parses --exact or --levels, high to low; None where neither is given."""
    from edgemoe.policy.settings import parse_levels

    if exact is not None and levels is not None:
        raise UserError(
            "either --exact or --levels",
            f"--exact {exact} and --levels {levels}",
            "leave one of the two out (--exact N computes every expert at N bits, whatever planes are in memory)",
        )
    if exact is None:
        return parse_levels(levels) if levels is not None else None
    if exact not in (8, 4, 2):
        raise UserError("a level of 8, 4 or 2 bits for --exact", str(exact), "choose one of them")
    return (exact,)


def _require_heavy_hitters(settings: RunSettings) -> None:
    from edgemoe.policy.importance import needs_attention

    if not needs_attention(settings.importance):
        raise UserError(
            f"an importance that counts heavy hitters, for --heavy-hitters {settings.heavy_hitters}",
            f"--importance {settings.importance}, which counts none",
            "give --importance heavy-hitters or mix with it",
        )
