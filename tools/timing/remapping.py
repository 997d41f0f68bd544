"""Times the agreement on experts of a step's tokens (Lynx), apart from the step.

    python -m tools.timing.remapping [--rounds 400] [--layers 48]

Prints, for routers of 32 experts with 4 per token and of 128 with 8, and steps of 8 to 64 tokens: the least time of
some calls of edgemoe_remap for one layer, in microseconds, and what so many layers add to a token, in milliseconds.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

import torch

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.structures import RemappingRule, Router
from edgemoe.policy.remapping import Remapping
from tools.command_line import make_parser, positive

ROUTERS = ((32, 4), (128, 8))
"""(experts of a layer, experts of a token)."""

STEPS = (8, 16, 32, 64)


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line and prints the times."""
    parser = make_parser("tools.timing.remapping", __doc__)
    parser.add_argument("--rounds", type=positive, default=400, help="calls, of which the fastest counts")
    parser.add_argument("--layers", type=positive, default=48)
    options = parser.parse_args(arguments)
    print("experts, per token   tokens   us per layer   ms per token")
    for experts, top_k in ROUTERS:
        for tokens in STEPS:
            seconds = best_seconds(experts, top_k, tokens, options.rounds)
            per_token = seconds * options.layers / tokens
            print(f"{experts:7} {top_k:11} {tokens:8} {1e6 * seconds:14.1f} {1e3 * per_token:14.4f}")


def best_seconds(experts: int, top_k: int, tokens: int, rounds: int) -> float:
    """The least time in seconds of one call for a step of so many tokens, with random logits."""
    logits = (1.5 * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(0))).bfloat16()
    own = logits.float().topk(top_k).indices
    gates, scratch = torch.zeros(tokens, top_k), torch.zeros(3 * experts)
    counts, popularity = torch.zeros(2, dtype=torch.int64), torch.zeros(experts, dtype=torch.int64)
    lynx = Remapping()
    router = Router(count=experts, k=top_k, normalise=1)
    rule = RemappingRule(alpha=lynx.alpha, bins=lynx.bins, popularity=popularity.data_ptr())
    call, best = native.library().edgemoe_remap, float("inf")
    for _ in range(rounds):
        experts_of_tokens = own.clone()
        buffers = (scratch, experts_of_tokens, gates, counts)
        pointers = (logits.data_ptr(), tokens, *(each.data_ptr() for each in buffers))
        begin = time.perf_counter()
        call(ctypes.addressof(router), ctypes.addressof(rule), *pointers)
        best = min(best, time.perf_counter() - begin)
    return best


if __name__ == "__main__":
    main()
