"""The options with which a model is opened, in groups that commands and `edgemoe.load` share.

None stands for an option that is not given.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgemoe.kv.formats import KINDS, KVFormat
from edgemoe.models.demo import DEMO, demo_by_name
from edgemoe.models.options.declared import one_of, option
from edgemoe.models.published.short_names import SHORT_NAMES

KERNELS = (
    *("auto", "avx2", "avx-vnni", "avx512-vnni", "avx512-bf16", "amx"),
    *("neon", "neon-dotprod", "neon-i8mm", "torch"),
)
"""kernels.registry.NAMES, which a shell completes without importing torch."""


def complete_model(incomplete: str) -> list[str]:
    """Names of models that begin so, for a shell; a shell adds paths itself where there are none."""
    names = {*(name for name in SHORT_NAMES if name.startswith(incomplete)), *complete_cached(incomplete)}
    return sorted(names)


def complete_cached(incomplete: str) -> list[str]:
    """Names of the demo and of models in the cache that begin so, for a shell."""
    from edgemoe.models.cache import cached_names

    names = {"demo", *(name.short for name in cached_names())}
    return sorted(name for name in names if name.startswith(incomplete))


@dataclass(frozen=True)
class ModelOptions:
    """The option that names the model."""

    model: Path = option(
        "The model: a short name such as qwen3 (docs/quick_start.md lists them); org/name of the Hugging Face Hub, "
        "with :Q4_K_M for a GGUF file and @revision for a version; a checkpoint's directory; a GGUF file; or a name "
        "that `edgemoe models` prints. It is downloaded and converted at its first use. Default: demo, the small model "
        "that comes with edgemoe.",
        DEMO,
        short="-m",
        show_default=False,
        callback=demo_by_name,
        autocompletion=complete_model,
    )


@dataclass(frozen=True)
class LimitOptions:
    """Options of the memory limits and of the device that they hold for."""

    vram_limit: str | None = option(
        "Hard limit on all memory of the model: weights, KV (what it keeps of a conversation), workspace and "
        "experts, such as 12GB or 11.5GiB. With a GPU it is the GPU's memory, the driver's part included; "
        "without one it is RAM. Default: what the whole model takes, or the free memory if that is less."
    )
    dram_limit: str | None = option(
        "Hard limit on a second tier of experts in RAM, such as 16GB, of use with a GPU. Default: no second "
        "tier."
    )
    device: str = option(
        "Where to compute: cpu, cuda, or auto, which is cuda where torch finds a GPU and Triton is installed.",
        "auto",
        autocompletion=one_of("auto", "cpu", "cuda"),
    )


@dataclass(frozen=True)
class KVOptions:
    """Options of the format of keys and values (KVFormat.of)."""

    kv_cache: str | None = option(
        "Form of the KV: bf16, q8_0 (8 bits, 53 % of the memory) or q4_0 (4 bits, 28 %). Default: bf16.",
        autocompletion=one_of(*KINDS),
    )
    kv_cache_k: str | None = option("The same for keys alone.", autocompletion=one_of(*KINDS))
    kv_cache_v: str | None = option("The same for values alone.", autocompletion=one_of(*KINDS))

    def kv_format(self) -> KVFormat:
        """The format that the options name; raises as KVFormat.of."""
        return KVFormat.of(self.kv_cache, self.kv_cache_k, self.kv_cache_v)


@dataclass(frozen=True)
class PrefixCacheOptions:
    """Options of KV on disk (models.options.prefix_cache)."""

    prefix_cache_dir: Path | None = option(
        "Directory in which the KV of prompts stays for later starts: a prompt that begins as an earlier one "
        "did reads it, and does not compute it. Several processes and models may share it."
    )
    prefix_cache_limit: str | None = option(
        "Hard limit on the files of that directory, such as 20GB; the least recently used files are "
        "removed. Default: 4GB."
    )


@dataclass(frozen=True)
class RowOptions:
    """Options of how many tokens of a prompt are computed together."""

    prefill_rows: int | None = option(
        "Most tokens of a prompt that are computed together. Each such part reads every expert that it needs "
        "once, so that fewer take less memory and more reads. Default: the whole context, where that takes at "
        "most 5 % of the experts' bytes; on a GPU at most 4096 and 2 %.",
        min=2,
    )


@dataclass(frozen=True)
class SizeOptions(RowOptions):
    """Options of the lengths of sequences and of steps."""

    context: int | None = option(
        "Most tokens of a prompt and its answer together. Default: the model's own, at most 4096.",
        short="-c",
        min=2,
    )


@dataclass(frozen=True)
class ComputeOptions:
    """Options of the CPU's threads and instructions."""

    threads: int | None = option(
        "Threads that compute. Default: one per core that this process or its container may use.",
        short="-t",
        min=1,
        max=1024,
    )
    kernel: str = option(
        "Instructions that compute on the CPU: avx2, avx-vnni, avx512-vnni, avx512-bf16 or amx on x86-64, neon, "
        "neon-dotprod or neon-i8mm on aarch64, which give the same answers; torch: its kernel for experts, which "
        "rounds otherwise. auto: the fastest of this machine's but torch for each kind of work, measured once a "
        "machine; `edgemoe doctor --full` prints the times.",
        "auto",
        metavar="NAME",
        autocompletion=one_of(*KERNELS),
    )


@dataclass(frozen=True)
class CodesOptions:
    """The option of how a model's codes are made, where it is converted at its first use."""

    plain_codes: bool = option(
        "Where a model is converted now, leave its codes as they are rounded. Default: they are calibrated where that "
        "takes less than 5 minutes.",
        False,
    )


@dataclass(frozen=True)
class VisionOptions:
    """The option of a model's vision tower."""

    no_vision: bool = option(
        "Leave the vision tower of a multimodal model out: its memory is free for experts, and pictures are refused.",
        False,
    )


@dataclass(frozen=True)
class Opening(
    VisionOptions, CodesOptions, ComputeOptions, SizeOptions, KVOptions, LimitOptions, ModelOptions
):
    """A model and the options with which it is opened, but for its settings."""

    parallel: int = 1
    """Sequences that run at once."""
    keep_source: bool = option("Keep the downloaded checkpoint of a Hub model, in the cache.", False)
    dense_bits: int | None = None
    """Bits of the dense weights, where the model is converted."""


@dataclass(frozen=True)
class ParallelOptions:
    """The option of several sequences at once."""

    parallel: int = option(
        "Sequences that run at once, at most 64, each with a KV for all of --context.", 1, min=1
    )


@dataclass(frozen=True)
class SharedOpening(ParallelOptions, Opening):
    """An opening for several sequences at once."""


@dataclass(frozen=True)
class PlanOptions(VisionOptions, ParallelOptions, SizeOptions, KVOptions, LimitOptions, ModelOptions):
    """The part of an opening on which a memory plan depends."""
