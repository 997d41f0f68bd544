"""transformers' model of a store without any weights."""

from __future__ import annotations

import re
from pathlib import Path

from torch import nn

from edgemoe.errors import ModelRefused
from edgemoe.experts import layer as experts
from edgemoe.families.meta_model import meta_model
from edgemoe.families.table import family_of
from edgemoe.layers import attention
from edgemoe.layers.trial import try_step
from edgemoe.machine.model_code import without_advice, without_compiler
from edgemoe.storage.convert.config import Config
from edgemoe.storage.files.untrusted import foreign_code


@without_compiler()
@without_advice()
def skeleton(directory: Path, config: Config) -> nn.Module:
    """The model of a store without any weights: transformers' modules on the meta device.

    A step of two tokens shows that the modules compute with the config's values. Imports the code of the model's class,
    which counts as the program's memory.

    Args:
        directory: the directory that has config.json.
        config: its contents, bounded.

    Raises:
        ModelRefused: transformers does not accept a value of the config, or its modules cannot compute with it.
    """
    file = directory / "config.json"
    family = family_of(config)
    with foreign_code(f"values in {file} that transformers accepts", values=config):
        model = meta_model(config, attention=attention.NAME, experts=experts.NAME)
    with foreign_code(f"values in {file} that transformers' modules compute with", values=config):
        try_step(model, family, config)
    return model  # type: ignore[no-any-return]


def without_weights(model: nn.Module) -> dict[int, str]:
    """Drops the (meta) weights of every experts module except its biases. Returns layer -> the module's name."""
    found = {}
    for name, module in model.named_modules():
        if not hasattr(module, "_apply_gate"):
            continue
        if getattr(module, "has_post_expert_norm", False):
            raise ModelRefused(
                f"experts of two matrices in {name}",
                "experts with a norm after them",
                "choose a supported model family",
            )
        match = re.search(r"\.layers\.(\d+)\.", name)
        assert match, name
        for parameter in [p for p, _ in module.named_parameters(recurse=False)]:
            if not parameter.endswith("_bias"):
                delattr(module, parameter)
        found[int(match[1])] = name
    return dict(sorted(found.items()))
