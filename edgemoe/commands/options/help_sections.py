"""The sections of help for the commands with most options: `--help` prints the options to begin with."""

from __future__ import annotations

from collections.abc import Collection, Iterator

Sections = dict[str, tuple[str, ...]]
"""A section's heading -> its options, without dashes."""

_BITS = ("levels", "exact", "retention", "bits", "tpot-target", "policy")

_SOURCES = ("config", "help-all", "help")

SECTIONS: dict[str, Sections] = {
    "chat": {
        "Begin with": (
            *("model", "prompt", "system", "vram-limit", "dram-limit", "context", "max-new-tokens"),
            *("temperature", "kv-cache", "levels", "continue", "json"),
        ),
        "Conversation": ("file", "stream", "stats", "markdown"),
        "Sampling": ("thinking-budget", "top-p", "seed"),
        "Bits of experts": _BITS,
        "Machine": ("device", "threads", "prefix-cache-dir"),
        "More": _SOURCES,
    },
    "serve": {
        "Begin with": (
            *("model", "vram-limit", "dram-limit", "context", "kv-cache", "levels", "host", "port"),
            *("parallel", "api-key", "name", "prefix-cache-dir"),
        ),
        "Server": (
            *("idle-unload", "queue", "request-timeout", "thinking-budget", "api-key-file", "cors"),
            "allowed-host",
        ),
        "Bits of experts": _BITS,
        "Machine": ("device", "threads"),
        "More": _SOURCES,
    },
    "bench": {
        "Begin with": (
            *("model", "synthetic", "vram-limit", "dram-limit", "context", "levels", "prompt-tokens"),
            *("new-tokens", "runs", "batch", "ablation", "json"),
        ),
        "Measure": ("prompt-file", "quality", "full", "format", "plot", "trace"),
        "Bits of experts": _BITS,
        "Machine": ("device", "threads", "kv-cache"),
        "More": _SOURCES,
    },
}
"""Command -> its sections in order: `--help` prints the first and the last one."""

FURTHER: Sections = {
    "Further options of sampling": ("top-k", "min-p", "repeat-penalty", "stop"),
    "Further options of how answers look": ("reasoning", "no-wrap"),
    "Further options of the server": ("trusted-proxy",),
    "Further options of measurements": ("prompts", "arrival", "chunk", "every", "seed"),
    "Further options of memory and reads": (
        *("kv-cache-k", "kv-cache-v", "prefix-cache-limit", "prefill-rows", "speculate", "draft", "in-place"),
        *("eviction", "promotion", "scan"),
    ),
    "Further options of the bits of experts": (
        *(
            "compensate",
            "compensators-limit",
            "hot-experts",
            "migration-rate",
            "lynx",
            "lynx-alpha",
            "lynx-beta",
        ),
        *(
            "rule",
            "depth",
            "critical",
            "importance",
            "heavy-hitters",
            "renormalise",
            "hotness",
            "hot-half-life",
        ),
        *("hot-interval", "hot-margin", "hot-slack", "hot-trend", "hot-warmup", "hot-prompt-weight"),
    ),
    "Further options of the machine": (
        "kernel",
        "keep-source",
        "no-vision",
        "plain-codes",
        "study",
        "print-config",
    ),
}
"""The sections of --help-all after the command's own, for all commands."""


def sections_of(command: str, options: Collection[str], *, every: bool) -> Iterator[tuple[str, list[str]]]:
    """Yields the headings and options that a command prints.

    Args:
        command: one of SECTIONS.
        options: all of its options, in the order of their declaration.
        every: whether all options are printed, not only the first ones.
    """
    done = set[str]()
    first, *others, last = SECTIONS[command].items()
    for heading, names in (first, *others, *FURTHER.items(), last) if every else (first, last):
        own = [name for name in names if name in options and name not in done]
        done.update(own)
        if own:
            yield heading, own
