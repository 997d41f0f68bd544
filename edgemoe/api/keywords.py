"""The keywords of `edgemoe.load`: their types, the options that they stand for, and errors in their words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, TypedDict, get_type_hints

from edgemoe.api.value_types import is_of, kind_of, with_type
from edgemoe.errors import EdgemoeError, UserError
from edgemoe.models.options.groups import Opening
from edgemoe.models.options.settings import SettingOptions

Size = str | int | None
"""A size such as "12GB", or bytes."""

Number = float | int | None


class LoadOptions(TypedDict, total=False):
    """Keywords of `edgemoe.load`. Absent and None have the default."""

    vram_limit: Size
    dram_limit: Size
    device: str
    kv_cache: str | None
    kv_cache_k: str | None
    kv_cache_v: str | None
    prefix_cache_dir: str | Path | None
    prefix_cache_limit: Size
    context: int | None
    parallel: int
    prefill_rows: int | None
    chunk: int | None
    every: int
    threads: int | None
    kernel: str
    keep_source: bool
    no_vision: bool
    plain_codes: bool
    dense_bits: int | None
    levels: str | None
    exact: int | None
    retention: Number
    bits: Number
    tpot_target: str | None
    policy: str | None
    compensate: int | None
    compensators_limit: Size
    speculate: str | None
    draft: str | None
    in_place: str | None
    lynx: bool
    lynx_alpha: Number
    lynx_beta: int | None
    hot_experts: int | None
    migration_rate: Size
    hotness: str | None
    hot_half_life: Number
    hot_interval: str | None
    hot_margin: Number
    hot_slack: int | None
    hot_trend: Number
    hot_warmup: int | None
    hot_prompt_weight: Number
    rule: str | None
    depth: str | None
    critical: str | None
    importance: str | None
    heavy_hitters: Number
    renormalise: bool
    eviction: str | None
    promotion: str | None
    scan: str | None


def checked(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The given keywords, with sizes as text as on a command line, without values that are None.

    Raises:
        UserError: an unknown keyword, or a value of another type.
    """
    hints = get_type_hints(LoadOptions)
    options: dict[str, Any] = {}
    for name, value in keywords.items():
        if name not in hints:
            near = get_close_matches(name, hints, 1)
            meant = f"did you mean {near[0]}? There are" if near else "choose one of"
            raise UserError("a keyword of edgemoe.load", repr(name), f"{meant} {', '.join(hints)}")
        if value is None:
            continue
        if not is_of(value, hints[name]):
            raise UserError(
                f"{kind_of(hints[name])} for {name}", with_type(value), f"write {_example(name, value)}"
            )
        if hints[name] == Size:
            value = f"{value}B" if isinstance(value, int) else str(value)
        options[name] = value
    return options


def _example(name: str, value: object) -> str:
    """A call's argument that would be taken, where the type alone is wrong; else the argument without its value."""
    hint = get_type_hints(LoadOptions)[name]
    if hint == Size:
        return f'{name}="12GB"'
    if isinstance("", hint) and isinstance(value, list | tuple):
        return f'{name}="{"/".join(map(str, value))}"'
    if isinstance("", hint) and isinstance(value, int | float):
        return f'{name}="{value}"'
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?", value):
        return f"{name}={value}"
    return f"{name}=True" if hint is bool else f"a number without quotes, such as {name}=8"


@contextmanager
def in_keywords() -> Iterator[None]:
    """Rewords errors of the block: an option of the command line becomes the keyword that stands for it."""
    try:
        yield
    except EdgemoeError as error:
        error.reword(reworded)
        raise


_OPTION = re.compile(r"--([a-z]+(?:-[a-z]+)*)\b(?: ([\w./-]*[\w]))?")
"""An option, and the next word, which can be its value."""


def reworded(text: str) -> str:
    """A text with keywords in the place of options; options that `edgemoe.load` does not have stay.

    >>> reworded("use --vram-limit 3GB or a smaller --context, with --exact 4 or --max-level 8")
    'use vram_limit="3GB" or a smaller context=, with exact=4 or --max-level 8'
    """
    hints = get_type_hints(LoadOptions)

    def keyword(match: re.Match[str]) -> str:
        name, word = match[1].replace("-", "_"), match[2]
        if name not in hints:
            return match[0]
        if word is not None and (word[0].isdigit() or word in _choices().get(name, ())):
            bare = re.fullmatch(r"\d+(\.\d+)?", word) and isinstance(1, hints[name])
            return f"{name}={word}" if bare else f'{name}="{word}"'
        return f"{name}=" + ("True" if hints[name] is bool else "") + (f" {word}" if word else "")

    return _OPTION.sub(keyword, text)


@cache
def _choices() -> dict[str, tuple[str, ...]]:
    """Maps options to the values that a shell completes."""
    declared = [each for group in (Opening, SettingOptions) for each in fields(group) if each.name != "model"]
    return {
        each.name: tuple(each.metadata["autocompletion"](""))
        for each in declared
        if "autocompletion" in each.metadata
    }
