"""Times a prompt through one gated delta net of Qwen3-Next's sizes: transformers' module, and this program's layer.

    python -m tools.timing.delta_net [--tokens 512] [--runs 5] [--hidden 2048]

Weights are random, at 8 bits; "transformers, bf16" has them in bf16. The fastest of the runs counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, DynamicCache
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from edgemoe.kv.linear_state import LayerState, LinearStates
from edgemoe.kv.shape import LinearState
from edgemoe.layers.delta_net import GatedDeltaNet
from edgemoe.layers.dense import DenseLinear
from tools.command_line import make_parser, positive


def _in_8_bits(linear: nn.Linear) -> DenseLinear:
    wide = linear.weight.data.float()
    scale = (wide.abs().amax(1) / 127).bfloat16()
    return DenseLinear((wide / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8), scale, None)


def _fastest(run: Callable[[], object], runs: int) -> float:
    """Milliseconds of the fastest run."""
    found = []
    with torch.inference_mode():
        for _ in range(runs):
            start = time.perf_counter()
            run()
            found.append(1000 * (time.perf_counter() - start))
    return min(found)


def measure(tokens: int, runs: int, hidden: int) -> dict[str, float]:
    """Milliseconds of each way to compute a prompt, by its name."""
    config = AutoConfig.for_model(
        "qwen3_next", hidden_size=hidden, layer_types=["linear_attention"], num_hidden_layers=1
    )
    torch.manual_seed(0)
    plain: Any = Qwen3NextGatedDeltaNet(config, 0).bfloat16().eval()
    module = deepcopy(plain)
    for name, part in list(module.named_children()):
        if isinstance(part, nn.Linear):
            setattr(module, name, _in_8_bits(part))
    heads = plain.num_v_heads, plain.head_k_dim, plain.head_v_dim
    shape = LinearState((0,), plain.conv_dim, plain.conv_kernel_size, *heads)
    x = torch.randn(1, tokens, hidden).bfloat16()

    def state() -> LayerState:
        return LinearStates(shape).of(0, fresh=True)

    times = {
        "transformers, bf16": _fastest(lambda: plain(x, cache_params=DynamicCache(config=config)), runs),
        "transformers, products by this program": _fastest(lambda: module(x, cache_params=state()), runs),
    }
    own = GatedDeltaNet.try_from(module)
    if own is not None:
        core = x.new_zeros(1, tokens, own.native.writes)
        times["this program"] = _fastest(lambda: own(x, state()), runs)
        times["its products"] = _fastest(lambda: (own.projected(x), own.out(core)), runs)
    return times


def main(argv: Sequence[str] | None = None) -> None:
    """Prints one line for each way."""
    parser = make_parser("tools.timing.delta_net", __doc__)
    parser.add_argument("--tokens", type=positive, default=512)
    parser.add_argument("--runs", type=positive, default=5)
    parser.add_argument("--hidden", type=positive, default=2048, help="numbers of a state")
    given = parser.parse_args(argv)
    for name, milliseconds in measure(given.tokens, given.runs, given.hidden).items():
        print(f"{milliseconds:8.1f} ms  {name}")


if __name__ == "__main__":
    main()
