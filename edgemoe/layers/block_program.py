"""The operations of a decoder layer's block: its experts, and what every token has next to them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from edgemoe.experts.layer import ExpertLayer
from edgemoe.kernels.native.expert_activation import NativeExpertActivation
from edgemoe.kernels.native.functions import values_of
from edgemoe.kernels.program import (
    HIDDEN,
    NORMED,
    Activate,
    Add,
    Apply,
    Call,
    Experts,
    Linear,
    Multiply,
    Norm,
    Operation,
    Scale,
)
from edgemoe.layers.called import call_block, call_parallel
from edgemoe.layers.decoder_parts import LayerPart, ParallelExperts
from edgemoe.layers.dense import DenseNorm
from edgemoe.layers.gated_mlp import GatedMLP, PlainMLP
from edgemoe.layers.gating import gate_tables
from edgemoe.layers.router import CompiledRouter, router_of

DenseBlock = GatedMLP | PlainMLP

_SHARED = ("shared_expert", "shared_experts", "shared_mlp")
"""Names of a block's experts that every token has."""

_AFTER = "post_mlp_layernorm"
"""Name of a norm of a block's result, inside of the block (A.X-K1)."""

_KNOWN = {*_SHARED, _AFTER, "gate", "router", "experts", "shared_expert_gate"}
"""Names of the parts of a block whose sum is known: routed experts, and shared ones, perhaps scaled."""


def experts_in(block: nn.Module) -> ExpertLayer | None:
    """The experts of a block that has any."""
    experts: ExpertLayer | None = getattr(getattr(block, "experts", None), "edgemoe", None)
    return experts


def added(part: LayerPart) -> list[Operation]:
    """The operations that add a part's result to the state."""
    after: list[Operation] = [] if part.after is None else [norm_operation(part.after, "block", "block")]
    scaled = [] if part.residual == 1 else [Multiply(HIDDEN, HIDDEN, part.residual)]
    return [*after, *scaled, Add("block", HIDDEN, part.factor)]


def norm_operation(norm: DenseNorm, source: str, target: str) -> Norm:
    """The operation of a norm."""
    return Norm(source, target, norm.weight.data, norm.variance_epsilon)


def block_operations(part: LayerPart, hidden: int) -> list[Operation]:
    """The operations that add a layer's block to the state, of `hidden` numbers, once its input is in NORMED."""
    if part.parallel:
        return _dense_and_experts(part, part.parallel)
    block = part.module
    if isinstance(block, DenseBlock):
        return [*_dense(block, "block"), *added(part)]
    experts = experts_in(block)
    own = {name: each for name, each in block.named_children() if not isinstance(each, nn.Identity)}
    inside = next((own[name] for name in _SHARED if name in own), None)
    shared = inside if part.shared is None else part.shared
    known = own.keys() <= _KNOWN and isinstance(shared, DenseBlock | None) and None in (inside, part.shared)
    known = known and isinstance(own.get(_AFTER), DenseNorm | None)
    router = router_of(block) if experts else None
    fuses, activation = _activation(block, experts)
    if not (known and experts and fuses and isinstance(router, CompiledRouter)):
        return [Call(NORMED, "block", partial(call_block, block, part.shared), hidden), *added(part)]
    part = part._replace(after=own.get(_AFTER, part.after))
    if shared is None and not part.factor and part.after is None and not _multiplied(block):
        return [Experts(HIDDEN, router.native, activation)]
    scaled: list[Operation] = []
    if "shared_expert_gate" in own:
        gate = Linear(NORMED, "shared_gate", block.shared_expert_gate.parts)
        scaled = [gate, Scale("shared_gate", "shared", values_of(torch.sigmoid))]
    summed = [*_dense(shared, "shared"), *scaled, Add("shared", "block")] if shared is not None else []
    if summed and getattr(block, "shared_expert_combination_strategy", "sum") == "average":
        part = part._replace(factor=0.5)
    return [Experts("block", router.native, activation), *_multiplied(block), *summed, *added(part)]


def _multiplied(block: Any) -> list[Operation]:
    """The product of the routed experts' sum with a block's own factor, where it has one."""
    factor = float(getattr(block, "routed_scaling_factor", 1))
    return [] if factor == 1 else [Multiply("block", "block", factor)]


def _dense_and_experts(part: LayerPart, parallel: ParallelExperts) -> list[Operation]:
    """The operations that add a dense block, and the experts parallel to it, to the state."""
    hidden, router = part.norm.weight.numel(), router_of(parallel.block)
    fuses, activation = _activation(parallel.block, experts_in(parallel.block))
    called = Call(NORMED, "block", partial(call_block, part.module, None), hidden)
    dense = _dense(part.module, "block") if isinstance(part.module, DenseBlock) else [called]
    if fuses and isinstance(router, CompiledRouter):
        normed = norm_operation(parallel.norm, HIDDEN, NORMED)
        experts: list[Operation] = [normed, Experts("routed", router.native, activation, routed=HIDDEN)]
    else:
        experts = [Call(HIDDEN, "routed", partial(call_parallel, parallel), hidden)]
    summed = [norm_operation(parallel.after, "routed", "routed"), Add("routed", "block")]
    return [*dense, norm_operation(parallel.after_dense, "block", "block"), *experts, *summed, *added(part)]


def _activation(block: Any, experts: ExpertLayer | None) -> tuple[bool, NativeExpertActivation | None]:
    """Whether the kernel computes what lies between the products of a block's experts, and what that is."""
    if experts is None or experts.fuses:
        return experts is not None, None
    tables = gate_tables(block.experts)
    return tables is not None, NativeExpertActivation(tables, experts.biases) if tables else None


def _dense(module: GatedMLP | PlainMLP, output: str) -> list[Operation]:
    if isinstance(module, PlainMLP):
        applied = Apply("up", "inner", values_of(module.function))
        above: list[Operation] = [Linear(NORMED, "up", module.up.parts), applied]
    else:
        gate_up = Linear(NORMED, "gate_up", module.gate_up.parts)
        above = [gate_up, Activate("gate_up", "inner", module.values)]
    return [*above, Linear("inner", output, module.down.parts)]
