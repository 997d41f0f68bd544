"""Each GGUF architecture: a small model of transformers that is written as llama.cpp's converter writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_converter import NAMES
from gguf_files import Kind, blocks, rewritten
from gguf_models import covered, small_model, write_small
from transformers import AutoModelForCausalLM

from edgemoe.errors import MissingTensor, ModelRefused
from edgemoe.families.table import family_of
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.models.runnable import check_runnable
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.expert_weights import ExpertWeights
from edgemoe.storage.formats.ggml import READABLE, GgmlWeight
from edgemoe.storage.formats.gguf_architectures import ARCHITECTURES
from edgemoe.storage.formats.gguf_header import read_gguf_header
from edgemoe.storage.formats.gguf_refused import REASONS, reason_against

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about values


FAST = {"qwen3_moe", "gpt_oss", "deepseek_v3"}
"""One architecture of each kind for make test-fast: plain attention, MXFP4 experts with biases, latent attention."""


@pytest.mark.parametrize("model_type", covered(NAMES, NAMES.keys() - FAST))
def test_a_file_has_the_tensors_of_the_model_that_it_was_made_of(model_type, tmp_path: Path):
    """Names, shapes and values of all tensors, experts' too; and the sizes give a model that runs."""
    model = small_model(model_type)
    opened = Checkpoint.open(write_small(model, tmp_path / "model.gguf"))
    family = family_of(opened.config)
    assert family.model_type == model.config.model_type
    check_runnable(opened, 16)
    own, experts = model.state_dict(), ExpertWeights(opened, family)
    dense = {family.in_modules(name): opened[name] for name in opened.names() - experts.names}
    for name, weight in dense.items():
        torch.testing.assert_close(weight.read(), own[name].float(), msg=lambda text, name=name: name + text)
    assert dense.keys() | ({"lm_head.weight"} if model.config.tie_word_embeddings else set()) == family.dense
    for layer in experts.layers:
        for found, whole in zip(experts.read(layer, 3), fused(model, family, layer), strict=True):
            torch.testing.assert_close(found, whole[3])
    assert logits(of_file(opened, model)) == pytest.approx(logits(model), abs=1e-4)


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [
        ("qwen3_5_moe_text", "ssm.group_count", 1),
        ("qwen3_next", "full_attention_interval", 1),
        ("gpt_oss", "expert_feed_forward_length", 48),
        ("deepseek_v3", "attention.value_length_mla", 8),
        ("nemotron_h", "ssm.state_size", 8),
        ("lfm2_moe", "attention.head_count_kv", 2),
        ("glm4_moe", "nextn_predict_layers", 1),
    ],
)
def test_sizes_that_contradict_the_tensors_are_refused_before_any_work(model_type, field, value, tmp_path):
    """A field that a model could have, but not this one, ends a conversion before its first write."""
    path = write_small(small_model(model_type), tmp_path / "model.gguf", change={field: value})
    with pytest.raises((ModelRefused, MissingTensor)):
        convert_checkpoint(path, tmp_path / "store", max_level=8, layout="auto", dense_bits=16)
    assert not (tmp_path / "store").exists()


def test_each_architecture_is_refused_by_a_reason_or_read():
    """All that the gguf package knows with experts; a reason is the end of the message."""
    routed = {gguf.MODEL_TENSOR.FFN_GATE_EXP, gguf.MODEL_TENSOR.FFN_GATE_UP_EXP, gguf.MODEL_TENSOR.FFN_UP_EXP}
    known = {gguf.MODEL_ARCH_NAMES[each] for each, parts in gguf.MODEL_TENSORS.items() if routed & {*parts}}
    assert known == ARCHITECTURES.keys() | REASONS.keys()
    assert not ARCHITECTURES.keys() & REASONS.keys()
    assert reason_against("llama4") == f": {REASONS['llama4']}"
    assert reason_against("qwen3moe") == reason_against(7) == ""


def test_every_type_that_the_package_decodes_is_read(tmp_path: Path):
    """Whole, and by slices, as the gguf package reads the tensor; types without weights are refused by name."""
    quantized = [kind for kind in READABLE if kind not in (Kind.F32, Kind.F16, Kind.BF16)]
    assert {*gguf.quants._type_traits} <= {*READABLE}
    writer = gguf.GGUFWriter(tmp_path / "types.gguf", "qwen3moe")
    for kind in quantized:
        writer.add_tensor(kind.name, blocks(kind, (3, 2, 256), int(kind)), raw_dtype=kind)
    writer.add_tensor("whole", np.zeros((3, 2, 256), np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    theirs = {each.name: each for each in gguf.GGUFReader(tmp_path / "types.gguf").tensors}
    entries = read_gguf_header(tmp_path / "types.gguf").tensors
    for kind in quantized:
        found = GgmlWeight(tmp_path / "types.gguf", kind.name, entries[kind.name])
        want = torch.from_numpy(gguf.quants.dequantize(theirs[kind.name].data, kind))
        assert want.any(), kind.name
        assert torch.equal(found.read(), want), kind.name
        assert torch.equal(found.read_slice(2), want[2]), kind.name
    with pytest.raises(ModelRefused, match=r"IQ1_S.*NVFP4.*I32"):
        GgmlWeight(tmp_path / "types.gguf", "whole", entries["whole"])


def test_factors_of_weights_count(tmp_path: Path):
    """NVFP4 files have one number for a matrix, and one for each expert, as a tensor next to it."""
    model = small_model("qwen3_moe")
    write_small(model, tmp_path / "model.gguf")

    def scaled(tensors: dict[str, Any]) -> dict[str, Any]:
        return tensors | {
            "blk.0.attn_q.scale": np.full((1,), 0.5, np.float32),
            "blk.0.attn_q.input_scale": np.full((1,), 9.0, np.float32),
            "blk.1.ffn_up_exps.scale": np.arange(8, dtype=np.float32),
        }

    opened, other = (
        Checkpoint.open(path)
        for path in (tmp_path / "model.gguf", rewritten(tmp_path / "model.gguf", tmp_path / "m.gguf", scaled))
    )
    assert other.names() == opened.names()
    for name, factor in (("0.self_attn.q_proj", 0.5), ("1.mlp.experts.3.up_proj", 3), ("0.mlp.gate", 1)):
        weight = f"model.layers.{name}.weight"
        assert torch.equal(other[weight].read(), opened[weight].read() * factor)


def of_file(opened: Checkpoint, model: Any) -> Any:
    """transformers' model of a file's config, with the tensors of another one of the same names."""
    config = type(model.config).from_dict(opened.config)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    made.load_state_dict(model.state_dict())
    return made.eval()


def logits(model: Any) -> torch.Tensor:
    """Logits of 20 tokens, past the windows of all small models."""
    with torch.no_grad():
        return model(torch.arange(20)[None] * 7 % 300).logits[0]


def fused(model: Any, family: Any, layer: int) -> list[torch.Tensor]:
    """The matrices [E, N, K] of a layer's experts in transformers' modules."""
    own = model.state_dict()
    pair = (own[name] for name in (part.format(layer=layer) for part in family.fused_names[-1]))
    return [weight.transpose(1, 2) if family.transposed else weight for weight in pair]
