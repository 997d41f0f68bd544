"""Options that commands share, and the settings that they stand for."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgemoe.commands.option_groups import one_of, option
from edgemoe.console.durations import parse_duration
from edgemoe.console.sizes import parse_size
from storage.base import LEVELS
from storage.errors import UserError

if TYPE_CHECKING:
    from edgemoe.policy.compensation import Compensation
    from edgemoe.policy.hotness import Hotness
    from edgemoe.policy.remapping import Remapping
    from edgemoe.policy.settings import RunSettings

DEMO = Path(__file__).parents[1] / "demo"
"""The checkpoint that comes with edgemoe, trained by tools/training/train_demo.py."""


def demo_by_name(given: Path) -> Path:
    """The demo model for the name `demo`, unless there is such a path."""
    return DEMO if given == Path("demo") and not given.exists() else given


def named_store(given: Path) -> Path:
    """The directory of the store that an argument names; the demo model is converted, where it is not yet.

    Raises:
        UserError: from store_path.
    """
    from edgemoe.models.cache import cached_names, store_path

    # Beside the store of an earlier version's demo the name alone says too little.
    demo = demo_by_name(given) == DEMO
    if demo and sum(name.directory.startswith("demo-") for name in cached_names()) != 1:
        from edgemoe.models.resolve import resolve_store

        return resolve_store(DEMO)
    return store_path(given)


def complete_model(incomplete: str) -> list[str]:
    """Names of models that begin so, for a shell; a shell adds paths itself where there are none."""
    from edgemoe.models.cache import cached_names

    names = {"demo", *(name.short for name in cached_names())}
    return sorted(name for name in names if name.startswith(incomplete))


def check_template(directory: Path) -> None:
    """Refuses a chat template that cannot be rendered; imports what renders it."""
    from edgemoe.api.template import check_template
    from edgemoe.models.tokenizer import load_tokenizer

    check_template(load_tokenizer(directory))


ModelOption = Annotated[
    Path,
    typer.Option(
        "--model",
        "-m",
        help="A name that `edgemoe models` prints, or its beginning; a converted store; or a checkpoint's directory, a "
        "GGUF file or a model of the Hugging Face Hub (org/name[:quantization][@revision], the quantization that of a "
        "GGUF file), which is converted on first use; a conversion of it in another process is waited for. Default: "
        "demo, the model that comes with edgemoe.",
        show_default=False,
        callback=demo_by_name,
        autocompletion=complete_model,
    ),
]
ContextOption = Annotated[
    int | None,
    typer.Option("--context", "-c", min=2, help="Tokens of context. Default: the model's, at most 4096."),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option("--threads", "-t", min=1, max=1024, help="Threads that compute. Default: one a core."),
]
ParallelOption = Annotated[
    int,
    typer.Option(
        "--parallel",
        min=1,
        help="Sequences that run at once, at most 64, each with a KV for all of --context.",
    ),
]
KeepSourceOption = Annotated[
    bool, typer.Option("--keep-source", help="Keep the downloaded checkpoint of a Hub model, in the cache.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout.")]
StoreArgument = Annotated[
    Path,
    typer.Argument(
        help="Store directory, or a name that `edgemoe models` prints, or its beginning.",
        autocompletion=complete_model,
    ),
]


DEPTH_HELP = (
    "How the fraction of critical experts falls over the layers: cosine (DyMoE) or equal. Default: cosine."
)
CRITICAL_HELP = (
    "How a layer's number of critical experts is rounded: ceil (DyMoE), or carry, which rounds down and carries the "
    "rest to the next layer, so that the mean is --retention. Default: carry."
)
IMPORTANCE_HELP = (
    "What makes an expert critical in prefill: load, heavy-hitters, heavy-hitters-mean, heavy-hitters-last, mix, gate "
    "or random. Default: gate."
)
HEAVY_HITTERS_HELP = (
    "Fraction of all tokens that are heavy hitters, for an --importance that counts them. Default: 0.5."
)
RENORMALISE_HELP = "Where experts are skipped, scale the gate weights of the others up to the previous sum."

POLICIES = ("dymoe", "hotness", "auto")
POLICY_HELP = (
    "What decides an expert's bits: dymoe (the gate weights of the tokens that want it, in every step), or hotness "
    "(DynaExq: how much it was wanted lately; of two levels such as 4/2 hot experts have the higher one, which comes "
    "in the background, so that no token waits for it). auto: hotness for 8 or more sequences at once, where every "
    "expert fits at 2 bits and a tenth of them at 4. Default: dymoe."
)

COMPENSATE_HELP = (
    "Compute this many experts of each token, the likeliest first, with their low-rank compensators, which `edgemoe "
    "compensate` adds to a store: those that run at the bits whose errors these are of, such as with --levels 2 or "
    "4/2. The compensators stay in memory. Default: none."
)

complete_levels = one_of("auto", "8", "4", "2", "8/4", "4/2", "4/0", "8/4/2/0")
complete_depth = one_of("cosine", "equal")
complete_critical = one_of("carry", "ceil")
complete_importance = one_of(
    "gate", "load", "heavy-hitters", "heavy-hitters-mean", "heavy-hitters-last", "mix", "random"
)

AUTO_RETENTION = 0.9
"""Of automatic levels where not every expert fits."""


@dataclass(frozen=True)
class LimitOptions:
    """Options of the limits and of the device that they hold for."""

    vram_limit: str | None = option(
        "Hard limit on all memory of the model: weights, KV, workspace, experts. 12GB, 12G, 11.5GiB or bytes. "
        "Without a GPU it is a capped arena in RAM; on a GPU the driver's memory counts too. Default: everything "
        "resident, or the machine's free memory."
    )
    dram_limit: str | None = option(
        "Hard limit on the second tier of experts, in RAM. Default: no second tier."
    )
    device: str = option(
        "Device to compute on: cpu, cuda, or auto, which is cuda where torch finds a GPU and Triton is installed.",
        "auto",
        autocompletion=one_of("auto", "cpu", "cuda"),
    )


@dataclass(frozen=True)
class LevelOptions:
    """Options of the levels: those of run_settings that a memory plan depends on."""

    exact: int | None = option(
        "Compute every expert at exactly this many bits: 8, 4 or 2.", autocompletion=one_of("8", "4", "2")
    )
    levels: str | None = option(
        "Bits per expert from critical to sub-critical: 4/2, 4/0 (skip), 8/4, 8/4/2/0, or one level for all. "
        "Planes already in memory are used. auto, the default: the store's highest level where every expert fits, else "
        "8/4/2/0 at --retention 0.9, or 4/2 for a store of 4 bits.",
        autocompletion=complete_levels,
    )
    retention: float | None = option(
        "Mean fraction of critical experts over the layers, above 0, at most 1; below 0.5 with a warning. "
        "Default: 0.75. With three or more levels it stands for bits: 0.5 for 3.2 a weight, 0.75 for 3.5, 0.9 for 3.9."
    )
    bits: float | None = option(
        "Mean bits a weight of experts, such as 3.5, instead of --retention. Each expert of a token gets the level "
        "that costs least, by what `edgemoe calibrate` has measured. Without --levels: out of 8, 4, 2 and 0."
    )
    tpot_target: str | None = option(
        "Time that a new token should take, such as 50ms, instead of --retention or --bits: the bits a weight change "
        "while the model runs until this machine meets it under this limit. Without --levels: out of 8, 4, 2 and 0."
    )
    depth: str | None = option(DEPTH_HELP, autocompletion=complete_depth)
    critical: str | None = option(CRITICAL_HELP, autocompletion=complete_critical)
    policy: str | None = option(POLICY_HELP, autocompletion=one_of(*POLICIES))
    compensate: int | None = option(COMPENSATE_HELP)


@dataclass(frozen=True)
class HotnessOptions:
    """Options of precision by hotness."""

    hotness: str | None = option(
        "With --policy hotness: what makes an expert hot: mass, its gate weights, or count, the tokens that chose it. "
        "Default: mass.",
        autocompletion=one_of("mass", "count"),
    )
    hot_half_life: float | None = option(
        "With --policy hotness: tokens after which a choice counts half. Default: 64."
    )
    hot_interval: str | None = option(
        "With --policy hotness: between two looks at who is hot, in tokens (64t) or seconds (2s). Default: 16t."
    )
    hot_margin: float | None = option(
        "With --policy hotness: how much hotter than the coldest hot expert another one must be to take its place, as "
        "a fraction of the hot ones' mean. Default: 0.1."
    )
    hot_warmup: int | None = option(
        "With --policy hotness: tokens before the first expert is hot, unless an earlier run has left its heat. "
        "Default: 16."
    )
    hot_prompt_weight: float | None = option(
        "With --policy hotness: what a token of a prompt counts beside a new token. Default: 1."
    )
    hot_experts: int | None = option(
        "With --policy hotness: most hot experts of a layer. Default: as many as fit."
    )
    migration_rate: str | None = option(
        "With --policy hotness: bytes a second that may move in the background, such as 200MB. Default: no limit."
    )


@dataclass(frozen=True)
class SettingOptions(HotnessOptions, LevelOptions):
    """Options of run_settings. None stands for an option's default."""

    importance: str | None = option(IMPORTANCE_HELP, autocompletion=complete_importance)
    heavy_hitters: float | None = option(HEAVY_HITTERS_HELP)
    renormalise: bool = option(RENORMALISE_HELP, False)
    eviction: str | None = option(
        "What leaves a full tier: lfru, lru-planes, lru-experts, or lru-pool (DyMoE: whole experts of all levels in "
        "one pool of bytes). Default: lfru.",
        autocompletion=one_of("lfru", "lru-planes", "lru-experts", "lru-pool"),
    )
    promotion: str | None = option(
        "What is read of an expert that is in memory at fewer bits: planes, the missing ones, or whole (DyMoE), all of "
        "it. Default: planes.",
        autocompletion=one_of("planes", "whole"),
    )
    scan: str | None = option(
        "on: experts of a prompt that wants most of a layer's leave first. off (DyMoE): they count as any others. "
        "Default: on.",
        autocompletion=one_of("on", "off"),
    )
    speculate: str | None = option(
        "Look-ahead: read the experts predicted for the next layer: off, base (2 bits only), full, critical (DyMoE: "
        "the critical ones), or auto (full as long as it pays). Default: auto.",
        autocompletion=one_of("off", "base", "full", "critical", "auto"),
    )
    in_place: str | None = option(
        "With --device cuda and --dram-limit: on computes experts that only DRAM has from where they lie, over the "
        "link; off copies each of them into VRAM first. Default: on.",
        autocompletion=one_of("on", "off"),
    )


@dataclass(frozen=True)
class StepSettingOptions(SettingOptions):
    """Options of run_settings where several sequences may share a step: those of a single one, and --lynx."""

    lynx: bool = option(
        "Where several sequences run at once: in each step their new tokens agree on fewer experts (Lynx). Each keeps "
        "its likeliest one; among experts of nearly equal scores it takes those that most of the others want.",
        False,
    )
    lynx_alpha: float | None = option(
        "With --lynx: how finely scores count as different; a bin is 1/alpha of a logit wide. Default: 2."
    )
    lynx_beta: int | None = option(
        "With --lynx: bins below the best expert's, 1 to 8; the last has all lower scores. Default: 4."
    )


def run_settings(max_level: int, *, fits: bool = True, hot: bool = False, **options: Any) -> RunSettings:
    """Makes the settings of a command line.

    Args:
        max_level: of the store.
        fits: all experts fit at that level, which they get then where levels are automatic.
        hot: --policy auto is hotness, where levels allow it.
        options: fields of StepSettingOptions.

    Raises:
        UserError: a value out of its range, two options that exclude each other, or an option without effect.
    """
    from edgemoe.policy.settings import RunSettings

    given = StepSettingOptions(**options)
    levels, exact = _given_levels(given.exact, given.levels), given.exact is not None
    chosen = {name: value for name, value in vars(given).items() if value is not None}
    remapping, compensation = take_remapping(chosen), take_compensation(chosen, levels)
    rivals = require_one_mean(chosen)
    two = levels is None or (len(levels) == 2 and 0 not in levels)
    hotness = take_hotness(chosen, automatic=hot and two and not rivals and max_level > 2)
    if levels is None:
        if hotness and (rivals or max_level == 2):
            found = f"--{rivals[0].replace('_', '-')}" if rivals else "a store of 2 bits"
            raise UserError(
                "two levels that follow hotness, for --policy hotness", found, "leave one of them out"
            )
        levels, more = _automatic(max_level, rivals, fits=fits) if fits or not hotness else ((4, 2), {})
        hotness = hotness if len(levels) > 1 else None
        chosen |= more
    if len(levels) == 1:
        require_no_ranking(chosen, f"one level for all, {levels[0]}")
    elif hotness:
        require_no_ranking(chosen, "--policy hotness, which ranks by use alone")
    if given.tpot_target is not None:
        chosen["tpot_target"] = parse_duration(given.tpot_target)
    # The library's own default, in RunSettings, is off.
    own = {"levels": levels, "exact": exact, "remapping": remapping, "compensation": compensation}
    settings = RunSettings(**{"speculate": "auto"} | chosen | own, hotness=hotness)
    require_signals(settings, chosen)
    require_effect(settings, chosen)
    warn_of_doubt(settings)
    return settings


def take_remapping(chosen: dict[str, Any]) -> Remapping | None:
    """Takes the options of --lynx out of `chosen`, option's name -> value, and makes the setting of them.

    Raises:
        UserError: one of them without --lynx, or out of its range.
    """
    from edgemoe.policy.remapping import Remapping

    names = {"lynx_alpha": "alpha", "lynx_beta": "bins"}
    given = {names[name]: chosen.pop(name) for name in names if chosen.get(name) is not None}
    if chosen.pop("lynx", False):
        return Remapping(**given)
    if given:
        option = "--lynx-alpha" if "alpha" in given else "--lynx-beta"
        raise UserError(f"--lynx for {option}", "none", "give --lynx too, or leave it out")
    return None


def take_compensation(chosen: dict[str, Any], levels: tuple[int, ...] | None) -> Compensation | None:
    """Takes --compensate out of `chosen`, option's name -> value, and makes the setting of it.

    Args:
        chosen: changed.
        levels: given ones; None: automatic.

    Raises:
        UserError: automatic levels, which may leave out the compensators' own, or a number out of its range.
    """
    from edgemoe.policy.compensation import Compensation

    count = chosen.pop("compensate", None)
    if count is None:
        return None
    if levels is None and not {"bits", "tpot_target"} & {*chosen}:
        wanted = f"levels that the store's compensators are of, for --compensate {count}"
        raise UserError(wanted, "automatic levels", "give --levels 4/2 with it")
    return Compensation(count)


def take_hotness(chosen: dict[str, Any], *, automatic: bool) -> Hotness | None:
    """Takes the options of --policy out of `chosen`, option's name -> value, and makes the setting of them.

    Args:
        chosen: changed.
        automatic: whether --policy auto is hotness.

    Raises:
        UserError: no such policy, an option of another policy, or one out of its range.
    """
    from edgemoe.policy.hotness import Hotness

    policy = chosen.pop("policy", None) or POLICIES[0]
    if policy not in POLICIES:
        raise UserError(f"--policy {' or '.join(POLICIES)}", repr(policy), "choose one of them")
    given = {f.name: chosen.pop(f.name) for f in fields(HotnessOptions) if chosen.get(f.name) is not None}
    if policy == POLICIES[0]:
        if given:
            option = f"--{next(iter(given)).replace('_', '-')}"
            raise UserError(
                f"--policy hotness for {option}", "--policy dymoe", "give it, or leave the other out"
            )
        return None
    if policy == "auto" and not automatic:
        return None
    named = {name.removeprefix("hot_"): value for name, value in given.items()}
    if "hotness" in named:
        named["signal"] = named.pop("hotness")
    if "migration_rate" in named:
        named["rate"] = float(parse_size(named.pop("migration_rate")))
    if (interval := named.pop("interval", None)) is not None:
        tokens = interval.removesuffix("t")
        by_token = interval.endswith("t") and tokens.isdecimal()
        named |= (
            {"interval": int(tokens)} if by_token else {"interval": 0, "seconds": parse_duration(interval)}
        )
    return Hotness(**named)


def require_several(settings: RunSettings, sequences: int, option: str) -> None:
    """Refuses --lynx where only one sequence runs at a time.

    Args:
        settings: of the command.
        sequences: at once.
        option: of the command, that makes them more.
    """
    if settings.remapping and sequences == 1:
        raise UserError("several sequences at once, for --lynx", "one", f"give {option}, or leave --lynx out")


def require_one_mean(chosen: Mapping[str, Any]) -> list[str]:
    """Returns which of retention, bits and wanted time is given; refuses two of them."""
    rivals = [name for name in ("retention", "bits", "tpot_target") if name in chosen]
    if len(rivals) > 1:
        found = " and ".join(f"--{name.replace('_', '-')} {chosen[name]}" for name in rivals)
        raise UserError("one of --retention, --bits and --tpot-target", found, "leave the others out")
    return rivals


def levels_are_automatic(given: LevelOptions) -> bool:
    """Whether run_settings chooses the levels by what fits."""
    others = given.exact, given.bits, given.tpot_target
    return given.levels in (None, "auto") and others == (None, None, None)


def describe_levels(given: LevelOptions, settings: RunSettings) -> list[str]:
    """A line on automatic levels, for people; none where they were given."""
    if not levels_are_automatic(given):
        return []
    some = len(settings.levels) > 1
    why = f"not every expert fits at {settings.levels[0]} bits" if some else "every expert fits"
    return [f"levels auto: {settings.name}, since {why}"]


def _automatic(max_level: int, rivals: list[str], *, fits: bool) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Levels where none are given, and the settings that go with them."""
    every = tuple(level for level in LEVELS if level <= max_level)
    if {"bits", "tpot_target"} & {*rivals}:
        return every, {}
    if fits or max_level == 2:
        return (max_level,), {}
    return every if max_level == 8 else (4, 2), {"retention": AUTO_RETENTION}


def require_no_ranking(chosen: Mapping[str, Any], found: str) -> None:
    """Refuses options that rank experts.

    Args:
        chosen: option's name -> value; None and False: not given.
        found: why they have no effect, for the error.
    """
    from edgemoe.policy.settings import RANKING

    for name in RANKING:
        if chosen.get(name) not in (None, False):
            option = f"--{name.replace('_', '-')}"
            wanted = f"{option} {chosen[name]}" if name != "renormalise" else option
            raise UserError(
                f"two or more levels for {wanted}", found, "give --levels 4/2 or another pair with it"
            )


def require_signals(settings: RunSettings, chosen: Mapping[str, Any]) -> None:
    """Refuses signals of importance where levels go by damage."""
    for name in ("importance", "heavy_hitters"):
        if name in chosen and settings.priced:
            raise UserError(
                f"two levels that go by retention, for --{name.replace('_', '-')} {chosen[name]}",
                f"{settings.name}, which goes by damage",
                "leave that option out, or give --levels 4/2 without --bits",
            )


def require_effect(settings: RunSettings, chosen: Mapping[str, Any]) -> None:
    """Refuses a fraction of heavy hitters that is not counted, and --renormalise where no expert is skipped."""
    from edgemoe.policy.importance import needs_attention

    if chosen.get("heavy_hitters") is not None and not needs_attention(settings.importance):
        raise UserError(
            f"an importance that counts heavy hitters, for --heavy-hitters {settings.heavy_hitters}",
            f"--importance {settings.importance}, which counts none",
            "give --importance heavy-hitters or mix with it",
        )
    if settings.renormalise and 0 not in settings.levels:
        raise UserError(
            "levels that skip experts, for --renormalise",
            "/".join(map(str, settings.levels)),
            "give --levels 4/0 or another list that ends with 0, or leave --renormalise out",
        )


def warn_of_doubt(settings: RunSettings) -> None:
    """Logs the doubt about settings, if there is one; each once a process."""
    if settings.doubt:
        _warn(settings.doubt)


@cache
def _warn(sentence: str) -> None:
    logging.getLogger("edgemoe").warning("%s", sentence)


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
        return parse_levels(levels) if levels not in (None, "auto") else None
    if exact not in (8, 4, 2):
        raise UserError("a level of 8, 4 or 2 bits for --exact", str(exact), "choose one of them")
    return (exact,)
