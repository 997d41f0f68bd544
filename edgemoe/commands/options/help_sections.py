"""The sections that `--help` prints for the commands with most options: the options that matter first.

The other options of these commands are taken as well; `--help-all` prints all of them, in further sections.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

Sections = dict[str, tuple[str, ...]]
"""A section's heading -> its options, without dashes."""

_BITS = ("levels", "exact", "retention", "bits", "tpot-target", "policy")

_EVERYWHERE = ("study", "config", "help-all", "help")

SECTIONS: dict[str, Sections] = {
    "chat": {
        "Begin with": ("model", "prompt", "vram-limit", "dram-limit", "context"),
        "Conversation": ("system", "file", "continue", "json", "stream", "stats", "markdown"),
        "Sampling": ("max-new-tokens", "temperature", "top-p", "seed"),
        "Bits of experts": _BITS,
        "Machine": ("device", "threads", "kv-cache", "prefix-cache-dir"),
        "More": _EVERYWHERE,
    },
    "serve": {
        "Begin with": ("model", "vram-limit", "dram-limit", "context", "port"),
        "Server": (
            *("host", "name", "parallel", "queue", "request-timeout"),
            *("api-key", "api-key-file", "cors", "allowed-host"),
        ),
        "Bits of experts": (*_BITS, "lynx"),
        "Machine": ("device", "threads", "kv-cache", "prefix-cache-dir"),
        "More": _EVERYWHERE,
    },
    "bench": {
        "Begin with": ("model", "synthetic", "vram-limit", "dram-limit", "context"),
        "Measure": (
            *("prompt-file", "prompt-tokens", "new-tokens", "runs", "batch", "ablation", "quality"),
            *("full", "format", "json", "plot", "trace"),
        ),
        "Bits of experts": _BITS,
        "Machine": ("device", "threads", "kv-cache"),
        "More": _EVERYWHERE,
    },
}
"""Command -> its sections in order."""

FURTHER: Sections = {
    "Further options of sampling": ("top-k", "min-p", "repeat-penalty", "stop"),
    "Further options of how answers look": ("reasoning", "no-wrap"),
    "Further options of the server": ("trusted-proxy",),
    "Further options of measurements": ("prompts", "arrival", "chunk", "every", "seed"),
    "Further options of memory and reads": (
        *("kv-cache-k", "kv-cache-v", "prefix-cache-limit", "prefill-rows", "speculate", "in-place"),
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
        *("depth", "critical", "importance", "heavy-hitters", "renormalise", "hotness", "hot-half-life"),
        *("hot-interval", "hot-margin", "hot-warmup", "hot-prompt-weight"),
    ),
    "Further options of the machine": ("kernel", "keep-source", "print-config"),
}
"""The sections of --help-all after the command's own, for all commands."""


def sections_of(command: str, options: Collection[str], *, every: bool) -> Iterator[tuple[str, list[str]]]:
    """Yields the headings and options that a command prints.

    Args:
        command: one of SECTIONS.
        options: all of its options, in the order of their declaration.
        every: whether the sections of FURTHER follow.
    """
    first = {name for names in SECTIONS[command].values() for name in names}
    for heading, names in SECTIONS[command].items():
        yield heading, [name for name in names if name in options]
    for heading, names in FURTHER.items() if every else ():
        further = [name for name in names if name in options and name not in first]
        if further:
            yield heading, further
