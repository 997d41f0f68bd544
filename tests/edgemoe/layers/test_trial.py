"""A step without weights finds the values that a model's modules cannot compute with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from family_models import SMALL, small_config

from edgemoe.errors import ModelRefused
from edgemoe.families.meta_model import LARGEST_BUFFER
from edgemoe.families.table import family_of
from edgemoe.layers.skeleton import skeleton
from edgemoe.layers.trial import try_step
from edgemoe.storage.convert.config import bounded_config

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about values


def written(directory: Path, model_type: str, **changes: object) -> dict:
    """Writes the config.json of a small model of a family, and returns it."""
    config = small_config(model_type).to_dict() | {"model_type": model_type} | changes
    (directory / "config.json").write_text(json.dumps(config))
    return bounded_config(config)


@pytest.mark.e2e
@pytest.mark.parametrize("model_type", SMALL)
def test_every_family_computes(tmp_path, model_type):
    """No family is refused, and the trial leaves modules, parameters and buffers as they were."""
    config = written(tmp_path, model_type)
    model = skeleton(tmp_path, config)
    before = {name: id(module) for name, module in model.named_modules()}
    state = {name: (value.shape, value.device.type) for name, value in model.named_parameters()}
    try_step(model, family_of(config), config)
    assert {name: id(module) for name, module in model.named_modules()} == before
    assert {name: (value.shape, value.device.type) for name, value in model.named_parameters()} == state
    assert not any(hasattr(module, "edgemoe") for module in model.modules())
    assert all(value.is_meta for value in model.parameters())


def test_equal_layers_are_tried_once(tmp_path):
    """Of a model's layers, one of each kind runs: of 12 layers two, and a layer with another value is another kind."""
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 3
    config = written(tmp_path, "qwen3_next", num_hidden_layers=12, layer_types=kinds)
    model = skeleton(tmp_path, config)
    ran = []
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *arguments, number=number: ran.append(number))
    try_step(model, family_of(config), config)
    assert ran == [0, 3]
    ran.clear()
    model.model.layers[9].mlp.gate.top_k = 1
    try_step(model, family_of(config), config)
    assert ran == [0, 3, 9]


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.5] * 8,
    "original_max_position_embeddings": 128,
}
WRONG = {
    "more groups of experts than there are": ("deepseek_v3", {"topk_group": 9}),
    "more of a head is rotated than it has": (
        "glm4_moe",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.5}},
    ),
    "too few factors": ("phimoe", {"rope_parameters": LONGROPE | {"short_factor": [1.0] * 7}}),
    "too few factors after the first positions": (
        "phimoe",
        {"rope_parameters": LONGROPE | {"long_factor": [1.5] * 9}},
    ),
    "rotary embeddings that are not finite": (
        "mixtral",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}},
    ),
    "a multiplier that is a text": ("granitemoe", {"residual_multiplier": "x"}),
}


@pytest.mark.parametrize(("model_type", "changes"), WRONG.values(), ids=WRONG)
def test_values_that_modules_cannot_compute_with(tmp_path, model_type, changes):
    """The model is refused with the file."""
    config = written(tmp_path, model_type, **changes)
    with pytest.raises(ModelRefused, match=r"config\.json"):
        skeleton(tmp_path, config)


def test_a_bomb_in_a_computed_buffer_is_refused(tmp_path):
    """Rotary frequencies of a billion elements are not allocated."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1e9}
    config = written(tmp_path, "glm4_moe", rope_parameters=rope)
    with pytest.raises(ModelRefused, match=f"at most {LARGEST_BUFFER} elements"):
        skeleton(tmp_path, config)


def test_settings_for_training_do_not_change_the_output(tmp_path):
    """A config that asks for router logits or tuples gives the same model as one that does not."""
    config = written(
        tmp_path, "mixtral", output_router_logits=True, output_attentions=True, return_dict=False
    )
    model = skeleton(tmp_path, config)
    assert not model.config.output_router_logits
    assert model.config.return_dict
    with torch.inference_mode():
        try_step(model, family_of(config), config)
