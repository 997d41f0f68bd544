"""Small models of transformers' MoE families with experts that train fast, and the loss that keeps them balanced."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

EXPERTS_NAME = "edgemoe-training"
"""The name under which transformers knows experts_forward."""


@dataclass(frozen=True)
class Size:
    """The sizes of the demo model; the defaults are the shipped model's: 16.4 M parameters, 32.9 MB in bf16."""

    vocabulary: int = 4096
    hidden: int = 256
    layers: int = 6
    experts: int = 32
    inner: int = 96
    top_k: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    context: int = 2048


SMALL = Size(layers=4, experts=16, top_k=2, inner=128)
"""The sizes of the families whose layers train slowly: 9 to 11 million parameters."""

FAMILIES = {
    "qwen3_moe": Size(),
    "olmoe": Size(),
    "granitemoe": Size(),
    "qwen3_5_moe_text": SMALL,
    "deepseek_v2": SMALL,
}
"""Family that `build` makes -> its sizes. olmoe's gate weights of the chosen experts sum to less than 1. granitemoe's
checkpoints fuse a layer's experts, and its embeddings, attention, residuals and logits have multipliers. Three of four
layers of qwen3_5_moe_text are gated delta nets, the fourth has gated attention. deepseek_v2 caches one latent row per
token (MLA), and its first layer is dense."""

DEMO_FAMILY = "qwen3_moe"


def make_config(family: str, size: Size, special: dict[str, int]) -> Any:
    """The configuration of a model of `family`, one of FAMILIES; `special` as in `build`."""
    from transformers import AutoConfig

    shared = {
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads if family == "deepseek_v2" else size.kv_heads,
        "num_experts_per_tok": size.top_k,
        "max_position_embeddings": size.context,
        "tie_word_embeddings": True,
        **special,
    }
    return AutoConfig.for_model(family, **shared, **_own_fields(family, size))


def _own_fields(family: str, size: Size) -> dict[str, Any]:
    """The fields of a family's configuration that other families name otherwise or do not have."""
    head, moe = {"head_dim": size.head_dim}, {"moe_intermediate_size": size.inner}
    if family == "granitemoe":
        return {
            "num_local_experts": size.experts,
            "intermediate_size": size.inner,
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        }
    if family == "olmoe":
        return {"num_experts": size.experts, "intermediate_size": size.inner, "norm_topk_prob": False}
    if family == "deepseek_v2":
        latent = {"kv_lora_rank": 2 * size.head_dim, "q_lora_rank": None, "v_head_dim": size.head_dim}
        heads = {"qk_nope_head_dim": size.head_dim, "qk_rope_head_dim": size.head_dim // 2}
        experts = {"n_routed_experts": size.experts, "n_shared_experts": 1, "first_k_dense_replace": 1}
        return {**moe, **latent, **heads, **experts, "intermediate_size": 3 * size.hidden}
    if family == "qwen3_5_moe_text":
        delta = {"linear_key_head_dim": size.head_dim, "linear_value_head_dim": size.head_dim}
        heads = {"linear_num_key_heads": size.kv_heads, "linear_num_value_heads": size.heads}
        experts = {"num_experts": size.experts, "shared_expert_intermediate_size": size.inner}
        return {**moe, **head, **delta, **heads, **experts}
    dense = {"intermediate_size": 3 * size.hidden, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return {**moe, **head, **dense, "num_experts": size.experts, "norm_topk_prob": True}


def build(size: Size, *, seed: int, special: dict[str, int], family: str = DEMO_FAMILY) -> Any:
    """Builds a causal language model in float32 with random weights, whose experts `experts_forward` computes.

    Args:
        size: sizes of the model.
        seed: seed of the weights.
        special: bos_token_id, eos_token_id and pad_token_id.
        family: one of FAMILIES.
    """
    from transformers import AutoModelForCausalLM
    from transformers.integrations.moe import ExpertsInterface

    config = make_config(family, size, special)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    ExpertsInterface().register(EXPERTS_NAME, experts_forward)
    model.set_experts_implementation(EXPERTS_NAME)
    return model


def experts_forward(
    experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Implements transformers' experts interface: hidden [T, H], index int64 [T, k], weights [T, k] -> [T, H]."""
    gate_up, down = experts.gate_up_proj, experts.down_proj
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, gate_up, down, weights = (x.to(dtype) for x in (hidden, gate_up, down, weights))
    out: torch.Tensor = _Experts.apply(hidden, gate_up, down, index, weights)  # type: ignore[no-untyped-call]
    return out


class _Experts(torch.autograd.Function):
    """Computes all experts of a layer at once: (token, slot) pairs sorted by expert, one GEMM for each expert.

    Gate weights multiply the input of the down projection, where rows are narrowest: w·(W x) = W (w·x).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        top_k = index.shape[1]
        order = index.flatten().argsort()
        counts = torch.bincount(index.flatten(), minlength=gate_up.shape[0]).tolist()
        rows = hidden[order // top_k]
        inner = _grouped(rows, gate_up, counts)
        gate, up = inner.chunk(2, dim=1)
        sorted_weights = weights.flatten()[order].unsqueeze(1)
        scaled = F.silu(gate).mul_(up).mul_(sorted_weights)
        out = _sum_slots(_grouped(scaled, down, counts), order, top_k)
        ctx.save_for_backward(rows, inner, sorted_weights, gate_up, down, order)
        ctx.counts, ctx.top_k = counts, top_k
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        rows, inner, sorted_weights, gate_up, down, order = ctx.saved_tensors
        counts, top_k = ctx.counts, ctx.top_k
        gate, up = inner.chunk(2, dim=1)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        act = silu * up
        grad_rows = grad[order // top_k]
        grad_down = _outer(grad_rows, act * sorted_weights, counts)
        grad_scaled = _grouped(grad_rows, down.transpose(1, 2), counts)
        grad_weights = torch.empty(order.numel(), dtype=grad.dtype, device=grad.device)
        grad_weights[order] = (grad_scaled * act).sum(1)
        grad_act = grad_scaled.mul_(sorted_weights)
        grad_inner = torch.empty_like(inner)
        half = gate.shape[1]
        torch.mul(grad_act, silu, out=grad_inner[:, half:])
        # d silu(g)/dg = s·(1 + g·(1 - s)) = s + silu(g)·(1 - s)
        torch.mul(grad_act.mul_(up), sigmoid + silu * (1 - sigmoid), out=grad_inner[:, :half])
        grad_gate_up = _outer(grad_inner, rows, counts)
        grad_hidden = _sum_slots(_grouped(grad_inner, gate_up.transpose(1, 2), counts), order, top_k)
        return grad_hidden, grad_gate_up, grad_down, None, grad_weights.view(-1, top_k)


def _runs(counts: list[int]) -> list[tuple[int, slice]]:
    """The (expert, rows) of every expert that has rows."""
    runs, start = [], 0
    for expert, n in enumerate(counts):
        if n:
            runs.append((expert, slice(start, start + n)))
        start += n
    return runs


def _grouped(rows: torch.Tensor, matrices: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Multiplies rows [n, K], sorted by expert, by each expert's transposed matrix [E, N, K] -> [n, N]."""
    out = rows.new_empty(rows.shape[0], matrices.shape[1])
    for expert, run in _runs(counts):
        torch.mm(rows[run], matrices[expert].t(), out=out[run])
    return out


def _outer(inputs: torch.Tensor, right: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Multiplies each expert's transposed left [n, N] by right [n, K] -> [E, N, K]; zero for an expert without rows."""
    out = inputs.new_zeros(len(counts), inputs.shape[1], right.shape[1])
    for expert, run in _runs(counts):
        torch.mm(inputs[run].t(), right[run], out=out[expert])
    return out


def _sum_slots(sorted_rows: torch.Tensor, order: torch.Tensor, top_k: int) -> torch.Tensor:
    """Sums rows [T·k, H] in sorted order per token -> [T, H]."""
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    return sorted_rows[place].view(-1, top_k, sorted_rows.shape[1]).sum(1)


ROUTERS = ("TopKRouter", "TopkRouter")
"""How the names of transformers' router classes end."""


class Balance:
    """The auxiliary loss E · sum_e f_e · p_e of each layer: f the fraction of tokens, p the mean router probability.

    f is a running mean over steps, so that experts are balanced over all domains together and can specialise within
    one. Hooks the model's routers; each thread has its own record of choices, so that threads may run batches at once.

    Attributes:
        load: float32 [layers, experts], f; sums to 1 in each layer.
    """

    def __init__(self, model: Any, decay: float = 0.95) -> None:
        routers = [module for module in model.modules() if type(module).__name__.endswith(ROUTERS)]
        self._experts, self._decay = routers[0].num_experts, decay
        self.load = torch.full((len(routers), self._experts), 1 / self._experts, device=model.device)
        self._record = threading.local()
        for number, router in enumerate(routers):
            router.register_forward_hook(partial(self._record_routing, number))

    def _record_routing(self, number: int, module: Any, inputs: Any, outputs: Any) -> None:
        if module.training:
            logits, _, index = outputs
            routed = self._record.__dict__.setdefault("routed", [[] for _ in self.load])
            routed[number].append((logits, index.flatten()))

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes the record of this thread's forward since the last call, in which a router may have run several times.

        Returns:
            the mean loss of the layers, 1 if the load is even; and each expert's times chosen, int64 [layers, experts].
        """
        routed = [[torch.cat(parts) for parts in zip(*calls, strict=True)] for calls in self._record.routed]
        del self._record.routed
        probabilities = torch.stack([logits.float().softmax(-1).mean(0) for logits, _ in routed])
        counts = torch.stack([torch.bincount(index, minlength=self._experts) for _, index in routed])
        return self._experts * (self.load * probabilities).sum(1).mean(), counts

    def update(self, counts: torch.Tensor) -> None:
        """Updates the running mean by a step's times chosen, int64 [layers, experts]."""
        self.load = self.load.lerp(counts / counts.sum(1, keepdim=True), 1 - self._decay)
