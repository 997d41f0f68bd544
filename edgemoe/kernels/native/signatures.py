"""The functions of the compiled library, for ctypes."""

from __future__ import annotations

import ctypes
from typing import Any

_P, _N = ctypes.c_void_p, ctypes.c_int64

SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "edgemoe_bf16": (ctypes.c_int, [ctypes.c_int]),
    "edgemoe_paths": (ctypes.c_int, []),
    "edgemoe_choose_path": (ctypes.c_int, [ctypes.c_int] * 3),
    "edgemoe_choose_widest": (None, []),
    "edgemoe_chosen_path": (ctypes.c_int, [ctypes.c_int] * 2),
    "edgemoe_vnni_encoding": (ctypes.c_int, [ctypes.c_int]),
    "edgemoe_open": (_P, [ctypes.c_int]),
    "edgemoe_close": (ctypes.c_int, [_P]),
    "edgemoe_expert_product": (ctypes.c_int, [_P, _P, ctypes.c_int, _P, _N, _P, _N, _N, _P, _P, _P, _N, _N]),
    "edgemoe_experts": (ctypes.c_int, [_P, _P, _P, _N, _P, _N, _P, _N, _N, _P, _P, _P, _P, _N, _N]),
    "edgemoe_quantize_rows": (ctypes.c_int, [_P, _P, _P, _N, _N, _P]),
    "edgemoe_weighted_sum": (None, [_P, _P, _P, _N, _N, _N, ctypes.c_int, _P]),
    "edgemoe_rms_norm": (None, [_P, _P, ctypes.c_int, ctypes.c_float, _N, _N, _P]),
    "edgemoe_add_rows": (ctypes.c_int, [_P, _P, _P, _P, _N, _N, _P]),
    "edgemoe_norm_rows": (ctypes.c_int, [_P, _P, _P, ctypes.c_int, ctypes.c_float, _N, _N, _P]),
    "edgemoe_attention": (ctypes.c_int, [_P, _P, _P, _N, _P, _P, _P, _P]),
    "edgemoe_attention_rows": (ctypes.c_int, [_P, _P, _P, _N, _N, _P, _P, _P, _P, _P, _N, _P]),
    "edgemoe_attention_scratch": (_N, [_N] * 3),
    "edgemoe_decode_layers": (ctypes.c_int, [_P, _P, _P, _N, _P, _N, _P, _N, _P]),
    "edgemoe_embed": (ctypes.c_int, [_P, _N, _P, _N]),
    "edgemoe_head": (ctypes.c_int, [_P, _P, _P, _N, _P, _N, _P, _N]),
    "edgemoe_levels": (None, [_P, _P, _P, _N, _P]),
    "edgemoe_router_topk": (ctypes.c_int, [_P, _P, _P, _N, _N, _P, _P, _P, _P]),
    "edgemoe_router_states": (ctypes.c_int, [_P, _P, _P, _N, _P]),
    "edgemoe_remap": (None, [_P, _P, _P, _N, _P, _P, _P, _P]),
    "edgemoe_delta_net": (ctypes.c_int, [_P, _P, _P, _N, _P, _P]),
    "edgemoe_state_space": (ctypes.c_int, [_P, _P, _P, _N, _P, _P]),
    "edgemoe_short_conv": (ctypes.c_int, [_P, _P, _P, _N, _P, _P]),
    "edgemoe_latent_rows": (ctypes.c_int, [_P] * 5),
    "edgemoe_code_columns": (ctypes.c_int, [ctypes.c_float, *[_P] * 4, *[_N] * 4, _P, _P, _N, _N, _P, _P]),
    "edgemoe_dense_heads": (ctypes.c_int, [_P, _P, _P, _N, _P]),
    "edgemoe_wide_product": (ctypes.c_int, [_P, _P, _N, _N, _P, _N, _P]),
    "edgemoe_precise_product": (ctypes.c_int, [_P, _P, ctypes.c_int, _N, _N, _P, _N, _P]),
    "edgemoe_dense_product": (ctypes.c_int, [_P, _P, _P, _N, _N, _P, _N]),
}
"""Function -> (result, arguments)."""
