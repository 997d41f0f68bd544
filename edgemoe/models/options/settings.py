"""The options of a run's settings, in groups: options that users choose, and options of studies.

None and False stand for an option that is not given.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgemoe.models.options.declared import one_of, option

POLICIES = ("dymoe", "hotness", "auto")

complete_levels = one_of("auto", "8", "4", "2", "8/4", "4/2", "4/0", "8/4/2/0")


@dataclass(frozen=True)
class LevelOptions:
    """Options of the bits of experts, on which the memory plan depends."""

    exact: int | None = option(
        "Compute every expert at exactly this many bits per weight, 8, 4 or 2: the same answer whatever is in "
        "memory.",
        autocompletion=one_of("8", "4", "2"),
    )
    levels: str | None = option(
        "Bits per weight that experts may have: one number for all (8, 4 or 2), or several from the experts "
        "that matter most to a token to the experts that matter least, such as 4/2 or 8/4/2/0; 0 leaves an expert "
        "out. Bits that are in memory already are used too. Default: auto, which is the highest that the "
        "store has where every expert fits, else 8/4/2/0 with --retention 0.9, or 4/2 for a store of 4 bits.",
        autocompletion=complete_levels,
    )
    retention: float | None = option(
        "With two levels such as 4/2: the share of a token's experts that get the higher one, above 0, at "
        "most 1, as a mean over the layers; below 0.5 with a warning. Default: 0.75. With three or more "
        "levels it stands for --bits (0.5: 3.2, 0.75: 3.5, 0.9: 3.9)."
    )
    bits: float | None = option(
        "Mean bits per weight of experts that are read from the disk, such as 3.5, instead of --retention. "
        "They go where they matter most, as `edgemoe calibrate` has measured; bits that are in memory already "
        "are used too. Without --levels: out of 8, 4, 2 and 0."
    )
    tpot_target: str | None = option(
        "Time that a token should take, such as 50ms, instead of --retention or --bits: the bits per weight "
        "change while the model runs until a token takes that long. Without --levels: out of 8, 4, 2 and 0."
    )
    policy: str | None = option(
        "What decides an expert's bits. dymoe: how much it matters to the token that is computed. hotness: "
        "how much it was used lately; with two levels such as 4/2, experts that are used often have the "
        "higher one, which is read in the background, so that no token waits for it. auto: hotness for 8 or "
        "more requests at once, where every expert fits at 2 bits and a tenth of them at 4. Default: dymoe.",
        autocompletion=one_of(*POLICIES),
    )
    compensate: int | None = option(
        "Compute this many experts of each token, the likeliest first, with their compensators: small factors "
        "that give back a part of what 2 or 4 bits cost, and that `edgemoe compensate` adds to a store. They "
        "work at the level that they were made for. Default: none."
    )
    compensators_limit: str | None = option(
        "Memory for compensators, such as 20MB, as a part of --vram-limit; the others are read with their "
        "experts. Default: all where they fit next to all experts, else a part, by how often they are used. "
        "A GPU always has all of them."
    )


@dataclass(frozen=True)
class HotLimitOptions:
    """Options of how much `--policy hotness` may keep hot and move."""

    hot_experts: int | None = option(
        "With --policy hotness: most experts per layer that have the higher level. Default: as many as fit."
    )
    migration_rate: str | None = option(
        "With --policy hotness: bytes per second that may move in the background, such as 200MB. Default: no limit."
    )


@dataclass(frozen=True)
class RunOptions(HotLimitOptions, LevelOptions):
    """Options of the settings of a run."""

    speculate: str | None = option(
        "Read ahead the experts that the next layer will probably need: off, base (their 2 bits only), full, "
        "critical (the experts that matter most), or auto (full as long as it pays). Default: auto.",
        autocompletion=one_of("off", "base", "full", "critical", "auto"),
    )
    draft: str | None = option(
        "Guess the next tokens of an answer, check the guesses in one step, and keep the right ones: the answer "
        "stays the same. ngram: the tokens that followed the last ones before, in prompt or answer, which gains where "
        "a text comes again, such as in edits of code. mtp: by the head for further tokens (multi-token prediction) "
        "that checkpoints such as GLM-4.5, Qwen3.6 and DeepSeek-V3 bring. off: no guesses. Guesses are made where "
        "they save time, by what is measured. It needs the CPU's compiled kernel and a family whose tokens run as a "
        "list of operations. Default: off.",
        autocompletion=one_of("off", "ngram", "mtp"),
    )
    in_place: str | None = option(
        "With a GPU and --dram-limit: on computes experts that lie in RAM from there, over the link; off "
        "copies each into the GPU's memory first. Default: on.",
        autocompletion=one_of("on", "off"),
    )


@dataclass(frozen=True)
class AgreementOptions:
    """Options of studies: experts that the tokens of a step agree on."""

    lynx: bool = option(
        "Where several sequences run at once: in each step their new tokens agree on fewer experts (Lynx). Each keeps "
        "its likeliest one; among experts of nearly equal scores it takes the experts that most of the others want.",
        False,
    )
    lynx_alpha: float | None = option(
        "With --lynx: how finely scores count as different; a bin is 1/alpha of a logit wide. Default: 2."
    )
    lynx_beta: int | None = option(
        "With --lynx: bins below the best expert's, 1 to 8; the last has all lower scores. Default: 4."
    )


@dataclass(frozen=True)
class RankingOptions:
    """Options of studies: how DyMoE ranks experts."""

    rule: str | None = option(
        "What decides the bits of each expert: damage, what fewer bits of it cost, as `edgemoe calibrate` has "
        "measured; or paper, DyMoE to the letter for any levels: heavy hitters in a prompt, gate weights of a new "
        "token, the cosine over depth, and with three or more levels a threshold for each; then its cache too: one "
        "pool by LRU, whole promotions, no rule for scans. Options that are given replace parts of it. Default: "
        "damage with three or more levels or --bits, else importance with our rounding and cache.",
        autocompletion=one_of("damage", "paper"),
    )
    depth: str | None = option(
        "How the fraction of critical experts falls over the layers: cosine (DyMoE) or equal. Default: cosine.",
        autocompletion=one_of("cosine", "equal"),
    )
    critical: str | None = option(
        "How a layer's number of critical experts is rounded: ceil (DyMoE), or carry, which rounds down and carries "
        "the rest to the next layer, so that the mean is --retention. Default: carry.",
        autocompletion=one_of("carry", "ceil"),
    )
    importance: str | None = option(
        "What makes an expert critical in prefill: load, heavy-hitters, heavy-hitters-mean, heavy-hitters-last, mix, "
        "gate or random. Default: gate.",
        autocompletion=one_of(
            "gate", "load", "heavy-hitters", "heavy-hitters-mean", "heavy-hitters-last", "mix", "random"
        ),
    )
    heavy_hitters: float | None = option(
        "Fraction of all tokens that are heavy hitters, for an --importance that counts them. Default: 0.5."
    )
    renormalise: bool = option(
        "Where experts are skipped, scale the gate weights of the others up to the previous sum.", False
    )


@dataclass(frozen=True)
class TierOptions:
    """Options of studies: the experts that a tier keeps and reads."""

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


@dataclass(frozen=True)
class HotRuleOptions:
    """Options of studies: how `--policy hotness` ranks experts."""

    hotness: str | None = option(
        "With --policy hotness: what makes an expert hot: mass, its gate weights, or count, the tokens that chose it. "
        "Default: mass.",
        autocompletion=one_of("mass", "count"),
    )
    hot_half_life: float | None = option(
        "With --policy hotness: tokens after which a choice counts half. Default: 64."
    )
    hot_interval: str | None = option(
        "With --policy hotness: between two looks at which experts are hot, in tokens (64t) or seconds (2s). "
        "Default: 16t."
    )
    hot_margin: float | None = option(
        "With --policy hotness: how much hotter than the coldest hot expert another one must be to take its place, as "
        "a fraction of the hot ones' mean. Default: 0.1."
    )
    hot_slack: int | None = option(
        "With --policy hotness: ranks below the last place of its layer's hot set that a hot expert must have fallen "
        "before another one takes its place (DynaExq's rank slack), next to --hot-margin. Default: 0."
    )
    hot_trend: float | None = option(
        "With --policy hotness: intervals by which the heat of an expert is extrapolated, so that experts that are "
        "about to be hot move early. Default: 0."
    )
    hot_warmup: int | None = option(
        "With --policy hotness: tokens before the first expert is hot, unless an earlier run has left its heat. "
        "Default: 16."
    )
    hot_prompt_weight: float | None = option(
        "With --policy hotness: what a token of a prompt counts, where a new token counts 1. Default: 1."
    )


@dataclass(frozen=True)
class HotnessOptions(HotRuleOptions, HotLimitOptions):
    """Options of `--policy hotness`."""


@dataclass(frozen=True)
class StudyOptions(AgreementOptions, HotRuleOptions, TierOptions, RankingOptions):
    """Options of studies, which `--study` sets where they are no options."""


@dataclass(frozen=True)
class SettingOptions(StudyOptions, RunOptions):
    """Every option of run_settings."""
