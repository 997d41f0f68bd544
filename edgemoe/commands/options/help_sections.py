"""The sections that `--help` prints for the commands with most options: the options that matter first.

The other options of these commands are taken as well; `--help-all` prints all of them.
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
}
"""Command -> its sections in order."""


def sections_of(command: str, options: Collection[str], *, every: bool) -> Iterator[tuple[str, list[str]]]:
    """Yields the headings and options that a command prints.

    Args:
        command: one of SECTIONS.
        options: all of its options, in the order of their declaration.
        every: whether options outside the sections follow, under a heading of their own.
    """
    sections = SECTIONS[command]
    for heading, names in sections.items():
        yield heading, [name for name in names if name in options]
    left = [name for name in options if not any(name in names for names in sections.values())]
    if every:
        yield "Further options", left
