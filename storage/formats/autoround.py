"""AutoRound: GPTQ's packing, with its zero points or plain ones, or AWQ's packing, by `packing_format`."""

from __future__ import annotations

from edgemoe.storage.files.tensors import StoredTensors
from edgemoe.storage.formats.awq import open_awq
from edgemoe.storage.formats.base import Settings, Weight, choice, group_size, require_known
from edgemoe.storage.formats.gptq import own_settings, packed_weights
from edgemoe.storage.formats.grouped import Packing

_ZERO_OFFSETS = {"auto_round:auto_gptq": 1, "auto_round:gptqmodel": 0, "auto_round": 0}
"""packing_format -> offset to add to a stored zero point."""

_INPUTS = ("act_bits", "act_data_type", "act_dynamic", "act_group_size", "act_sym")
"""Settings of quantized inputs; with 16 bits inputs are not quantized."""

_AWQ = "auto_round:auto_awq"
_EXEMPT = (16, 32)
"""Bits of matrices that are not quantized."""


def open_autoround(settings: Settings, tensors: StoredTensors) -> dict[str, Weight]:
    """Opens an AutoRound checkpoint. Its `extra_config` has other settings for some matrices, 16 bits exempt them.

    Raises:
        ModelRefused: another packing, another data type, or settings that fit a matrix as well as others.
        MissingTensor: a part of a matrix contradicts the config.
    """
    packing = choice(settings, "packing_format", (*_ZERO_OFFSETS, _AWQ))
    require_known(settings, ("packing_format", "data_type", "bits", "group_size", "extra_config", *_INPUTS))
    choice(settings, "act_bits", (16, 32), 16)
    choice(settings, "data_type", ("int",), "int")
    if packing == _AWQ:
        return open_awq({key: settings.get(key) for key in ("bits", "group_size")}, tensors)
    own = (each for each in own_settings(settings, "extra_config", "") if each.get("bits") not in _EXEMPT)
    packings = [
        Packing(choice(each, "bits", (4, 8, 2)), group_size(each), zero_offset=_ZERO_OFFSETS[packing])
        for each in (settings, *({**settings, **other} for other in own))
    ]
    return packed_weights(tensors, packings)
