"""A memory plan: how the limits are divided between purposes, decided before anything is loaded."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from edgemoe.kv.blocks import BLOCK_ROWS
from edgemoe.machine.device import Device
from edgemoe.memory.limits import decode_rows
from edgemoe.storage.base import ResidentForm


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per purpose. All but DRAM, staging, totals and `first_kv_bytes` add up to the VRAM limit.

    In RAM the KV grows with the sequences, and a long prompt's step has its memory only while it runs: experts begin
    with the memory that these leave at first (`first_blocks`), and keep `plane_bytes` next to the whole of both.
    """

    vram_limit_bytes: int
    dram_limit_bytes: int
    dense_bytes: int
    kv_bytes: int
    workspace_bytes: int
    staging_bytes: int
    """RAM outside both limits: pinned buffers between disk and a device."""
    plane_bytes: int
    experts_resident: dict[str, int]
    """level -> experts that fit into plane_bytes, all of them at that level."""
    minimum_vram_bytes: int
    levels: tuple[int, ...]
    context: int
    vram_blocks: dict[str, int]
    """Block kind's name -> blocks in the VRAM tier."""
    dram_blocks: dict[str, int]
    experts: int = 0
    """Number of experts of the model."""
    experts_bytes: int = 0
    """Bytes of all experts at the highest level."""
    driver_bytes: int = 0
    """Bytes of a device that its driver takes for the process."""
    vision_bytes: int = 0
    """Bytes of a vision tower, of one picture while it is computed, and of features until their prompt has run."""
    compensators_bytes: int = 0
    """Bytes of low-rank compensators in memory, of the process's data about each, and of products with them."""
    compensators_resident_bytes: int = 0
    """Most bytes of compensators in memory; the others are read when a step wants them."""
    compensators_total_bytes: int = 0
    """Bytes of all compensators."""
    parallel: int = 1
    """Sequences that run at once, each with a KV for `context` tokens."""
    hot_experts: int | None = None
    """Experts that may have the higher level at once, where precision follows hotness."""
    scored_rows: int = 1
    """Rows of one step whose logits the workspace holds, with the bytes of a long step, all of them."""
    drafts: int = 0
    """Most guesses at a sequence's further tokens in a step of new tokens."""
    kv_cache: str = "bf16"
    """The format of keys and values."""
    prefill_rows: int = BLOCK_ROWS
    """Most token rows of a prompt in one step: a longer prompt reads experts again for each step."""
    long_step_bytes: int = 0
    """Bytes of a prompt's step, for its rows beyond one block, while it runs."""
    first_kv_bytes: int = 0
    """KV that is set aside from the start: all of it on a device, else the first block of each sequence."""
    first_blocks: dict[str, int] = field(default_factory=dict)
    """Block kind's name -> blocks of the VRAM tier with so much KV; `vram_blocks`: with all KV and a long step."""

    @property
    def decode_rows(self) -> int:
        """Most rows of a step of new tokens, with guesses."""
        return decode_rows(self.parallel, self.drafts)

    @property
    def vram_experts(self) -> int:
        """Most experts in the VRAM tier, at any level, together with the whole KV and a long step."""
        return max(self.vram_blocks.values())

    @property
    def first_experts(self) -> int:
        """Most experts in the VRAM tier, at any level, as long as sequences are short."""
        return max(self.first_blocks.values())

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the model under the limit that are not experts', with the whole KV and a long step."""
        always = self.dense_bytes + self.vision_bytes + self.kv_bytes
        return always + self.workspace_bytes + self.long_step_bytes

    @property
    def grows(self) -> bool:
        """Whether experts have bytes that the KV has not come to yet, or that a long step takes."""
        return self.first_kv_bytes < self.kv_bytes + self.long_step_bytes

    @property
    def dram_experts(self) -> int:
        """Most experts in the DRAM tier, at any level."""
        return max(self.dram_blocks.values(), default=0)

    def limit_bytes(self, device: Device | None) -> int:
        """Bytes that the model may take of a device's memory; in RAM, where both tiers lie, the sum of both limits."""
        return self.vram_limit_bytes + (0 if device else self.dram_limit_bytes)

    def used_bytes(self, form: ResidentForm) -> int:
        """RAM that the plan takes where there is no device, bytes; at most the sum of both limits."""

        def size(blocks: dict[str, int]) -> int:
            return sum(kind.size * blocks.get(kind.name, 0) for kind in form.kinds)

        at_first, at_last = (
            self.first_kv_bytes + size(self.first_blocks),
            self.kv_bytes + self.long_step_bytes + size(self.vram_blocks),
        )
        others = (
            self.dense_bytes
            + self.vision_bytes
            + self.workspace_bytes
            + self.compensators_bytes
            + size(self.dram_blocks)
        )
        return others + max(at_first, at_last)

    def as_json(self) -> dict[str, object]:
        """The plan as one JSON object."""
        return asdict(self)
