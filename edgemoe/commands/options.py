"""Options that commands share: the same name means the same everywhere."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgemoe.console.sizes import format_size, parse_size
from storage.errors import UserError

if TYPE_CHECKING:
    from edgemoe.engine.engine import StoreModel
    from edgemoe.memory.plan import MemoryPlan
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
        help="Hard limit on all the model takes: weights, KV, workspace, experts. 12GB, 11.5GiB, 800MB or bytes. "
        "Without a GPU it is a capped arena in RAM; on one the driver's own part counts as well. Default: everything "
        "resident, or what the machine has free.",
    ),
]
DramOption = Annotated[
    str | None,
    typer.Option(
        "--dram-limit", help="Hard limit on the second tier of experts, in RAM. Default: none of it."
    ),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        help="Where to compute: cpu, cuda, or auto, which is cuda where torch finds a GPU and Triton is installed.",
    ),
]
ExactOption = Annotated[
    int | None,
    typer.Option("--exact", help="Compute every expert at exactly this many bits: 8, 4 or 2."),
]
LevelsOption = Annotated[
    str | None,
    typer.Option(
        "--levels",
        help="Bits per expert from critical to sub-critical: 4/2, 4/0 (skip), 8/4, 8/4/2/0, or one level for all. "
        "Planes that are in memory already are used. Default: the store's highest level.",
    ),
]
RetentionOption = Annotated[
    float | None,
    typer.Option(
        "--retention", help="Mean share of critical experts over the layers, 0.5 to 1. Default: 0.75."
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
        help="Share of a prompt's tokens that are heavy hitters, for an --importance that counts them. Default: 0.5.",
    ),
]
EvictionOption = Annotated[
    str | None, typer.Option("--eviction", help="Who leaves a full tier: lfru, lru-planes or lru-experts.")
]
SpeculateOption = Annotated[
    str | None,
    typer.Option(
        "--speculate",
        help="Read ahead what the next layer's router will probably choose: off, base (2 bits only), full, or "
        "auto (as long as it pays). Default: auto.",
    ),
]
CpuExpertsOption = Annotated[
    str | None,
    typer.Option(
        "--cpu-experts",
        help="With --device cuda and --dram-limit: off moves every expert that VRAM lacks; auto has the CPU compute "
        "some of those in DRAM, for each new token, if that was measured at the start to be faster; never with "
        "--exact. Default: auto.",
    ),
]
ContextOption = Annotated[
    int | None,
    typer.Option("--context", min=2, help="Tokens of context. Default: the model's, at most 4096."),
]
KeepSourceOption = Annotated[
    bool, typer.Option("--keep-source", help="Keep what is downloaded from the Hub (in the cache).")
]
SPECULATE = "auto"
"""What a user who says nothing gets; settings.RunSettings, for programs, promises less: no reading ahead."""

CPU_EXPERTS = "auto"
"""The same of --cpu-experts, where nothing has to be exact."""

JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of everything random.")]


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
    """The settings that options ask for; None is the default of settings.RunSettings, or SPECULATE, CPU_EXPERTS.

    Args:
        max_level: of the store, for where no levels were asked.

    Raises:
        UserError: a value out of its range, options that exclude each other, or one that would do nothing.
    """
    from edgemoe.policy.settings import RunSettings

    chosen = _asked_levels(exact, levels) or (max_level,)
    if exact is not None and cpu_experts == "auto":
        raise UserError(
            "--cpu-experts auto was wanted",
            f"with --exact {exact} the answer may not depend on what is in VRAM",
            "Leave one of the two out",
        )
    scheduling = {"retention": retention, "importance": importance, "heavy-hitters": heavy_hitters}
    for name, value in scheduling.items():
        if value is not None and len(chosen) == 1:
            raise UserError(
                f"--{name} {value} was wanted",
                f"there is one level for all, {chosen[0]}",
                "Give --levels 4/2 or another pair with it",
            )
    others: dict[str, Any] = {
        "retention": retention,
        "importance": importance,
        "heavy_hitters": heavy_hitters,
        "eviction": eviction,
        "speculate": speculate or SPECULATE,
        "cpu_experts": cpu_experts or ("off" if exact else CPU_EXPERTS),
    }
    given = {name: value for name, value in others.items() if value is not None}
    settings = RunSettings(levels=chosen, exact=exact is not None, **given)
    if heavy_hitters is not None:
        _require_heavy_hitters(settings)
    return settings


def _asked_levels(exact: int | None, levels: str | None) -> tuple[int, ...] | None:
    """The levels of --exact or --levels, high to low; None where neither was given."""
    from edgemoe.policy.settings import parse_levels

    if exact is not None and levels is not None:
        raise UserError(
            "either --exact or --levels was wanted",
            f"got --exact {exact} and --levels {levels}",
            "--exact N is one level for all, computed as it is even where more planes are in memory",
        )
    if exact is None:
        return parse_levels(levels) if levels is not None else None
    if exact not in (8, 4, 2):
        raise UserError("a level was wanted for --exact", f"got {exact}", "Choose 8, 4 or 2")
    return (exact,)


def _require_heavy_hitters(settings: RunSettings) -> None:
    from edgemoe.policy.importance import needs_attention

    if not needs_attention(settings.importance):
        raise UserError(
            f"--heavy-hitters {settings.heavy_hitters} was wanted",
            f"--importance {settings.importance} counts none",
            "Give --importance heavy-hitters or mix with it",
        )


def parse_limits(vram_limit: str | None, dram_limit: str | None) -> tuple[int | None, int]:
    """Bytes of --vram-limit, None where none was given, and of --dram-limit.

    Raises:
        UserError: one is no size.
    """
    vram = parse_size(vram_limit) if vram_limit is not None else None
    return vram, parse_size(dram_limit) if dram_limit is not None else 0


def open_store(
    model: Path,
    choose: Callable[[int], RunSettings],
    *,
    vram_limit: str | None,
    dram_limit: str | None,
    device: str,
    context: int | None,
    keep_source: bool = False,
) -> tuple[StoreModel, MemoryPlan, RunSettings]:
    """Checks the options that commands share, opens the store and divides the limits.

    Args:
        choose: a store's highest level -> the settings asked for, as run_settings does.
    """
    vram, dram = parse_limits(vram_limit, dram_limit)
    choose(8)  # a mistake is better told before a conversion than after it
    from edgemoe.console.loading import starting

    with starting("loading torch"):
        import edgemoe.engine.engine  # noqa: F401 - all that is heavy, while the spinner turns
        from edgemoe.machine.devices import open_device, open_model

        open_device(device)
    store = open_model(model, device, keep_source=keep_source)
    settings = choose(store.manifest.max_level)
    plan = store.plan(vram_limit=vram, dram_limit=dram, settings=settings, context=context)
    return store, plan, settings


def within_memory(store: StoreModel, plan: MemoryPlan, settings: RunSettings) -> MemoryPlan:
    """The plan; or, where it needs more memory than this machine has free, a smaller one, which is told.

    Raises:
        DoesNotFit: the smallest limit that works needs more than that, too.
    """
    from edgemoe.machine.process import available_memory, resident_bytes
    from edgemoe.memory.plan import PROCESS_BYTES

    free = available_memory() - max(PROCESS_BYTES - resident_bytes(), 0)
    asked = plan.vram_limit_bytes, plan.dram_limit_bytes
    if store.device:
        limits = (
            min(asked[0], store.device.available_bytes()),
            min(asked[1], max(free - plan.staging_bytes, 0)),
        )
    else:
        limits = asked[0] - max(plan.used_bytes(store.form) - free, 0), asked[1]
    if limits == asked:
        return plan
    for wanted, there in zip(asked, limits, strict=True):
        if there < wanted:
            logging.getLogger("edgemoe").warning(
                "a limit of %s was asked for, but memory is free for one of %s: fewer experts stay there",
                format_size(wanted),
                format_size(there),
            )
    return store.plan(vram_limit=limits[0], dram_limit=limits[1], settings=settings, context=plan.context)
