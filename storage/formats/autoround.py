"""AutoRound: GPTQ's packing, with its zero points or plain ones, or AWQ's packing, by `packing_format`."""

from __future__ import annotations

from edgemoe.storage.files.tensors import StoredTensors
from edgemoe.storage.formats.awq import open_awq
from edgemoe.storage.formats.base import Settings, Weight, choice, group_size, require_known
from edgemoe.storage.formats.gptq import packed_weights
from edgemoe.storage.formats.grouped import Packing

_ZERO_OFFSETS = {"auto_round:auto_gptq": 1, "auto_round:gptqmodel": 0, "auto_round": 0}
"""packing_format -> offset to add to a stored zero point."""

_INPUTS = ("act_bits", "act_data_type", "act_dynamic", "act_group_size", "act_sym")
"""Settings of quantized inputs; with 16 bits inputs are not quantized."""

_AWQ = "auto_round:auto_awq"


def open_autoround(settings: Settings, tensors: StoredTensors) -> dict[str, Weight]:
    """Opens an AutoRound checkpoint. Its `extra_config` may only exempt matrices from quantization.

    Raises:
        ModelRefused: another packing, or another data type.
        MissingTensor: a part of a matrix contradicts the config, such as a matrix with other bits.
    """
    packing = choice(settings, "packing_format", (*_ZERO_OFFSETS, _AWQ))
    require_known(settings, ("packing_format", "data_type", "bits", "group_size", "extra_config", *_INPUTS))
    choice(settings, "act_bits", (16, 32), 16)
    choice(settings, "data_type", ("int",), "int")
    if packing == _AWQ:
        return open_awq({key: settings.get(key) for key in ("bits", "group_size")}, tensors)
    bits, group = choice(settings, "bits", (4, 8, 2)), group_size(settings)
    return packed_weights(tensors, Packing(bits, group, zero_offset=_ZERO_OFFSETS[packing]))
