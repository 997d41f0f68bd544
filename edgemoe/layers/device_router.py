"""Routers of a few rows on a device: two launches instead of transformers' operators, some ten to forty."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from edgemoe.families.base import Traits
from edgemoe.kernels.native.router import RouterForm
from edgemoe.kernels.registry import triton_runs
from edgemoe.layers.router import closest, forms_of, further_arguments, top_k_of, weight_of

_UP_TO = 16
"""Rows up to which the kernel chooses. Each row reads the whole weight, from the cache after the first one."""


class DeviceRouter:
    """The forward function of a router on a device: few rows by Triton's kernel, more by transformers' operators.

    Args:
        router: transformers' router.
        form: how it chooses; one that kernels.triton.scored_router.TritonRouter.fits.
    """

    def __init__(self, router: Any, form: RouterForm) -> None:
        from edgemoe.kernels.triton.scored_router import TritonRouter

        self._forward: Callable[..., Any] = router.forward
        self._choose = TritonRouter(weight_of(router).data, top_k_of(router), form)

    @classmethod
    def try_from(
        cls, router: Any, traits: Traits, config: Any, further: Sequence[torch.Tensor] = ()
    ) -> DeviceRouter | None:
        """Makes one where Triton's kernels run and choose as transformers' router does; None elsewhere.

        Args:
            router: the router of a MoE block.
            traits: the traits of its family.
            config: transformers' config of the model.
            further: the router's arguments after the states; the first is a bias of its scores for the choice.
        """
        weight = weight_of(router)
        if weight is None or weight.dtype not in (torch.bfloat16, torch.float32):
            return None
        if not triton_runs(weight.device) or not weight.is_contiguous():
            return None
        from edgemoe.kernels.triton.scored_router import TritonRouter

        forms = forms_of(router, traits.gate, config, further)
        made = [cls(router, form) for form in forms if TritonRouter.fits(len(weight), form)]
        return closest(made, router, further)

    def __call__(self, hidden: torch.Tensor, *further: torch.Tensor) -> Any:
        """bf16 [..., H] -> logits [T, E], gate weights [T, k], experts int64 [T, k]: transformers' router interface.

        `further` is the arguments that transformers' router takes as well, and that the kernel has already.
        """
        rows = hidden.reshape(-1, hidden.shape[-1])
        if 0 < len(rows) <= _UP_TO and hidden.dtype == torch.bfloat16:
            return self._choose(rows.contiguous())
        return self._forward(hidden, *further)


def choose_on_device(block: Any, router: Any, traits: Traits, config: Any) -> None:
    """Makes transformers' router of a block choose by Triton's kernel, where that runs and chooses as it does.

    Args:
        block: the MoE block of a layer.
        router: its router.
        traits: the traits of its family.
        config: transformers' config of the model.
    """
    weight = weight_of(router)
    if weight is None or not triton_runs(weight.device):
        return
    further = [getattr(block, name) for name in further_arguments(block, router)]
    if own := DeviceRouter.try_from(router, traits, config, further):
        router.forward = own
