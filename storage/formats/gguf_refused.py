"""Why GGUF architectures with experts are not read."""

from __future__ import annotations

_NO_FAMILY = "edgemoe runs no model of this kind yet"
_NO_CLASS = "transformers has no class for it, and edgemoe computes with transformers' modules"

_NOT_READ = "files of it are not read yet; use the model's safetensors"

REASONS = {
    "llama4": "its experts are one product over all of them, which edgemoe cannot compute expert by expert",
    **dict.fromkeys(
        ("afmoe", "mimo2", "qwen3vlmoe", "exaone-moe", "kimi-linear", "glm-dsa", "mistral4"), _NOT_READ
    ),
    **dict.fromkeys(("jamba", "dbrx", "step35"), _NO_FAMILY),
    **dict.fromkeys(("deepseek2-ocr", "nomic-bert-moe", "llama-embed"), "it does not continue text"),
    **dict.fromkeys(("deci", "grok", "arctic", "deepseek", "bailingmoe", "bailingmoe2"), _NO_CLASS),
    **dict.fromkeys(("minicpm", "smallthinker", "llada-moe", "grovemoe", "rnd1"), _NO_CLASS),
    "mistral3": "its rotary embeddings depend on the position in a way that edgemoe does not compute",
}
"""general.architecture -> the reason."""


def reason_against(name: object) -> str:
    """The end of a sentence about an architecture that is not read: its reason, if there is one."""
    return f": {REASONS[name]}" if isinstance(name, str) and name in REASONS else ""
