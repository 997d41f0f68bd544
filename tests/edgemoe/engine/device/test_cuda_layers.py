"""Layers of one new token in a CUDA graph, on a real GPU. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from family_models import blocks_of, random_model, router_of

from edgemoe.families.traits import TRAITS
from edgemoe.kv.linear_state import LinearStates
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.shape import KVShape, LinearState
from edgemoe.layers.dense import DenseLinear
from edgemoe.layers.device_delta_net import DeviceDeltaNet
from edgemoe.layers.device_norm import TritonNorm
from edgemoe.layers.device_router import DeviceRouter, choose_on_device
from edgemoe.layers.linear_attention import stateful_modules

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
]


def test_files_have_the_rows_of_a_gpu():
    """Keys and values that were written on the GPU are in the views, and rows of a file are on the GPU once stored."""
    shape = KVShape((0, 1), 2, 8, 4).moving()
    written, read = (SequenceKV(shape, 512, "cuda") for _ in range(2))
    written.keys.normal_()
    written.values.normal_()
    views, into = written.rows(256, 512).load(), read.rows(256, 512)
    for view, source in zip(into.views, views, strict=True):
        view[:] = source
    into.store()
    assert torch.equal(read.keys[:, :, 256:], written.keys[:, :, 256:])
    assert torch.equal(read.values[:, :, 256:], written.values[:, :, 256:])


def test_a_captured_token_equals_one_that_is_launched():
    """A gated delta net, a norm and a router in one graph, launched again with another state and another input."""
    model = random_model("qwen3_5_moe_text").cuda()
    module = next(iter(stateful_modules(model).values()))
    for name, part in list(module.named_children()):
        if isinstance(part, torch.nn.Linear):
            setattr(module, name, DenseLinear(part.weight.data, None, None))
    net = DeviceDeltaNet.try_from(module)
    norm = TritonNorm.try_from(model.get_submodule("model.norm"))
    block = blocks_of(model)[0]
    choose_on_device(block, router_of(block), TRAITS["qwen3_5_moe_text"], model.config)
    assert net is not None
    assert norm is not None
    assert isinstance(router_of(block).forward, DeviceRouter)
    sizes = module.num_v_heads, module.head_k_dim, module.head_v_dim
    shape = LinearState((0,), module.conv_dim, module.conv_kernel_size, *sizes)
    state = LinearStates(shape, "cuda").of(0, fresh=False)
    x = torch.randn(1, 1, model.config.hidden_size).bfloat16().cuda()

    def token() -> list[torch.Tensor]:
        mixed = net(hidden_states=norm(x), cache_params=state)
        return [mixed, *state.after, *router_of(block)(mixed)]

    with torch.inference_mode():
        token()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = token()
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            for tensor in (x, *state.before):
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            want = [each.clone() for each in token()]
            for each in state.after:
                each.fill_(torch.nan)
            graph.replay()
            assert all(map(torch.equal, captured, want))
