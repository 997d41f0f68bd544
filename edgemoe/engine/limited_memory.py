"""An engine's limit: blocks of experts give way to sequences and long steps, and come back (decision 0042)."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from edgemoe.cache.budget import Budget
from edgemoe.machine.process import return_free_memory
from edgemoe.memory.plan import MemoryPlan
from edgemoe.memory.split import BlockSplit
from edgemoe.memory.tiers import form_of
from edgemoe.models.store_model import StoreModel
from edgemoe.policy.settings import RunSettings


def _free_locals(error: BaseException | None) -> None:
    """Clears the local variables of an exception's frames: a step's tensors would live as long as the exception."""
    while error:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _keep(blocks: Mapping[str, int]) -> None:
    """Changes nothing."""


class LimitedMemory:
    """Reserves a plan's bytes: fixed ones, blocks of experts, and sequences, which are promised the plan's whole KV.

    Where sequences, or the step of a long prompt, need bytes that the budget lacks, experts lose blocks first. Experts
    get the bytes that sequences and steps return. Used by the engine's thread before and between steps, so no step
    finds too little memory.

    Args:
        plan: the division of the limit.
        split: the division of the fastest tier's bytes into blocks.
        resize: changes the number of its blocks (ExpertSource.resize).

    Attributes:
        budget: the bytes of the limit that are reserved.
        blocks: block kind's name -> blocks that experts have now.
        long_step_bytes: bytes that a step has now in addition to the workspace.
        returned: whether a long step has ended whose bytes the next short step gives back to experts.
    """

    def __init__(
        self, plan: MemoryPlan, split: BlockSplit, resize: Callable[[Mapping[str, int]], None]
    ) -> None:
        self._plan, self._split, self._resize = plan, split, resize
        self.budget, self.blocks = Budget(plan.vram_limit_bytes), dict(plan.first_blocks)
        self.budget.reserve("driver", plan.driver_bytes)
        self.budget.reserve("dense", plan.dense_bytes)
        self.budget.reserve("vision", plan.vision_bytes)
        self.budget.reserve("workspace", plan.workspace_bytes)
        self.budget.reserve("compensators", plan.compensators_bytes)
        self._fixed_bytes = self.budget.used_bytes
        self.long_step_bytes, self.returned = 0, False
        self.budget.reserve("planes", self.expert_bytes)
        self._grows = plan.grows

    @property
    def expert_bytes(self) -> int:
        """Bytes that blocks of experts have now."""
        return self._split.bytes_of(self.blocks)

    @property
    def most_bytes(self) -> int:
        """Most bytes of RAM that were reserved at once, with the tier that has a limit of its own."""
        return self.budget.most_bytes + self._split.bytes_of(self._plan.dram_blocks)

    @property
    def kv_bytes(self) -> int:
        """Bytes that sequences have reserved."""
        return self.budget.used_bytes - self._fixed_bytes - self.long_step_bytes - self.expert_bytes

    @property
    def free_kv_bytes(self) -> int:
        """Bytes that sequences can still reserve, including bytes that experts give up for them."""
        least = self._split.bytes_of(self._plan.vram_blocks) + self._plan.long_step_bytes
        return self.budget.limit - self._fixed_bytes - least - self.kv_bytes

    def require_kv(self, nbytes: int) -> None:
        """Refuses bytes that sequences cannot reserve even with the fewest blocks of experts.

        Raises:
            DoesNotFit: with the smallest sufficient limit.
        """
        fewest = Budget(self.budget.limit)
        fewest.reserve("everything else", self.budget.limit - self.free_kv_bytes)
        fewest.reserve("kv", nbytes)

    def reserve_kv(self, nbytes: int) -> None:
        """Reserves bytes for a sequence. Where they are not free experts lose blocks, which return their memory before.

        Raises:
            DoesNotFit: as require_kv; nothing has changed.
        """
        self.require_kv(nbytes)
        if self.budget.used_bytes + nbytes > self.budget.limit:
            self._fit_blocks(self.kv_bytes + nbytes)
        self.budget.reserve("kv", nbytes)

    def release_kv(self, nbytes: int) -> None:
        """Returns bytes of a sequence, whose memory is free; experts get blocks of them."""
        self.budget.release(nbytes)
        if self._grows:
            self._fit_blocks(self.kv_bytes)

    @contextmanager
    def long_step(self, nbytes: int) -> Iterator[None]:
        """Reserves bytes in addition to the workspace while the block runs a step; experts lose blocks where needed.

        Experts get the blocks back before the next short step, or when a sequence returns bytes: then Ctrl-C while
        blocks are added finds no step half done. Short steps may run between the layers of a long one.

        Args:
            nbytes: bytes to reserve, at most the plan's long_step_bytes; 0 for a short step.
        """
        if not nbytes:
            if self.returned:
                return_free_memory()  # holes in malloc's heap, where the experts' blocks are to be
                self._fit_blocks(self.kv_bytes)
                self.returned = False
            yield
            return
        assert nbytes <= self._plan.long_step_bytes
        assert not self.long_step_bytes
        if self.budget.used_bytes + nbytes > self.budget.limit:
            self._fit_blocks(self.kv_bytes, nbytes)
        self.budget.reserve("workspace", nbytes)
        self.long_step_bytes = nbytes
        self.returned = False
        try:
            yield
        except BaseException as error:
            _free_locals(error)
            raise
        finally:
            self.budget.release(nbytes)
            self.long_step_bytes, self.returned = 0, self._grows

    def close(self) -> None:
        """Leaves the blocks as they are from now on, and drops `resize`, by which it may refer to its owner."""
        self._grows, self.returned, self._resize = False, False, _keep

    def _fit_blocks(self, kv: int, long_step: int | None = None) -> None:
        """Resizes the experts' blocks to the space that the KV and a long step leave.

        Args:
            kv: bytes of KV; the plan's first_kv_bytes count where they are more.
            long_step: bytes of the long step; None: the bytes that are reserved.
        """
        taken = max(kv, self._plan.first_kv_bytes) + (
            self.long_step_bytes if long_step is None else long_step
        )
        blocks = self._split.blocks(self.budget.limit - self._fixed_bytes - taken)
        blocks = {kind: min(count, self._plan.first_blocks[kind]) for kind, count in blocks.items()}
        if blocks != self.blocks:
            before = self.expert_bytes
            self._resize(blocks)
            self.blocks = blocks
            self.budget.release(before - self.expert_bytes)


def block_split(store: StoreModel, settings: RunSettings) -> BlockSplit:
    """How the fastest tier's bytes are divided into blocks of each kind."""
    form, damage = form_of(store.form, settings), store.known_damage(settings)
    return BlockSplit.of(store.shape, form, settings, damage)
