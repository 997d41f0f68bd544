"""The C structures of csrc/ in ctypes. Built by keyword; structure_sizes compares their sizes with C's."""

from __future__ import annotations

import ctypes
from typing import Any

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

MOST_LEVELS = 4
"""Levels of a LevelRule (csrc/levels.h)."""


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Matrix(ctypes.Structure):
    """`matrix` of csrc/experts/planes.h: a quantized matrix of every expert."""

    _fields_ = _fields(
        _INT, "rows cols group parameters_at codes_at half parameter_bytes limit low_at low_half"
    )


class Expert(ctypes.Structure):
    """`expert` of csrc/experts/planes.h: the planes of one expert, and its rows of x and y."""

    _fields_ = [
        *_fields(_POINTER, "parameters base d4 d8"),
        *_fields(_INT, "level x y tokens"),
        ("compensator", _POINTER),
        *_fields(_INT, "compensated number"),
    ]


class ExpertActivation(ctypes.Structure):
    """`expert_activation` of csrc/experts/expert_ffn.h."""

    _fields_ = [*_fields(_POINTER, "gate up up_bias down_bias"), *_fields(_INT, "interleaved wide_gate")]


class FactorRows(ctypes.Structure):
    """`factor_rows` of csrc/experts/factors.h."""

    _fields_ = _fields(_POINTER, "codes scales")


class Factors(ctypes.Structure):
    """`factors` of csrc/experts/factors.h: the low-rank factors of one projection."""

    _fields_ = [*_fields(FactorRows, "v u"), *_fields(_INT, "rank rows cols")]


class Compensator(ctypes.Structure):
    """`compensator` of csrc/experts/factors.h: an expert's factors, of gate, up and down."""

    _fields_ = [("of", Factors * 3), ("absent", _INT)]


class Router(ctypes.Structure):
    """`router` of csrc/router.h."""

    _fields_ = [
        ("weight", _POINTER),
        *_fields(_INT, "count cols k"),
        *_fields(ctypes.c_int32, "normalise rounded precise sigmoid wide_weight raw_choice"),
        ("bias", _POINTER),
        *_fields(_INT, "groups best_groups group_best"),
        *_fields(_FLOAT, "scale least mixing"),
        ("product_bias", _POINTER),
        *_fields(_INT, "rounded_product rounded_scores"),
        *_fields(_POINTER, "state_norm state_scale"),
        *_fields(_FLOAT, "state_epsilon state_factor"),
        ("expert_scale", _POINTER),
    ]


class AttentionShape(ctypes.Structure):
    """`attention_shape` of csrc/attention/attention.h."""

    _fields_ = [
        *_fields(_INT, "heads kv_heads dim rotated"),
        *_fields(_POINTER, "q_norm k_norm"),
        *_fields(_INT, "q_norm_size k_norm_size"),
        *_fields(_FLOAT, "q_epsilon k_epsilon scaling clip"),
        ("sinks", _POINTER),
        *_fields(_INT, "prepared wide_norms pairing norms_last queries_alone value_dim"),
        ("v_norm", _POINTER),
        *_fields(_FLOAT, "v_epsilon v_scale"),
        ("values_are_keys", _INT),
    ]


class AttentionKV(ctypes.Structure):
    """`attention_kv` of csrc/attention/attention.h: a sequence's keys and values in one layer."""

    _fields_ = [
        *_fields(_POINTER, "keys values"),
        *_fields(_INT, "context past first key_format value_format rotation"),
    ]


class DenseWeight(ctypes.Structure):
    """`dense_weight` of csrc/dense/dense.h."""

    _fields_ = [*_fields(_POINTER, "weight row_scale"), *_fields(_INT, "rows cols bits")]


class Linear(ctypes.Structure):
    """`linear` of csrc/operations.h."""

    _fields_ = [("weight", DenseWeight), ("bias", _POINTER)]


class Buffer(ctypes.Structure):
    """`buffer` of csrc/operations.h."""

    _fields_ = [("at", _POINTER), ("size", _INT)]


class Operation(ctypes.Structure):
    """`operation` of csrc/operations.h."""

    _fields_ = [
        *_fields(_INT, "kind input output input_cols output_cols"),
        ("parameters", _POINTER),
        ("number", _FLOAT),
        ("wide", ctypes.c_int32),
        *_fields(_INT, "routed rotation"),
    ]


class Rotation(ctypes.Structure):
    """`rotation` of csrc/operations.h."""

    _fields_ = [*_fields(_POINTER, "cosine sine"), ("cols", _INT)]


class LevelRule(ctypes.Structure):
    """`level_rule` of csrc/levels.h."""

    _fields_ = [
        *_fields(_INT, "rule count"),
        ("level", _INT * MOST_LEVELS),
        ("counts", ctypes.c_int16 * MOST_LEVELS),
        ("experts", _INT),
        *_fields(_POINTER, "damage price held"),
    ]


class DecoderLayer(ctypes.Structure):
    """`decoder_layer` of csrc/decode_layers.c."""

    _fields_ = [
        ("operations", _POINTER),
        *_fields(_INT, "count window following experts slots"),
        *_fields(_POINTER, "router logits scores gates chosen levels resident"),
        ("compensators", _POINTER),
        *_fields(_POINTER, "wanted computed predicted remapped activation chosen_by chosen_mass"),
    ]


class SequenceKV(ctypes.Structure):
    """`sequence_kv` of csrc/decode_layers.c."""

    _fields_ = [*_fields(_POINTER, "kv states"), *_fields(_INT, "past valid earlier guess")]


class DeltaNet(ctypes.Structure):
    """`delta_net` of csrc/delta_net.h."""

    _fields_ = [
        *_fields(_INT, "key_heads heads key_dim value_dim taps"),
        ("conv", _POINTER),
        ("decays", _INT),
        *_fields(_POINTER, "added factor"),
        ("lowest", _FLOAT),
        ("rounded_decay", ctypes.c_int32),
        ("norm", _POINTER),
        ("epsilon", _FLOAT),
        *_fields(ctypes.c_int32, "rounded strict"),
        *_fields(_POINTER, "silu sigmoid wide_gate"),
    ]


class DenseHeads(ctypes.Structure):
    """`dense_heads` of csrc/dense/dense.h."""

    _fields_ = [
        *_fields(_POINTER, "weight scale"),
        *_fields(_INT, "scale_stride by_column heads stride rows cols x_stride y_stride x_cols y_cols"),
    ]


class LatentAttention(ctypes.Structure):
    """`latent_attention` of csrc/latents.h."""

    _fields_ = [
        *_fields(_INT, "heads key value latent rotary"),
        *_fields(_POINTER, "keys values key_scale value_scale"),
        *_fields(_INT, "stride scale_stride"),
        ("norm", _POINTER),
        ("epsilon", _FLOAT),
        ("wide_norm", ctypes.c_int32),
        ("pairing", _INT),
    ]


class LatentRows(ctypes.Structure):
    """`latent_rows` of csrc/latents.h."""

    _fields_ = [
        *_fields(_INT, "rows window"),
        *_fields(_POINTER, "queries compressed cosine sine"),
        ("block", _INT),
        *_fields(_POINTER, "as_keys summed out"),
        ("counted", _INT),
        ("received", _POINTER),
    ]


class ShortConv(ctypes.Structure):
    """`short_conv` of csrc/short_conv.h."""

    _fields_ = [*_fields(_INT, "channels taps"), *_fields(_POINTER, "conv bias")]


class Convolution(ctypes.Structure):
    """`convolution` of csrc/convolution.h."""

    _fields_ = [*_fields(_INT, "taps channels"), *_fields(_POINTER, "weights bias silu")]


class StateSpace(ctypes.Structure):
    """`state_space` of csrc/state_space.h."""

    _fields_ = [
        *_fields(_INT, "groups heads key_dim value_dim"),
        ("conv", Convolution),
        *_fields(_POINTER, "added softplus"),
        *_fields(_FLOAT, "least most"),
        *_fields(_POINTER, "factor skip norm"),
        ("norm_size", _INT),
        ("epsilon", _FLOAT),
        ("wide_silu", _POINTER),
    ]


class DeltaRun(ctypes.Structure):
    """`delta_run` of csrc/delta_net.h: the states before and after a call."""

    _fields_ = [
        *_fields(_POINTER, "conv state next_conv next_state earlier kept"),
        *_fields(_INT, "earlier_count first tokens guesses"),
    ]


class DeltaCopies(ctypes.Structure):
    """`delta_copies` of csrc/decode_layers.c: both copies of a sequence's state in one layer."""

    _fields_ = [*((name, _POINTER * 2) for name in ("conv", "state", "kept")), ("space", _INT)]


class ExpertWorkspace(ctypes.Structure):
    """`expert_workspace` of csrc/decode_layers.c."""

    _fields_ = [
        ("buffers", _POINTER),
        ("buffer_count", _INT),
        *_fields(_POINTER, "up down"),
        *_fields(_INT, "inner most_rows slots experts"),
        *_fields(_POINTER, "together gathered rows gates row_of after first"),
        *_fields(_INT, "exact renormalise"),
        ("remapping", _POINTER),
        *_fields(_INT, "compensated_first compensated_end compensated_level"),
    ]


class RemappingRule(ctypes.Structure):
    """`remapping` of csrc/remapping.h."""

    _fields_ = [("alpha", _FLOAT), ("bins", _INT), ("popularity", _POINTER)]


class OuterLayers(ctypes.Structure):
    """`outer_layers` of csrc/decode_layers.c."""

    _fields_ = [
        *_fields(_POINTER, "table row_scale"),
        *_fields(_INT, "rows bits"),
        ("norm", _POINTER),
        ("epsilon", _FLOAT),
        ("wide", ctypes.c_int32),
        ("head", Linear),
    ]
