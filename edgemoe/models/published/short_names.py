"""Short names of models on the Hub whose files have 4 bits per weight, for a first try."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ShortName:
    """A model to begin with.

    Args:
        repository: organisation/name on the Hub, with the quantization of a GGUF file.
        gigabytes: the size of its download in GB.
        published: the model of published.sizes with the same sizes.
    """

    repository: str
    gigabytes: float
    published: str

    @property
    def gguf(self) -> bool:
        """Whether it is a GGUF file, whose tensors have the types of published.q4_k_m."""
        return ":" in self.repository


SHORT_NAMES = {
    "olmoe": ShortName("allenai/OLMoE-1B-7B-0924-Instruct-GGUF:Q4_K_M", 4.2, "OLMoE-1B-7B"),
    "gpt-oss": ShortName("openai/gpt-oss-20b", 13.8, "gpt-oss-20b"),
    "gemma-4": ShortName("unsloth/gemma-4-26B-A4B-it-GGUF:UD-Q4_K_M", 17, "Gemma-4-26B-A4B"),
    "glm-4.7": ShortName("unsloth/GLM-4.7-Flash-GGUF:Q4_K_M", 18.3, "GLM-4.7-Flash"),
    "qwen3": ShortName("Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M", 18.6, "Qwen3-30B-A3B"),
    "qwen3-coder": ShortName("unsloth/Qwen3-Coder-30B-A3B-Instruct-GGUF:Q4_K_M", 18.6, "Qwen3-30B-A3B"),
    "qwen3.6": ShortName("unsloth/Qwen3.6-35B-A3B-GGUF:UD-Q4_K_M", 22.1, "Qwen3.6-35B-A3B"),
}
"""Name -> model, by size."""


def short_repository(model: Path) -> Path | None:
    """The name on the Hub that a short name stands for; None for an existing path and any other name.

    >>> short_repository(Path("Qwen3"))
    PosixPath('Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M')
    """
    found = None if model.exists() else SHORT_NAMES.get(str(model).lower())
    return Path(found.repository) if found else None


def short_name_lines() -> Iterator[str]:
    """Yields a line for each short name: the name, its download, and the model that it stands for."""
    for name, model in SHORT_NAMES.items():
        yield f"{name:<13}{model.gigabytes:>5.1f} GB  {model.repository}"
