"""A derived family: the rows that were written by hand before, the cache of rows, and refusals by name."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from family_models import SMALL, small_config
from folder_models import folder_config
from safetensors.torch import save_file

from edgemoe.errors import ModelRefused
from edgemoe.families import derive as derive_module
from edgemoe.families.base import Family
from edgemoe.families.derive import derive
from edgemoe.families.kept import _kept, kept_family
from edgemoe.families.table import family_of, require_known, traits_of
from edgemoe.families.traits import TRAITS
from edgemoe.machine.user_cache import user_cache
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.config import WRAPPED_IN, Config, bounded_config

MLP, SPARSE = "model.layers.{layer}.mlp.", "model.layers.{layer}.block_sparse_moe."
PROJECTIONS = tuple(f"experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up", "down"))
LETTERS = tuple(f"experts.{{expert}}.{name}.weight" for name in ("w1", "w3", "w2"))

BY_HAND: dict[str, tuple[str, tuple[str, ...] | None, str, str]] = {
    **{
        name: (MLP, PROJECTIONS, MLP, "mlp.gate.weight")
        for name in SMALL
        if name not in ("mixtral", "phimoe", "granitemoe", "gpt_oss")
    },
    "mixtral": (SPARSE, LETTERS, MLP, "block_sparse_moe.gate.weight"),
    "phimoe": (SPARSE, LETTERS, MLP, "block_sparse_moe.gate.weight"),
    "granitemoe": (SPARSE, PROJECTIONS, SPARSE, "block_sparse_moe.router.layer.weight"),
    "gpt_oss": (MLP, None, MLP, "mlp.router.weight"),
}
"""model_type -> block and names of one expert's tensors, block of the fused tensors, the router's name on the Hub."""


def config_of(model_type: str, **changes: object) -> Config:
    return bounded_config(small_config(model_type, **changes).to_dict())


@pytest.mark.parametrize("model_type", SMALL)
def test_names_are_those_of_published_checkpoints(model_type):
    """Names of experts and routers, as the Hub has them, come out of transformers' conversions."""
    family = derive(config_of(model_type), TRAITS[model_type])
    block, parts, fused, router = BY_HAND[model_type]
    assert family.expert_names == (parts and tuple(block + part for part in parts))
    assert family.fused_names[-1] == (fused + "experts.gate_up_proj", fused + "experts.down_proj")
    assert family.router(1) == f"model.layers.1.{router}"
    assert family.transposed == (model_type == "gpt_oss")
    assert family.fused_checkpoints == (model_type in ("gpt_oss", "granitemoe"))
    assert (family.experts, family.hidden, family.intermediate, family.top_k) == (8, 64, 32, 2)


def test_a_family_is_derived_once_for_a_config(monkeypatch, tmp_path):
    """The second process reads what the first one has kept, field for field; a damaged file is derived again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config, traits, made = config_of("qwen3_next"), TRAITS["qwen3_next"], list[Family]()

    def counted(bounded: Config, traits: Any) -> Family:
        made.append(derive(bounded, traits))
        return made[-1]

    monkeypatch.setattr(derive_module, "derive", counted)

    def afresh() -> Family:
        _kept.cache_clear()
        return kept_family(config, traits)

    assert afresh() == afresh() == made[0]
    assert len(made) == 1
    (path,) = (user_cache() / "families").iterdir()
    path.write_bytes(path.read_bytes().replace(b'"experts": 8', b'"experts": 9'))
    assert afresh() == made[0]
    assert len(made) == 2


def test_sizes_are_bounded_again_with_transformers_names(monkeypatch):
    """A size under a name that only transformers knows is bounded, too."""
    config = config_of("ernie4_5_moe") | {"num_experts": None, "moe_num_experts": 8}
    with pytest.raises(ModelRefused, match="num_key_value_heads"):
        derive(config | {"num_key_value_heads": 5000}, TRAITS["ernie4_5_moe"])


def test_an_operation_that_is_not_known_is_refused_by_name(monkeypatch):
    """A family whose experts are joined in another way than by stacking and concatenating is never guessed at."""
    from transformers.core_model_loading import Chunk, WeightConverter

    other = WeightConverter("mlp.experts.joined", "mlp.experts.gate_up_proj", [Chunk(dim=0)])
    monkeypatch.setattr("edgemoe.families.names.get_model_conversion_mapping", lambda *a, **k: [other])
    with pytest.raises(ModelRefused, match=r"MergeModulelist, Concatenate or Transpose.*by Chunk"):
        derive(config_of("qwen3_moe"), TRAITS["qwen3_moe"])


def test_a_tensor_of_the_model_is_never_unused():
    """A pattern of tensors to ignore that finds a name of the model's own does not leave it out."""
    family = derive(config_of("deepseek_v3"), TRAITS["deepseek_v3"])
    greedy = replace(family, unused=("input_layernorm",), ahead=(0, 5))
    assert not greedy.is_unused("model.layers.1.input_layernorm.weight")
    assert greedy.is_unused("model.layers.4.input_layernorm.weight")


def test_kimi_k2_is_a_deepseek_v3():
    """A checkpoint whose own code computes what transformers' deepseek_v3 does has its sizes and names."""
    kimi = derive(config_of("deepseek_v3") | {"model_type": "kimi_k2"}, traits_of("kimi_k2"))
    assert kimi == derive(config_of("deepseek_v3"), TRAITS["deepseek_v3"])
    wrapped = {"model_type": "kimi_k25", "text_config": config_of("deepseek_v3") | {"model_type": "kimi_k2"}}
    assert family_of(bounded_config(wrapped)) == kimi


@pytest.mark.e2e
def test_a_large_model_is_derived_in_a_second():
    """Sizes and names of Qwen3-235B-A22B, its class imported before, take at most 2 s of processor time."""
    config = config_of("qwen3_moe", num_hidden_layers=94, num_experts=128, hidden_size=4096)
    start = time.process_time()
    family = derive(config, TRAITS["qwen3_moe"])
    assert time.process_time() - start < 2
    assert len(family.kv.layers) == 94


WRAPPED = {
    "model_type": "qwen3_5_moe",
    "tie_word_embeddings": False,
    "vision_config": {"depth": 2},
    "eos_token_id": 7,
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        **{"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 300},
        **{"num_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": True},
    },
}
"""A multimodal model's config.json."""


def test_the_language_model_of_a_multimodal_config_is_bounded_alone():
    """Its sizes count; the whole model decides whether embeddings are tied; a mark in the file itself has no effect."""
    found = bounded_config(WRAPPED | {WRAPPED_IN: "forged"})
    assert (found["model_type"], found[WRAPPED_IN]) == ("qwen3_5_moe_text", "qwen3_5_moe")
    assert (found["hidden_size"], found["tie_word_embeddings"], found["eos_token_id"]) == (64, False, 7)
    assert "vision_config" not in found
    with pytest.raises(ModelRefused, match="hidden_size"):
        bounded_config(WRAPPED | {"text_config": WRAPPED["text_config"] | {"hidden_size": 1 << 30}})
    plain = {key: value for key, value in WRAPPED["text_config"].items() if key != "tie_word_embeddings"}
    assert WRAPPED_IN not in bounded_config(plain | {WRAPPED_IN: "forged"})


def test_a_language_model_of_another_kind_is_refused():
    """A multimodal model that edgemoe does not know is not run because its language model is known."""
    for outer, text in (("gemma4", "qwen3_moe"), ("qwen3_vl_moe", "qwen3_moe")):
        config = WRAPPED | {"model_type": outer}
        config["text_config"] = WRAPPED["text_config"] | {"model_type": text}
        with pytest.raises(ModelRefused, match=outer):
            family_of(bounded_config(config))


def test_tensors_of_a_multimodal_checkpoint_have_the_names_of_a_model_of_text(tmp_path):
    """Prefixes in both orders are taken away, heads are found in both places, and tensors of pictures are left out."""
    shape = torch.zeros(2)
    names = {
        "model.language_model.layers.0.mlp.gate.weight": "model.layers.0.mlp.gate.weight",
        "language_model.model.norm.weight": "model.norm.weight",
        "language_model.lm_head.weight": "lm_head.weight",
        "mtp.layers.0.mlp.gate.weight": "mtp.layers.0.mlp.gate.weight",
    }
    others = ("model.visual.merger.weight", "multi_modal_projector.weight")
    save_file({name: shape.clone() for name in (*names, *others)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(WRAPPED))
    assert Checkpoint.open(tmp_path).names() == set(names.values())


def test_a_dense_model_is_refused_as_one(tmp_path):
    """The message names programs that run such a model; one with experts has the list of families."""
    dense = {"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64}
    wrapped = [{"model_type": name, "text_config": dense} for name in ("gemma3", "mistral3")]
    for config in (dense, *wrapped):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelRefused, match=r"a dense model.*llama\.cpp, ollama or vLLM"):
            require_known(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(dense | {"num_local_experts": 8}))
    with pytest.raises(ModelRefused, match=r"model_type 'qwen3': .*deepseek_v2, .*qwen3_5_moe"):
        require_known(tmp_path)


def test_a_dense_model_of_a_family_with_others_is_refused_as_one():
    """Gemma 4 has models of both kinds under one model_type: a block without experts is known from its modules."""
    config = folder_config("gemma4_text").to_dict() | {"enable_moe_block": False}
    with pytest.raises(ModelRefused, match=r"the model is dense: .*llama\.cpp, ollama or vLLM"):
        family_of(bounded_config(config))
