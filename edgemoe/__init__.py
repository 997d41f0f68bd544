"""edgemoe runs Mixture-of-Experts language models whose experts do not fit in memory.

Its packages `edgemoe.prefetch`, `edgemoe.cache` and `edgemoe.storage` are folders next to this one in a checkout, which
links to them; a wheel installs them inside this package.

    import edgemoe

    with edgemoe.load("org/name", vram_limit="3GB") as model:
        print(model.generate([{"role": "user", "content": "Hello"}]).text)

What this module exports is the Python API (docs/api.md); torch is imported when it is used.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgemoe.api.model import AnswerStream, Choices, Model, Prompt
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
    "edgemoe.api.model": ("AnswerStream", "Choices", "Model", "Prompt"),
    "edgemoe.engine.generate": ("Answer",),
    "edgemoe.engine.sampling": ("TokenLogprobs",),
    "edgemoe.errors": (
        *("ContextExceeded", "DamagedData", "DoesNotFit", "EdgemoeError", "ModelRefused", "UserError"),
    ),
}
"""Module -> the names of the API that it has."""

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Imports a name of the API when it is first used."""
    for module, names in _PLACES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load(
    model: str | Path | None = None,
    *,
    vram_limit: str | int | None = None,
    dram_limit: str | int | None = None,
    device: str = "auto",
    kv_cache: str | None = None,
    kv_cache_k: str | None = None,
    kv_cache_v: str | None = None,
    prefix_cache_dir: str | Path | None = None,
    prefix_cache_limit: str | int | None = None,
    context: int | None = None,
    parallel: int = 1,
    prefill_rows: int | None = None,
    levels: str | None = "auto",
    exact: int | None = None,
    chunk: int | None = None,
    every: int = 4,
    threads: int | None = None,
    kernel: str = "auto",
    keep_source: bool = False,
    **settings: Any,
) -> Model:
    """Opens a model under limits, and converts it first where it has no store yet.

    Args:
        model: a store, a checkpoint's directory, a GGUF file, or org/name[:quantization][@revision] of the Hugging Face
            Hub; None: the demo model.
        vram_limit, dram_limit: "12GB", "800MB" or bytes, as --vram-limit and --dram-limit; None: no limit but the free
            memory, and no second tier.
        device: cpu, cuda or auto.
        kv_cache, kv_cache_k, kv_cache_v: the format of keys and values, and of either alone: "bf16", "q8_0" or "q4_0";
            None: bf16.
        prefix_cache_dir: directory in which KV stays for later starts; None: it ends with the model.
        prefix_cache_limit: "20GB" or bytes of that directory's files; None: 4 GB.
        context: tokens of each sequence; None: the model's, at most 4096.
        parallel: sequences that run at once, at most 64.
        prefill_rows: most tokens of a prompt that go through the layers together; None: as many as the context, where
            that costs little memory.
        levels: bits per expert, "4/2" or "8/4/2/0"; "auto": the store's highest level where all experts fit, else
            8/4/2/0 at a retention of 0.9, or 4/2 for a store of 4 bits.
        exact: compute every expert at exactly this many bits: 8, 4 or 2.
        chunk, every: tokens of a prompt in one step, and decode steps between two of them (engine.scheduler.Pace).
        threads: that compute; None: one a core.
        kernel: of the CPU, as --kernel.
        keep_source: keep the downloaded checkpoint of a Hub model.
        settings: options of `edgemoe serve --help`: retention=0.9, speculate="off", ...

    Raises:
        UserError: no such model, or a wrong option. ModelRefused: it cannot be run.
        DoesNotFit: a limit is too small; `minimum` is the smallest that works.
        DamagedData: the store is damaged.
    """
    from edgemoe.commands.options import DEMO, demo_by_name, require_several
    from edgemoe.commands.options import run_settings as chosen
    from edgemoe.commands.options.prefix_cache import open_prefix_cache, require_directory
    from edgemoe.models.open import open_store

    directory = Path(prefix_cache_dir) if prefix_cache_dir is not None else None
    most = require_directory(directory, None if prefix_cache_limit is None else str(prefix_cache_limit))
    given = settings | {"levels": None if exact is not None and levels == "auto" else levels, "exact": exact}
    store, plan, run = open_store(
        demo_by_name(Path(model)) if model is not None else DEMO,
        partial(chosen, **given),
        vram_limit=None if vram_limit is None else str(vram_limit),
        dram_limit=None if dram_limit is None else str(dram_limit),
        device=device,
        kv_cache=kv_cache,
        kv_cache_k=kv_cache_k,
        kv_cache_v=kv_cache_v,
        context=context,
        parallel=parallel,
        prefill_rows=prefill_rows,
        threads=threads,
        kernel=kernel,
        keep_source=keep_source,
        shrink=True,
    )
    require_several(run, parallel, "parallel=8")
    from edgemoe.machine.model_code import without_compiler

    with without_compiler():
        from edgemoe.api.model import Model
        from edgemoe.engine.engine import Engine
        from edgemoe.engine.sampling import Sampling
        from edgemoe.engine.scheduler import Pace
        from edgemoe.models.runnable import generation_config
        from edgemoe.models.tokenizer import load_tokenizer

    pace, tokenizer = Pace(chunk, every), load_tokenizer(store.directory)
    sampling = Sampling.of_model(
        generation_config(store.directory),
        tokenizer.eos_token_id,
        temperature=None,
        top_p=None,
        seed=0,
        max_new_tokens=512,
    )
    disk = open_prefix_cache(store, directory, most) if directory else None
    return Model(Engine(store, plan, run), tokenizer, sampling, pace, keep=True, disk=disk)
