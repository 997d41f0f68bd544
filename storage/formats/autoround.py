"""AutoRound: GPTQ's packing with GPTQ's or with plain zero points, or AWQ's; `packing_format` says which."""

from __future__ import annotations

from storage.formats.awq import open_awq
from storage.formats.base import Settings, Weight, choice, group_size
from storage.formats.gptq import Packing, packed_weights
from storage.tensors import StoredTensors

_ZERO_OFFSETS = {"auto_round:auto_gptq": 1, "auto_round:gptqmodel": 0, "auto_round": 0}
"""packing_format -> what is to be added to a stored zero point."""

_AWQ = "auto_round:auto_awq"


def open_autoround(settings: Settings, tensors: StoredTensors) -> dict[str, Weight]:
    """Opener of AutoRound checkpoints. Its `extra_config` may leave matrices as they are, and no more.

    Raises:
        ModelRefused: another packing, or numbers that are not whole.
        MissingTensor: a matrix whose parts do not agree with the config, such as one with bits of its own.
    """
    packing = choice(settings, "packing_format", (*_ZERO_OFFSETS, _AWQ))
    choice(settings, "data_type", ("int",), "int")
    if packing == _AWQ:
        return open_awq({key: settings.get(key) for key in ("bits", "group_size")}, tensors)
    bits, group = choice(settings, "bits", (4, 8, 2)), group_size(settings)
    return packed_weights(tensors, Packing(bits, group, False, _ZERO_OFFSETS[packing]))
