"""The GGUF architectures that are read: each one's parts besides the names and sizes that most of them share."""

from __future__ import annotations

from typing import Any

from edgemoe.storage.formats import gguf_changes as changes
from edgemoe.storage.formats import gguf_derived as derived
from edgemoe.storage.formats import gguf_forms as forms
from edgemoe.storage.formats.gguf_changes import Change
from edgemoe.storage.formats.gguf_derived import derives
from edgemoe.storage.formats.gguf_row import Architecture

_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "num_experts_per_tok": "expert_used_count",
}
_MULTIPLIERS = {
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_INNER = {"moe_intermediate_size": "expert_feed_forward_length"}
_DENSE = {"intermediate_size": "feed_forward_length"}
_SPARSE = "block_sparse_moe.experts"
_LETTERS = (_SPARSE, "w1", "w3", "w2")
_PAIRED_ROWS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
_SIGMOID = 2
"""llama.cpp's number of a router's function; 1 is softmax."""


def _fixed(model_type: str, name: str, **values: Any) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [f"{name}ForCausalLM"], **values}


_GROUPS = {
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
}
_SHARED = {"n_routed_experts": "expert_count", "n_shared_experts": "expert_shared_count"}
_LEADING = {"first_k_dense_replace": "leading_dense_block_count"}

_SHARED_ONE = ("mlp.shared_expert.",)
_LINEAR = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "num_experts": "expert_count",
}
ARCHITECTURES = {
    "qwen3moe": Architecture(
        fixed=_fixed("qwen3_moe", "Qwen3Moe", norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[]),
        keys=_KEYS | _INNER | {"head_dim": "attention.key_length", "num_experts": "expert_count"},
        exported=True,
    ),
    "olmoe": Architecture(
        fixed=_fixed("olmoe", "Olmoe", norm_topk_prob=False, clip_qkv=None),
        keys=_KEYS | _DENSE | {"num_experts": "expert_count"},
        exported=True,
        repeated_heads=("attn_k", "attn_v", "attn_k_norm"),
        own_head=True,
    ),
    "granitemoe": Architecture(
        fixed=_fixed("granitemoe", "GraniteMoe"),
        keys=_KEYS | _DENSE | _MULTIPLIERS | {"num_local_experts": "expert_count"},
        beginnings=("block_sparse_moe.router.layer", "shared_mlp."),
        experts=(_SPARSE, "gate_proj", "up_proj", "down_proj"),
        changes=(forms.SHARED_MLP,),
        more=(derived.granite_with_shared_experts,),
        others=("granitemoeshared",),
        paired_rows=_PAIRED_ROWS,
        exported=True,
    ),
    "llama": Architecture(
        fixed=_fixed("mixtral", "Mixtral", sliding_window=None),
        keys=_KEYS | _DENSE | {"num_local_experts": "expert_count"},
        beginnings=("block_sparse_moe.gate",),
        experts=_LETTERS,
        paired_rows=_PAIRED_ROWS,
        exported=True,
    ),
    "qwen35moe": Architecture(
        fixed=_fixed("qwen3_5_moe_text", "Qwen3_5Moe"),
        keys=_KEYS | _INNER | _LINEAR | {"head_dim": "attention.key_length"},
        beginnings=_SHARED_ONE,
        changes=forms.QWEN3_5,
        more=(derived.linear_layers,),
    ),
    "qwen3next": Architecture(
        fixed=_fixed("qwen3_next", "Qwen3Next", decoder_sparse_step=1, mlp_only_layers=[]),
        keys=_KEYS | _INNER | _LINEAR | {"head_dim": "attention.key_length"},
        optional=_DENSE,
        beginnings=_SHARED_ONE,
        changes=forms.QWEN3_NEXT,
        more=(derived.linear_layers,),
    ),
    "gpt-oss": Architecture(
        fixed=_fixed("gpt_oss", "GptOss"),
        keys=_KEYS
        | {
            "head_dim": "attention.key_length",
            "intermediate_size": "expert_feed_forward_length",
            "num_local_experts": "expert_count",
            "sliding_window": "attention.sliding_window",
        },
        beginnings=("mlp.router",),
        changes=forms.GPT_OSS,
        more=(derived.untruncated_yarn,),
    ),
    "glm4moe": Architecture(
        fixed=_fixed("glm4_moe", "Glm4Moe", n_group=1, topk_group=1),
        keys=_KEYS | _INNER | _DENSE | _SHARED | _LEADING | {"head_dim": "attention.key_length"},
        optional=_GROUPS,
        expected={"expert_gating_func": _SIGMOID},
        more=(derives("use_qk_norm", "attn_q_norm.weight"), derives("attention_bias", "attn_q.bias")),
    ),
    "deepseek2": Architecture(
        fixed=_fixed("deepseek_v3", "DeepseekV3", n_group=1, topk_group=1, norm_topk_prob=False),
        keys={key: field for key, field in _KEYS.items() if key != "num_key_value_heads"}
        | _INNER
        | _DENSE
        | _SHARED
        | {"kv_lora_rank": "attention.kv_lora_rank", "qk_rope_head_dim": "rope.dimension_count"},
        optional=_GROUPS,
        changes=forms.LATENT,
        more=(derived.latent_sizes, derived.kind_of_deepseek),
        others=("deepseek_v2", "glm4_moe_lite"),
    ),
    "qwen2moe": Architecture(
        fixed=_fixed(
            "qwen2_moe", "Qwen2Moe", norm_topk_prob=False, decoder_sparse_step=1, mlp_only_layers=[]
        ),
        keys=_KEYS | _INNER | _DENSE | {"num_experts": "expert_count"},
        beginnings=_SHARED_ONE,
        changes=(forms.SHARED_GATE,),
        more=(derived.shared_expert_size, derives("qkv_bias", "attn_q.bias")),
    ),
    "minimax-m2": Architecture(
        fixed=_fixed("minimax_m2", "MiniMaxM2"),
        keys=_KEYS
        | {
            "head_dim": "attention.key_length",
            "num_local_experts": "expert_count",
            "intermediate_size": "expert_feed_forward_length",
        },
        expected={"expert_gating_func": _SIGMOID},
        beginnings=("block_sparse_moe.",),
        experts=_LETTERS,
    ),
    "lfm2moe": Architecture(
        fixed=_fixed("lfm2_moe", "Lfm2Moe"),
        keys={key: field for key, field in _KEYS.items() if key != "rms_norm_eps"}
        | _INNER
        | _DENSE
        | {
            "norm_eps": "attention.layer_norm_rms_epsilon",
            "num_experts": "expert_count",
            "num_dense_layers": "leading_dense_block_count",
            "conv_L_cache": "shortconv.l_cache",
        },
        expected={"expert_gating_func": _SIGMOID},
        beginnings=(
            *("operator_norm", "ffn_norm", "feed_forward.w", "feed_forward.gate", "feed_forward.", "conv."),
            *("self_attn.out_proj", "self_attn.q_layer", "self_attn.k_layer"),
        ),
        experts=("feed_forward.experts", "w1", "w3", "w2"),
        changes=(
            Change("model.embedding_norm.weight", ("token_embd_norm.weight",), changes.as_it_is),
            Change("conv.conv.weight", ("shortconv.conv.weight",), changes.as_channels),
        ),
        more=(derived.convolution_layers, derives("use_expert_bias", "exp_probs_b.bias")),
    ),
    "dots1": Architecture(
        fixed=_fixed("dots1", "Dots1", n_group=1, topk_group=1, sliding_window=None),
        keys=_KEYS | _INNER | _DENSE | _SHARED | _LEADING,
        optional=_GROUPS,
        expected={"expert_gating_func": _SIGMOID},
    ),
    "hunyuan-moe": Architecture(
        fixed=_fixed("hunyuan_v1_moe", "HunYuanMoEV1"),
        keys={key: field for key, field in _KEYS.items() if key != "num_experts_per_tok"}
        | {
            "head_dim": "attention.key_length",
            "num_experts": "expert_count",
            "moe_topk": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
        },
        expected={"expert_shared_count": 1},
        beginnings=("mlp.gate.wg", "mlp.shared_mlp.", "self_attn.query_", "self_attn.key_"),
    ),
    "ernie4_5-moe": Architecture(
        fixed=_fixed("ernie4_5_moe", "Ernie4_5_Moe", use_bias=False),
        keys={key: field for key, field in _KEYS.items() if key != "num_experts_per_tok"}
        | _INNER
        | _DENSE
        | {
            "moe_num_experts": "expert_count",
            "moe_k": "expert_used_count",
            "moe_layer_start_index": "leading_dense_block_count",
            "moe_layer_interval": "interleave_moe_layer_step",
        },
        optional={"moe_num_shared_experts": "expert_shared_count"},
        changes=(Change("mlp.moe_statics.e_score_correction_bias", ("exp_probs_b.bias",), changes.as_row),),
    ),
    "phimoe": Architecture(
        fixed=_fixed("phimoe", "Phimoe"),
        keys=_KEYS | _DENSE | {"num_local_experts": "expert_count"},
        beginnings=("block_sparse_moe.gate",),
        experts=_LETTERS,
        changes=forms.JOINED,
        more=(
            derived.own_window,
            derives("attention_bias", "attn_q.bias", "attn_qkv.bias"),
            derives("lm_head_bias", "output.bias"),
        ),
        read_apart=("rope_factors_long.weight", "rope_factors_short.weight"),
    ),
    "granitehybrid": Architecture(
        fixed=_fixed("granitemoehybrid", "GraniteMoeHybrid"),
        keys=_KEYS
        | _DENSE
        | _MULTIPLIERS
        | {
            "num_local_experts": "expert_count",
            "shared_intermediate_size": "expert_shared_feed_forward_length",
            "mamba_n_heads": "ssm.time_step_rank",
            "mamba_d_state": "ssm.state_size",
            "mamba_n_groups": "ssm.group_count",
            "mamba_d_conv": "ssm.conv_kernel",
        },
        beginnings=("block_sparse_moe.router.layer", "shared_mlp.", "mamba."),
        experts=(_SPARSE, "gate_proj", "up_proj", "down_proj"),
        changes=(*forms.mamba("mamba"), forms.SHARED_MLP),
        more=(derived.mamba_sizes,),
        paired_rows=_PAIRED_ROWS,
    ),
    "nemotron_h_moe": Architecture(
        fixed=_fixed("nemotron_h", "NemotronH", topk_group=1),
        keys={key: field for key, field in _KEYS.items() if key != "rms_norm_eps"}
        | _INNER
        | _SHARED
        | {
            "layer_norm_epsilon": "attention.layer_norm_epsilon",
            "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
            "mamba_num_heads": "ssm.time_step_rank",
            "ssm_state_size": "ssm.state_size",
            "n_groups": "ssm.group_count",
            "conv_kernel": "ssm.conv_kernel",
        },
        optional=_GROUPS | {"moe_latent_size": "moe_latent_size"},
        layers="backbone.layers.",
        outside={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"},
        beginnings=("norm", "mixer.gate", "mixer."),
        experts=("mixer.experts", "", "up_proj", "down_proj"),
        changes=forms.mamba("mixer"),
        more=(derived.nemotron_layers,),
    ),
    "gemma4": Architecture(
        fixed=_fixed("gemma4_text", "Gemma4", enable_moe_block=True, hidden_activation="gelu_pytorch_tanh"),
        keys={key: field for key, field in _KEYS.items() if key != "num_experts_per_tok"}
        | _INNER
        | _DENSE
        | {
            "num_experts": "expert_count",
            "top_k_experts": "expert_used_count",
            "sliding_window": "attention.sliding_window",
            "hidden_size_per_layer_input": "embedding_length_per_layer_input",
        },
        optional={
            "final_logit_softcapping": "final_logit_softcapping",
            "num_kv_shared_layers": "attention.shared_kv_layers",
        },
        beginnings=("router.proj", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        experts=("experts", "gate_proj", "up_proj", "down_proj"),
        changes=forms.ROUTER_SCALES,
        more=(derived.gemma4_layers,),
        read_apart=("rope_freqs.weight",),
    ),
}
"""general.architecture -> what it is in transformers."""
