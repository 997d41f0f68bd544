"""convert refuses what chat would refuse, before it writes anything."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from gguf_files import write_model
from mutated_models import CONFIGS, GENERATIONS, edit
from safetensors.torch import load_file, save_file
from small_tokenizer import a_tokenizer
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from edgemoe.models import runnable
from edgemoe.storage.store.manifest import MANIFEST_NAME

Damage = Callable[[Path], object]

NORM = "model.norm.weight"

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about values


def put(name: str, **values: object) -> Damage:
    """Changes keys of a JSON file."""

    def damage(directory: Path) -> None:
        path = directory / name
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(before | values))

    return damage


def tensors(change: Callable[[dict], object]) -> Damage:
    """Changes the tensors of a checkpoint in one file."""

    def damage(directory: Path) -> None:
        found = load_file(directory / "model.safetensors")
        change(found)
        save_file(found, directory / "model.safetensors", {"format": "pt"})

    return damage


def random_config(seed: int) -> Damage:
    """A mutated config.json."""
    return lambda directory: edit("config.json")(directory, Random(f"verdict/{seed}"))


DAMAGES: dict[str, Damage] = {
    "nothing": lambda directory: None,
    "no tokenizer": lambda d: [path.unlink() for path in d.glob("tokenizer*")],
    "no generation_config.json": lambda d: (d / "generation_config.json").unlink(missing_ok=True),
    "a tensor is missing": tensors(lambda t: t.pop(NORM)),
    "a tensor too many": tensors(lambda t: t.update({"model.more.weight": t[NORM].clone()})),
    "a norm is shorter": tensors(lambda t: t.update({NORM: t[NORM][:-1].clone()})),
    "a theta of 0": put("config.json", rope_parameters={"rope_type": "default", "rope_theta": 0.0}),
    "half of each head is rotated": put("config.json", partial_rotary_factor=0.5),
    "router logits": put("config.json", output_router_logits=True),
    "tuples": put("config.json", return_dict=False),
    "no largest position": put("config.json", max_position_embeddings=None),
    **{f"{key} {value!r}": put("config.json", **{key: value}) for key, value in CONFIGS.items()},
    **{
        f"{key} {values[0]!r}": put("generation_config.json", do_sample=True, **{key: values[0]})
        for key, values in GENERATIONS.items()
    },
    **{f"mutation {seed}": random_config(seed) for seed in range(2)},
}


@pytest.mark.e2e
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_convert_refuses_what_chat_would_refuse(run, checkpoint, tmp_path, monkeypatch, damage):
    """Converted without the check and opened for a chat, a model is refused if and only if convert refuses it."""
    source = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    damage(source)
    code, _, err = run("convert", source, tmp_path / "store")
    assert code in (0, 2, 4), err
    assert (tmp_path / "store" / MANIFEST_NAME).exists() == (code == 0)
    assert code == 0 or not (tmp_path / "store").exists()
    monkeypatch.setattr(runnable, "check_runnable", lambda *arguments: None)
    chats = run("convert", source, tmp_path / "other")[0]
    if chats == 0:
        chats, _, err = run("chat", "--model", tmp_path / "other", "--prompt", "a", "--max-new-tokens", 2)
    assert (code == 0) == (chats == 0), (code, chats, err)


def test_a_good_checkpoint_is_not_refused(run, checkpoint, tmp_path):
    """The damages above start from a checkpoint that converts."""
    assert run("convert", checkpoint, tmp_path / "store")[0] == 0


@pytest.mark.e2e
def test_a_first_use_is_checked_too(run, checkpoint, tmp_path, monkeypatch):
    """chat with a checkpoint whose generation settings no sampler can use ends before a store is made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    put("generation_config.json", do_sample=True, temperature="x")(source)
    code, _, err = run("chat", "--model", source, "--prompt", "a")
    assert (code, "temperature" in err) == (2, True)
    assert list(tmp_path.rglob(MANIFEST_NAME)) == []


@pytest.mark.e2e
def test_a_gguf_file_is_checked_too(run, tiny_model, tmp_path):
    """Heads that are no multiple of the heads of keys: the config that a GGUF file gives is tried like any other."""
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**tiny_model.config.to_dict() | {"mlp_only_layers": []}))
    for heads, expected in ((2, 0), (1, 4)):
        path = tmp_path / f"{heads}.gguf"
        write_model(path, model, a_tokenizer(), change={"attention.head_count_kv": heads})
        code, _, err = run("convert", path, tmp_path / f"store-{heads}")
        assert code == expected, err


@pytest.mark.parametrize(
    ("name", "values", "key"),
    [
        ("config.json", {"rms_norm_eps": "small"}, "rms_norm_eps 'small'"),
        ("config.json", {"hidden_act": "no such function"}, "hidden_act 'no such function'"),
        (
            "config.json",
            {"rope_parameters": {"rope_type": "unheard"}},
            "rope_parameters {'rope_type': 'unheard'}",
        ),
        ("config.json", {"dtype": "float99"}, "dtype 'float99'"),
        ("generation_config.json", {"top_k": -5}, "top_k"),
        ("generation_config.json", {"num_return_sequences": "x"}, "num_return_sequences 'x'"),
    ],
    ids=str,
)
def test_a_refusal_names_file_and_key(run, checkpoint, tmp_path, name, values, key):
    """Whatever a library raises, the message has the file, the key and its value."""
    source = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    put(name, **values)(source)
    code, _, err = run("convert", source, tmp_path / "store")
    assert code == 2
    assert str(source / name) in err
    assert key in err
