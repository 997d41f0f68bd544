"""Tensors that GGUF files have in another form than transformers, by kinds of models."""

from __future__ import annotations

from edgemoe.storage.formats import gguf_changes as changes
from edgemoe.storage.formats.gguf_changes import Change

_ROW = changes.as_row
SHARED_GATE = Change("mlp.shared_expert_gate.weight", ("ffn_gate_inp_shexp.weight",), _ROW)

_NORMS = (
    Change("model.norm.weight", ("output_norm.weight",), changes.minus_one),
    *(
        Change(f"{name}.weight", (f"{part}.weight",), changes.minus_one)
        for part, name in {
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
        }.items()
    ),
    SHARED_GATE,
)
_DECAY, _STEP = "linear_attn.A_log", "linear_attn.dt_bias"
_CONVOLUTION = "linear_attn.conv1d.weight"

QWEN3_NEXT = (
    *_NORMS,
    Change(_DECAY, ("ssm_a",), changes.log_of_negated),
    Change(_STEP, ("ssm_dt.bias",), changes.as_it_is),
    Change(_CONVOLUTION, ("ssm_conv1d.weight",), changes.as_channels),
    Change("linear_attn.in_proj_qkvz.weight", ("attn_qkv.weight", "attn_gate.weight"), changes.by_key_head),
)
QWEN3_5 = (
    *_NORMS,
    Change(_DECAY, ("ssm_a",), changes.chained(changes.value_heads, changes.log_of_negated)),
    Change(_STEP, ("ssm_dt.bias",), changes.value_heads),
    Change(
        _CONVOLUTION,
        ("ssm_conv1d.weight",),
        changes.chained(changes.last_value_heads, changes.as_channels),
    ),
    Change("linear_attn.in_proj_qkv.weight", ("attn_qkv.weight",), changes.last_value_heads),
    *(
        Change(f"linear_attn.in_proj_{end}.weight", (f"{part}.weight",), changes.value_heads)
        for end, part in {"z": "attn_gate", "a": "ssm_alpha", "b": "ssm_beta"}.items()
    ),
    Change("linear_attn.out_proj.weight", ("ssm_out.weight",), changes.value_head_columns),
)
GPT_OSS = (
    Change(
        "mlp.experts.gate_up_proj",
        ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
        changes.alternating,
        by_expert=True,
    ),
    Change("mlp.experts.down_proj", ("ffn_down_exps.weight",), changes.transposed, by_expert=True),
    Change(
        "mlp.experts.gate_up_proj_bias",
        ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
        changes.alternating_biases,
    ),
    Change("mlp.experts.down_proj_bias", ("ffn_down_exps.bias",), changes.as_it_is),
)
LATENT = (
    Change("self_attn.kv_b_proj.weight", ("attn_k_b.weight", "attn_v_b.weight"), changes.latent_expansion),
)
JOINED = tuple(
    Change(f"self_attn.{name}_proj.{end}", (f"attn_qkv.{end}",), changes.rows_of_joined(which))
    for which, name in enumerate("qkv")
    for end in ("weight", "bias")
)


def mamba(block: str) -> tuple[Change, ...]:
    """The state-space layers of Mamba-2.

    Args:
        block: name of the module below the layer.
    """
    forms = {
        "A_log": ("ssm_a", changes.chained(changes.flat, changes.log_of_negated)),
        "D": ("ssm_d", changes.flat),
        "dt_bias": ("ssm_dt.bias", changes.as_it_is),
        "conv1d.weight": ("ssm_conv1d.weight", changes.as_channels),
        "norm.weight": ("ssm_norm.weight", changes.flat),
    }
    return tuple(Change(f"{block}.{name}", (part,), make) for name, (part, make) in forms.items())


SHARED_MLP = Change(
    "shared_mlp.input_linear.weight", ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), changes.joined
)
ROUTER_SCALES = (
    Change("router.scale", ("ffn_gate_inp.scale",), changes.as_it_is),
    Change("router.per_expert_scale", ("ffn_down_exps.scale",), changes.as_it_is),
    Change("layer_scalar", ("layer_output_scale.weight",), changes.as_it_is),
)
"""Gemma 4's factors on a router's inputs, on each expert's output, and on a layer's."""
