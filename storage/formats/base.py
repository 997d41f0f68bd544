"""Contract of source formats: a model's tensors by transformers' names, as floats or as 4-bit codes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from edgemoe.errors import MissingTensor, ModelRefused
from edgemoe.storage.files.tensors import StoredTensors
from edgemoe.storage.files.untrusted import CHECK_ORIGIN, DOWNLOAD_AGAIN, USE_SOURCE, shortened
from edgemoe.storage.formats.source_codes import SourceCodes

Settings = Mapping[str, Any]
"""The quantization_config of a config.json; every value is checked before use."""

GROUPS = (256, 128, 64, 32)
"""Groups that a record supports, widest first."""

LARGEST_GROUP = 131_072
"""The largest input size that bounded_config accepts."""

OTHER_CONFIG = f"{DOWNLOAD_AGAIN}; its config.json may belong to another one"
"""Action of errors about a tensor that contradicts the config."""


class Weight(ABC):
    """One tensor of a model in its stored form. Thread-safe; data is read by `read`, `read_slice` and `codes` only.

    Attributes:
        shape: the shape of the tensor in transformers.
        parts: names of the stored tensors that it consists of.
        nbytes: bytes of the parts on disk.
        group: group of its codes; None if it has no codes that a record keeps exactly.
        bits: bits of these codes.
        type: the type of the weights as the source names it, for people.
    """

    shape: tuple[int, ...]
    parts: tuple[str, ...]
    nbytes: int
    group: int | None = None
    bits: int = 4
    type: str = ""

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point dtype of the result of `read`.

        Raises:
            ModelRefused: the tensor holds no floating-point weights.
        """
        return torch.float32

    @abstractmethod
    def read(self) -> torch.Tensor:
        """Reads the tensor in floating point.

        Raises:
            ModelRefused: the tensor holds no floating-point weights.
            TruncatedFile: a file has become shorter since it was opened.
        """

    def read_slice(self, index: int) -> torch.Tensor:
        """Reads tensor[index]; formats that can do so read that slice alone."""
        return self.read()[index]

    def codes(self) -> SourceCodes:
        """Reads the tensor's codes. Only for tensors whose `group` is not None."""
        raise NotImplementedError


Opener = Callable[[Settings, StoredTensors], dict[str, Weight]]
"""(quantization_config, stored tensors) -> the model's tensors by name, checked against the headers."""


def refused(expectation: str, finding: object, action: str) -> ModelRefused:
    """The error about a value in a quantization_config."""
    return ModelRefused(f"{expectation} in quantization_config", shortened(finding), action)


NOTES = frozenset(
    (
        *(
            "quant_method",
            "quantizer",
            "version",
            "provider",
            "meta",
            "backend",
            "dataset",
            "tokenizer",
            "sym",
        ),
        *("modules_to_not_convert", "ignore", "ignored_layers", "modules_in_block_to_quantize", "lm_head"),
        *(
            "true_sequential",
            "static_groups",
            "damp_percent",
            "damp_auto_increment",
            "act_group_aware",
            "mse",
        ),
        *("model_name_or_path", "model_file_base_name", "model_seqlen", "pad_token_id", "max_input_length"),
        *(
            "block_name_to_quantize",
            "to_quant_block_names",
            "module_name_preceding_first_block",
            "batch_size",
        ),
        *("cache_block_outputs", "use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config"),
        *("pack_dtype", "amp", "iters", "nsamples", "seqlen", "lr", "minmax_lr", "scale_dtype", "batch_dim"),
        *("autoround_version", "enable_quanted_input", "enable_minmax_tuning", "enable_norm_bias_tuning"),
        *(
            "low_gpu_mem_usage",
            "low_cpu_mem_usage",
            "gradient_accumulate_steps",
            "super_bits",
            "super_group_size",
        ),
        *("do_fuse", "fuse_max_seq_len", "modules_to_fuse", "kv_cache_scheme", "kv_cache_quant_method"),
        *("quantization_status", "global_compression_ratio", "run_compressed", "dequantize", "is_training"),
        *("activation_scheme", "use_optimized_inference", "producer", "is_marlin_format", "offload_to_disk"),
    )
)
"""Settings that say how a checkpoint was made or is best run: they change no weight and no rotation of inputs."""


def require_known(settings: Settings, read: Collection[str], place: str = "quantization_config") -> None:
    """Refuses settings that edgemoe does not know, since they may change weights or inputs.

    Args:
        settings: an object of a quantization_config. A value that is null, false or empty changes nothing.
        read: keys that the format reads or checks.
        place: the object's place, for the message.

    Raises:
        ModelRefused: with the key and its value.
    """
    unknown = sorted(key for key, value in settings.items() if value and key not in NOTES and key not in read)
    if unknown:
        raise ModelRefused(
            f"settings that edgemoe knows in {place} of config.json",
            f"{shortened(unknown[0])} {shortened(settings[unknown[0]])}",
            USE_SOURCE,
        )


def choice(settings: Settings, key: str, allowed: tuple[object, ...], default: object = None) -> Any:
    """Returns settings[key], or the default, after a check against the allowed values, types included: true is not 1.

    Raises:
        ModelRefused: another value.
    """
    value = settings.get(key, default)
    if not any(type(value) is type(known) and value == known for known in allowed):
        raise refused(f"{key} among {', '.join(map(str, allowed))}", value, USE_SOURCE)
    return value


def group_size(settings: Settings, key: str = "group_size", default: object = None) -> int | None:
    """Returns the group in a quantization_config; None for one group over all inputs (-1 or null).

    Raises:
        ModelRefused: not a whole number from 1 to LARGEST_GROUP.
    """
    value = settings.get(key, default)
    if value in (-1, None) and not isinstance(value, float):
        return None
    if type(value) is not int or not 1 <= value <= LARGEST_GROUP:
        raise refused(f"a group from 1 to {LARGEST_GROUP}, or -1, as {key}", value, CHECK_ORIGIN)
    return value


def record_group(group: int, columns: int) -> int | None:
    """Returns the widest group of GROUPS that divides a source's groups; None if there is none.

    Args:
        group: the group of the source.
        columns: inputs of the matrix; an incomplete last group is allowed only if both groups are equal.
    """
    for ours in GROUPS:
        if ours == group or (group % ours == 0 and columns % ours == 0):
            return ours
    # One group over all inputs has no boundary inside the matrix.
    return next((g for g in GROUPS if columns % g == 0), None) if group >= columns else None


def fields(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpacks unsigned fields of `bits` (2, 4 or 8), lowest bits first, from the last dimension of integers.

    Args:
        packed: uint8 or int32 [..., n], contiguous.

    Returns:
        uint8 [..., n * 8 * itemsize / bits].
    """
    raw = packed.view(torch.uint8)
    if bits == 8:
        return raw
    mask = (1 << bits) - 1
    return torch.stack([(raw >> shift) & mask for shift in range(0, 8, bits)], -1).flatten(-2)


def expect(tensors: StoredTensors, name: str, shape: tuple[int, ...], types: tuple[str, ...]) -> None:
    """Checks that a stored tensor exists with the given shape and one of the given types.

    Args:
        types: safetensors' names of the allowed element types.

    Raises:
        MissingTensor: the tensor is missing, or has another shape or type.
    """
    if name not in tensors or tensors[name].shape != shape or tensors[name].dtype not in types:
        raise MissingTensor(
            f"tensor {name}, {' or '.join(types)} of shape {list(shape)}, in {tensors.directory}",
            described(tensors, name),
            OTHER_CONFIG,
        )


def described(tensors: StoredTensors, name: str) -> str:
    """Type and shape of a stored tensor, for a message."""
    if name not in tensors:
        return f"no tensor {name}"
    return f"{tensors[name].dtype} of shape {list(tensors[name].shape)}"


def matrix_shape(tensors: StoredTensors, name: str) -> tuple[int, int]:
    """Returns the shape of a stored tensor after a check that it is a matrix and not empty.

    Raises:
        MissingTensor: the tensor is missing, empty or not a matrix.
    """
    shape = tensors[name].shape
    if len(shape) != 2 or 0 in shape:
        raise MissingTensor(
            f"a matrix in {name} of {tensors.directory}", f"shape {list(shape)}", DOWNLOAD_AGAIN
        )
    return shape[0], shape[1]
