"""Options that several commands have, and the names of models and stores behind them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgemoe.commands.options.groups import one_of

if TYPE_CHECKING:
    pass


DEMO = Path(__file__).parents[2] / "demo"
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


PrefillRowsOption = Annotated[
    int | None,
    typer.Option(
        "--prefill-rows",
        min=2,
        help="Most tokens of a prompt that go through the layers together: each such part reads every expert that it "
        "wants once, so fewer take less memory and more reads. Multiples of 512 have the same bits under --exact. "
        "Default: as many as --context, where that takes at most 5 % of the experts' bytes.",
    ),
]


ThreadsOption = Annotated[
    int | None,
    typer.Option("--threads", "-t", min=1, max=1024, help="Threads that compute. Default: one a core."),
]


KERNELS = (
    *("auto", "avx2", "avx-vnni", "avx512-vnni", "avx512-bf16", "amx"),
    *("neon", "neon-dotprod", "neon-i8mm", "torch"),
)
"""kernels.registry.NAMES, which a shell completes without importing torch."""

KernelOption = Annotated[
    str,
    typer.Option(
        "--kernel",
        metavar="NAME",
        help="Instructions that compute on the CPU: avx2, avx-vnni, avx512-vnni, avx512-bf16 or amx on x86-64, neon, "
        "neon-dotprod or neon-i8mm on aarch64, which give the same answers; torch: its kernel for experts, which "
        "rounds otherwise. auto: the fastest of this machine's but torch for each kind of work, measured once a "
        "machine; `edgemoe doctor` prints the times.",
        autocompletion=one_of(*KERNELS),
    ),
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
