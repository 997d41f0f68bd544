"""Mutations of whole models for commands: one file changed, or files exchanged, renamed or removed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random

from resealed_store import reseal

from edgemoe.errors import EdgemoeError
from edgemoe.storage.store.manifest import MANIFEST_NAME
from tools.reliability.parsers import mutated

Edit = Callable[[Path, Random], object]

SMALL = ("config.json", "generation_config.json", "tokenizer_config.json")
"""Files whose values reach transformers. Where one is missing, the mutation starts from an object without keys."""

_SKIPPED = "tokenizer.json"
"""Parsed by a library in compiled code, which has tests of its own."""


CONFIGS = {
    "head_dim": "x",
    "rms_norm_eps": "small",
    "hidden_act": "no such function",
    "rope_scaling": {"rope_type": 7},
    "rope_parameters": [1, 2],
    "attention_bias": "yes",
    "sliding_window": "wide",
    "layer_types": 5,
    "torch_dtype": "float99",
    "norm_topk_prob": [],
    "pad_token_id": 10**9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": "maybe",
    "use_sliding_window": {"a": 1},
}
"""Key of config.json -> a value that transformers refuses or ignores."""

GENERATIONS = {
    "temperature": ["x", float("nan"), float("inf"), -1, True],
    "top_k": [-5, "many", 10**12],
    "top_p": ["x", 1.5, -0.1, float("nan")],
    "repetition_penalty": [0, -1, "x"],
    "eos_token_id": ["x", [1, "y"], -3, {}],
}
"""Key of generation_config.json -> values that no sampler can use."""


def edit(name: str) -> Edit:
    """Mutates one file."""

    def change(model: Path, random: Random) -> None:
        path = model / name
        path.write_bytes(mutated(path, path.read_bytes() if path.exists() else b"{}", random))

    return change


def edit_any(suffix: str) -> Edit:
    """Mutates one of the files with a suffix."""
    return lambda model, random: edit(random.choice(_names(model, suffix)))(model, random)


def swap(suffix: str) -> Edit:
    """Exchanges two files with a suffix."""

    def change(model: Path, random: Random) -> None:
        first, second = random.sample(_names(model, suffix), 2)
        (model / first).rename(model / "x")
        (model / second).rename(model / first)
        (model / "x").rename(model / second)

    return change


def remove(model: Path, random: Random) -> None:
    """Removes a file."""
    (model / random.choice(_names(model, ""))).unlink()


def rename(model: Path, random: Random) -> None:
    """Gives a file a name of 250 characters, or a name with a control character."""
    (model / random.choice(_names(model, ""))).rename(
        model / random.choice(("a" * 250, "a\x1b[2Jb\n", "\u202e"))
    )


def cut(model: Path, random: Random) -> None:
    """Shortens a file."""
    path = model / random.choice([name for name in _names(model, "") if name != _SKIPPED])
    os.truncate(path, random.randrange(path.stat().st_size + 1))


def sealed(change: Edit) -> Edit:
    """Does the same to a store, whose manifest then has the checksums of the changed files."""

    def changed(store: Path, random: Random) -> None:
        before = {name: (store / name).read_bytes() for name in _names(store, "")}
        change(store, random)
        for name in sorted({*before, *_names(store, "")} - {MANIFEST_NAME}):
            if name.startswith("experts-"):
                continue
            if not (store / name).exists() or (store / name).read_bytes() != before.get(name):
                try:
                    reseal(store, name)
                except (EdgemoeError, OSError):
                    return

    return changed


def _names(model: Path, suffix: str) -> list[str]:
    return sorted(path.name for path in model.iterdir() if path.name.endswith(suffix) and path.is_file())


CHECKPOINTS: tuple[Edit, ...] = (
    *(edit("config.json"),) * 8,
    *(edit("generation_config.json"), edit("tokenizer_config.json")) * 2,
    *(edit("model.safetensors.index.json"), edit_any(".safetensors"), edit_any(".safetensors")),
    *(swap(".safetensors"), swap(".json"), remove, rename, cut),
)
STORES: tuple[Edit, ...] = (
    *(sealed(edit("config.json")),) * 8,
    *(sealed(edit("generation_config.json")), sealed(edit("tokenizer_config.json"))) * 3,
    *(edit("store.json"),) * 4,
    *(sealed(edit("dense.safetensors")), edit_any(".safetensors")),
    *(sealed(swap(".safetensors")), swap(".safetensors"), sealed(swap(".json")), sealed(remove), remove),
    *(rename, cut, sealed(cut)),
)
