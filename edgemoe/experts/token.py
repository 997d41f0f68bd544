"""A single token's routed experts on a CPU, computed where their results belong and added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cache.base import Lease
from edgemoe.experts.layer import ExpertLayer, ExpertRunner, look_ahead, scored, without_skipped
from edgemoe.kernels.base import TokenKernel
from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.experts import HeldExperts, NativeExpertKernel
from storage.base import ExpertKey


class TokenExperts:
    """One layer's, where the kernel takes its gating.

    What the source holds for good is computed without asking it again.

    Args:
        binding: of the layer's experts module.
        kernel: its runner's.
        experts: in the layer.
    """

    def __init__(self, binding: ExpertLayer, kernel: TokenKernel, experts: int) -> None:
        self._binding, self._kernel = binding, kernel
        self._keys = [ExpertKey(binding.layer, expert) for expert in range(experts)]
        self._held: dict[tuple[int, int], tuple[object, int]] = {}
        """(expert, level wanted) -> what the kernel knows of it, and the level to compute at."""
        self.held = HeldExperts(kernel, experts) if isinstance(kernel, NativeExpertKernel) else None
        """The same for C, where all experts are wanted at one level and nobody watches; None: C runs no such kernel."""
        self._holds = -1
        """The source's, when these two were good."""
        self._results: torch.Tensor | None = None

    @classmethod
    def like(cls, module: Any, binding: ExpertLayer) -> TokenExperts | None:
        """One for an experts module that will be bound so, where edgemoe's kernel runs and takes its gating."""
        runner, kernel = binding.runner, binding.runner.kernel
        if runner.device or not native.available() or not isinstance(kernel, TokenKernel):
            return None
        if getattr(module, "has_bias", False) or not kernel.takes(module._apply_gate):
            return None
        return cls(binding, kernel, module.num_experts)

    def __call__(
        self,
        hidden: torch.Tensor,
        chosen: torch.Tensor,
        gates: torch.Tensor,
        plus: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As experts_forward, of one token.

        Args:
            hidden: bf16 [1, H], contiguous.
            chosen: int64 [1, k], the experts the router chose.
            gates: [1, k], their gate weights.
            plus: bf16, H in all, contiguous: the sum is added to it in place.

        Returns:
            bf16 [1, H], or `plus`.
        """
        if watch := self._binding.runner.watch:
            watch(self._binding.layer, chosen)
        experts, levels = chosen[0].tolist(), self._levels(chosen, gates)
        if 0 in levels:
            gates = self._without_skipped(gates, levels)
            experts = [expert for expert, level in zip(experts, levels, strict=True) if level]
            levels = [level for level in levels if level]
        rows = self._rows(len(experts), hidden)
        if not self._compute_held(hidden, experts, levels, rows):
            self._compute_streamed(hidden, experts, levels, rows, slots=chosen.shape[1])
        return native.weighted_sum(rows[None], gates.float(), plus)

    @property
    def runner(self) -> ExpertRunner:
        """Of its layer."""
        return self._binding.runner

    def renew(self) -> None:
        """Forgets what is not held any more."""
        holds = self._binding.runner.source.holds
        if self._holds != holds:
            self._held, self._holds = {}, holds
            if self.held:
                self.held.clear()

    def _rows(self, count: int, like: torch.Tensor) -> torch.Tensor:
        """Room for the experts' results, bf16 [count, H]: the last call's, where as many had any."""
        if self._results is None or len(self._results) != count:
            self._results = like.new_empty(count, like.shape[1])
        return self._results

    def _levels(self, chosen: torch.Tensor, gates: torch.Tensor) -> list[int]:
        policy, state = self._binding.runner.policy, self._binding.runner.state
        if policy.uniform is not None:
            return [policy.uniform] * chosen.shape[1]
        levels = policy.levels(self._binding.layer, chosen, gates, state.scores, decode=state.decode)
        listed: list[int] = levels[0].tolist()
        return listed

    def _without_skipped(self, gates: torch.Tensor, levels: list[int]) -> torch.Tensor:
        """Gate weights of what is not skipped, [1, kept]."""
        runner, skipped = self._binding.runner, levels.count(0)
        runner.use.skipped(skipped, pairs=skipped)
        renormalise = runner.policy.settings.renormalise
        rescaled = without_skipped(gates, torch.tensor([levels]), renormalise=renormalise)
        return rescaled[:, [slot for slot, level in enumerate(levels) if level]]

    def _compute_held(
        self, hidden: torch.Tensor, experts: list[int], levels: list[int], rows: torch.Tensor
    ) -> bool:
        """Whether the source holds all of these; then they are computed."""
        runner = self._binding.runner
        self.renew()
        try:
            held = [self._held[pair] for pair in zip(experts, levels, strict=True)]
        except KeyError:
            return False
        runner.source.count_held(levels)
        self._compute(hidden, held, levels, range(len(held)), rows)
        return True

    def _compute_streamed(
        self, hidden: torch.Tensor, experts: list[int], levels: list[int], rows: torch.Tensor, *, slots: int
    ) -> None:
        runner, keys = self._binding.runner, self._keys
        # In the router's order: what weighs least is what may be left in a slower tier.
        wanted = {keys[expert]: level for expert, level in zip(experts, levels, strict=True)}
        row_of = {expert: row for row, expert in enumerate(experts)}
        with runner.source.stream(wanted) as leases:
            look_ahead(self._binding, scored(self._binding, hidden), slots)
            for lease in leases:
                together = [lease, *leases.ready()]
                asked = [wanted[lease.key] for lease in together]
                parts = [self._prepared(*pair) for pair in zip(together, asked, strict=True)]
                self._compute(hidden, parts, asked, [row_of[lease.key.expert] for lease in together], rows)
        if runner.source.roomy:
            self._hold(wanted)

    def _hold(self, wanted: dict[ExpertKey, int]) -> None:
        """Holds these; the first time whatever the layer has resident, since a prompt has brought most of it.

        Where planes that are there are used, only what has all it will ever get: the others may be raised yet.
        """
        source, settings = self._binding.runner.source, self._binding.runner.policy.settings
        self.renew()
        if not self._held:
            wanted = dict.fromkeys(self._keys, settings.levels[0]) | wanted
        for key, level in wanted.items():
            least = level if settings.exact else settings.levels[0]
            if (key.expert, level) not in self._held and (lease := source.hold(key, least)):
                prepared = self._held[key.expert, level] = self._prepared(lease, level)
                if self.held and len(settings.levels) == 1 and not self.runner.watch:
                    self.held.put(key.expert, prepared[0])

    def _prepared(self, lease: Lease, wanted: int) -> tuple[object, int]:
        """At the level wanted or, where that may be more, the resident one."""
        level = wanted if self._binding.runner.policy.settings.exact else lease.level
        return self._kernel.prepared(lease.blocks, level), level

    def _compute(
        self,
        hidden: torch.Tensor,
        parts: Sequence[tuple[object, int]],
        levels: Sequence[int],
        places: Sequence[int],
        rows: torch.Tensor,
    ) -> None:
        self._binding.runner.use.of_one_token(levels, [level for _, level in parts])
        self._kernel.into(hidden, [expert for expert, _ in parts], places, rows)
