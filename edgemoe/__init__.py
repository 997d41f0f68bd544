"""edgemoe runs Mixture-of-Experts language models whose experts do not fit in memory.

Its packages `edgemoe.prefetch`, `edgemoe.cache` and `edgemoe.storage` are folders next to this one in a checkout, which
links to them; a wheel installs them inside this package.

    import edgemoe

    with edgemoe.load("org/name", vram_limit="3GB") as model:
        print(model.generate([{"role": "user", "content": "Hello"}]).text)

What this module exports is the Python API (docs/api.md); torch is imported when it is used.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

if TYPE_CHECKING:
    from edgemoe.api.answers import AnswerStream
    from edgemoe.api.choices import Choices
    from edgemoe.api.keywords import LoadOptions
    from edgemoe.api.model import Model
    from edgemoe.api.prompt import Prompt
    from edgemoe.engine.generate import Answer
    from edgemoe.engine.sampling import TokenLogprobs
    from edgemoe.errors import (
        ContextExceeded,
        DamagedData,
        DoesNotFit,
        EdgemoeError,
        ModelRefused,
        UserError,
    )

__all__ = [
    "Answer",
    "AnswerStream",
    "Choices",
    "ContextExceeded",
    "DamagedData",
    "DoesNotFit",
    "EdgemoeError",
    "Model",
    "ModelRefused",
    "Prompt",
    "TokenLogprobs",
    "UserError",
    "load",
]

_PLACES = {
    "edgemoe.api.answers": ("AnswerStream",),
    "edgemoe.api.choices": ("Choices",),
    "edgemoe.api.model": ("Model",),
    "edgemoe.api.prompt": ("Prompt",),
    "edgemoe.engine.generate": ("Answer",),
    "edgemoe.engine.sampling": ("TokenLogprobs",),
    "edgemoe.errors": (
        *("ContextExceeded", "DamagedData", "DoesNotFit", "EdgemoeError", "ModelRefused", "UserError"),
    ),
}
"""Module -> the names of the API that it has."""

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """Imports a name of the API when it is first used."""
    for module, names in _PLACES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load(model: str | Path | None = None, **options: Unpack[LoadOptions]) -> Model:
    """Opens a model under limits, and converts it first where it has no store yet.

    Every option of `edgemoe serve --help-all` for models is a keyword, with `_` for `-` (retention=0.9), and so is
    every key of its --study (depth="equal").

    Args:
        model: a store, a checkpoint's directory, a GGUF file, or org/name[:quantization][@revision] of the Hugging Face
            Hub; None: the demo model.
        options: keywords of edgemoe.api.keywords.LoadOptions, among them

            - vram_limit, dram_limit: "12GB", "800MB" or bytes; by default the free memory, and no second tier.
            - device: "cpu", "cuda" or "auto".
            - context: tokens of each sequence; by default the model's, at most 4096.
            - parallel: sequences that run at once, at most 64; by default 1.
            - levels: bits per expert, "4/2" or "8/4/2/0"; "auto", the default: the store's highest level where all
              experts fit, else 8/4/2/0 at a retention of 0.9, or 4/2 for a store of 4 bits.
            - exact: compute every expert at exactly this many bits: 8, 4 or 2.
            - kv_cache: the format of keys and values: "bf16", "q8_0" or "q4_0".
            - prefix_cache_dir: a directory in which KV stays for later starts; prefix_cache_limit: "20GB" or bytes of
              its files, by default 4 GB.
            - chunk, every: tokens of a prompt in one step, and decode steps between two of them
              (engine.scheduler.Pace).

    Raises:
        UserError: no such model, an unknown keyword, or a wrong value. ModelRefused: the model cannot be run.
        DoesNotFit: a limit is too small; `minimum` is the smallest that works.
        DamagedData: the store is damaged.
    """
    from edgemoe.api.keywords import checked, in_keywords
    from edgemoe.api.load import Loading, load_model

    with in_keywords():
        return load_model(Loading.of_keywords(model, checked(options)))
