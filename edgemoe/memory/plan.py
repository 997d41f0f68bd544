"""Who gets how much of the limits, decided before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from edgemoe.console.sizes import format_size
from edgemoe.experts.layer import BATCH_ROWS
from edgemoe.kernels.registry import beside_device, compute
from edgemoe.kv.shape import KVShape
from edgemoe.layers.dense import SLICE_BYTES
from edgemoe.machine.process import available_memory
from edgemoe.memory.block_counts import divide, share_at
from edgemoe.policy.importance import QUERY_BLOCK
from edgemoe.policy.settings import RunSettings, format_levels
from storage.base import ResidentForm
from storage.device import Device
from storage.errors import DoesNotFit
from storage.forms import P4
from storage.record import RecordGeometry

PREFILL_ROWS = 512
"""Most token rows in one step of a prefill. Fixed, so that an answer does not depend on limits."""

CHUNK = 64
"""Tokens that a delta rule pads a step to a multiple of."""

MINIMUM_EXPERTS = 2
"""Fewest experts the fastest tier must hold: one is computed while another arrives."""

ROUNDING_BYTES = 1 << 26
"""What a device's allocator loses to rounding and to holes, at most."""

GRAPH_BYTES = 1 << 26
"""What a device takes for pieces of a noted step, with what they make of one token; not measured yet."""

PROCESS_BYTES = 500_000_000
"""What the interpreter, torch and transformers take beside every limit, at most."""


@dataclass(frozen=True)
class ModelShape:
    """What a plan needs to know of a model. Sizes in elements unless named bytes."""

    layers: int
    experts: int
    """Over all layers."""
    experts_per_layer: int
    top_k: int
    hidden: int
    intermediate: int
    heads: int
    """Of queries."""
    kv: KVShape
    widest: int
    """Largest side of a dense matrix, those over the vocabulary aside."""
    vocab: int
    dense_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per purpose; they add up to at most the limit."""

    vram_limit_bytes: int
    dram_limit_bytes: int
    dense_bytes: int
    kv_bytes: int
    workspace_bytes: int
    staging_bytes: int
    """In RAM beside both limits: pinned buffers between disk and a device, and what the CPU's kernel for experts in
    DRAM works in."""
    plane_bytes: int
    experts_resident: dict[str, int]
    """level -> experts that plane_bytes holds, were all at that level."""
    minimum_vram_bytes: int
    levels: tuple[int, ...]
    context: int
    vram_blocks: dict[str, int]
    """Block kind's name -> blocks in the VRAM tier."""
    dram_blocks: dict[str, int]
    driver_bytes: int = 0
    """What a device's driver takes of it for the process."""

    def roomy(self, form: ResidentForm, experts: int) -> bool:
        """Whether so many experts, in a form, lie in VRAM at the plan's highest level all at once."""
        return all(self.vram_blocks.get(kind.name, 0) >= experts for kind in form.kinds_at(self.levels[0]))

    @property
    def vram_experts(self) -> int:
        """Experts that the VRAM tier holds at some level."""
        return max(self.vram_blocks.values())

    @property
    def dram_experts(self) -> int:
        """Experts that the DRAM tier holds at some level."""
        return max(self.dram_blocks.values(), default=0)

    @property
    def _beside(self) -> str:
        """A device's tiers may both hold an expert; in RAM those of the second are others."""
        return "" if self.driver_bytes else "more "

    def used_bytes(self, form: ResidentForm) -> int:
        """Bytes of RAM that both tiers' blocks and everything else will take where there is no device; at most the
        limits."""
        blocks = sum(
            kind.size * (self.vram_blocks.get(kind.name, 0) + self.dram_blocks.get(kind.name, 0))
            for kind in form.kinds
        )
        return self.dense_bytes + self.kv_bytes + self.workspace_bytes + blocks

    def as_json(self) -> dict[str, object]:
        """The plan as one JSON object."""
        return asdict(self)

    def lines(self) -> tuple[str, str]:
        """The plan in two lines for people."""
        return (
            f"limit {format_size(self.vram_limit_bytes)}: "
            + (f"driver {format_size(self.driver_bytes)}, " if self.driver_bytes else "")
            + f"dense {format_size(self.dense_bytes)}, "
            f"KV {format_size(self.kv_bytes)} for {self.context} tokens, "
            f"workspace {format_size(self.workspace_bytes)}, experts {format_size(self.plane_bytes)}",
            f"{self.vram_experts} experts resident at {format_levels(self.levels)} bits"
            + (f", {self.dram_experts} {self._beside}in DRAM" if self.dram_experts else "")
            + (f", {format_size(self.staging_bytes)} of RAM for staging" if self.staging_bytes else "")
            + (
                "; with this kernel level 2 saves reads, not memory"
                if 2 in self.levels and P4 in self.vram_blocks
                else ""
            ),
        )


def workspace_bytes(
    shape: ModelShape, geometry: RecordGeometry, context: int, place: torch.device | str = "cpu"
) -> int:
    """Upper estimate of what one step allocates beside weights and KV, bytes.

    The largest of a layer's three parts (attention, a dense product, its experts) on top of what lives
    through all of them; activations are bf16 with float32 copies.
    """
    rows = min(context, PREFILL_ROWS)
    kv = shape.kv
    attention_width = shape.heads * kv.key_dim
    kv_width = kv.heads * kv.key_dim
    through = rows * shape.hidden * (2 + 2 + 4 + 4)
    attention = rows * attention_width * (2 + 4) * 3 + 2 * kv_width * context * (2 + 4)
    attention += rows * context * (1 + 4)
    scored = context * 4 * (kv_width + 3 * shape.heads * min(rows, QUERY_BLOCK))
    attention = max(attention, scored) + (SLICE_BYTES if kv.latent else 0)
    if kv.linear:
        # A chunked delta rule keeps about sixteen float32 arrays of the step's keys and values.
        width = kv.linear.heads * max(kv.linear.key_dim, kv.linear.value_dim)
        attention = max(attention, 16 * 4 * (rows + CHUNK) * width)
    widest = max(attention_width, shape.hidden, shape.widest)
    converted = min(SLICE_BYTES, 4 * shape.hidden * max(widest, shape.vocab))
    product = converted + rows * (widest + converted // (4 * shape.hidden)) * (4 + 2)
    expert_rows = rows * shape.top_k * shape.hidden * 2 + rows * shape.hidden * 4 * 3
    # On a CPU a call of the kernel has one expert, or several of BATCH_ROWS in all; elsewhere all of the layer's.
    together = rows * shape.top_k
    if torch.device(place).type == "cpu":
        together = max(rows, min(BATCH_ROWS, together))
    one_call = together * (shape.hidden * (2 + 4 + 4) + 3 * shape.intermediate * (2 + 4))
    experts = expert_rows + one_call + compute(place).kernel.scratch_bytes(geometry)
    logits = shape.vocab * 4 * 4
    return through + max(attention, product, experts) + logits


def make_plan(
    shape: ModelShape,
    geometry: RecordGeometry,
    form: ResidentForm,
    *,
    vram_limit: int | None,
    dram_limit: int,
    settings: RunSettings,
    context: int,
    device: Device | None = None,
) -> MemoryPlan:
    """Divides the limits.

    Args:
        shape: of the model.
        geometry: of the store.
        form: how experts lie in memory on this device.
        vram_limit: bytes; None takes what everything resident needs, or what the machine has if less.
        dram_limit: bytes for the DRAM tier; 0 for none.
        settings: whose levels are planned for.
        context: tokens of KV.
        device: whose memory the first limit is on; None: it is on RAM.

    Raises:
        DoesNotFit: with the smallest limit that works.
    """
    level = settings.levels[0]
    each = form.bytes_at(level)
    parts = _fixed(shape, geometry, context, device, graphs=settings.graphs)
    fixed = sum(parts.values())
    if vram_limit is None:
        room = device.available_bytes() if device else available_memory() - dram_limit - PROCESS_BYTES
        vram_limit = min(fixed + shape.experts * each, room)
    minimum = fixed + MINIMUM_EXPERTS * each
    if vram_limit < minimum:
        raise _too_small(vram_limit, parts, each, level, context)
    if 0 < dram_limit < each:
        raise _too_small_a_tier(dram_limit, each, level)
    planes = vram_limit - fixed
    vram_blocks, dram_blocks = _blocks(shape, form, settings, planes, dram_limit, both=device is not None)
    return MemoryPlan(
        vram_limit_bytes=vram_limit,
        dram_limit_bytes=dram_limit,
        **parts,
        staging_bytes=_beside_limits(settings, geometry, each, dram_limit, device) if device else 0,
        plane_bytes=planes,
        experts_resident={
            str(bits): min(planes // form.bytes_at(bits), shape.experts)
            for bits in (8, 4, 2)
            if bits <= geometry.max_level
        },
        minimum_vram_bytes=minimum,
        levels=settings.levels,
        context=context,
        vram_blocks=vram_blocks,
        dram_blocks=dram_blocks,
    )


def _too_small(limit: int, parts: Mapping[str, int], each: int, level: int, context: int) -> DoesNotFit:
    listed = ", ".join(f"{name.removesuffix('_bytes')} {size}" for name, size in parts.items() if size)
    minimum = sum(parts.values()) + MINIMUM_EXPERTS * each
    return DoesNotFit(
        f"a limit of {limit} bytes was wanted for {context} tokens of context at level {level}",
        f"{listed} and {MINIMUM_EXPERTS} experts of {each} need {minimum}",
        f"Use --vram-limit {minimum} or more, or a smaller --context",
        minimum=minimum,
    )


def _too_small_a_tier(limit: int, each: int, level: int) -> DoesNotFit:
    return DoesNotFit(
        f"a DRAM tier of {limit} bytes was wanted",
        f"one expert at level {level} takes {each}",
        f"Use --dram-limit {each} or more, or leave it out",
        minimum=each,
    )


def _blocks(
    shape: ModelShape, form: ResidentForm, settings: RunSettings, planes: int, dram_limit: int, *, both: bool
) -> tuple[dict[str, int], dict[str, int]]:
    """Block kind's name -> blocks, of the VRAM tier's `planes` bytes and of the DRAM tier's.

    Args:
        both: an expert may be in both tiers, as on a device; tiers in RAM have it in one of them.
    """
    shares = {kind: share_at(settings, kind.level) for kind in form.kinds_at(settings.levels[0])}
    most = shape.experts if settings.cache else max(shape.top_k, MINIMUM_EXPERTS)
    vram = divide(planes, shares, most, MINIMUM_EXPERTS)
    left = shape.experts - (0 if both else max(vram.values()))
    return vram, divide(dram_limit, shares, left, 1) if dram_limit and left else {}


def _fixed(
    shape: ModelShape, geometry: RecordGeometry, context: int, device: Device | None, *, graphs: bool
) -> dict[str, int]:
    """Field of MemoryPlan -> bytes, of all on the fastest memory that is not experts."""
    workspace = workspace_bytes(shape, geometry, context, device.place if device else "cpu")
    workspace += GRAPH_BYTES if graphs else 0
    return {
        "driver_bytes": device.driver_bytes() if device else 0,
        "dense_bytes": shape.dense_bytes,
        "kv_bytes": shape.kv.bytes_for(context),
        "workspace_bytes": workspace + (ROUNDING_BYTES if device else 0),
    }


def _beside_limits(
    settings: RunSettings, geometry: RecordGeometry, each: int, dram_limit: int, device: Device
) -> int:
    computes = bool(dram_limit) and settings.cpu_experts != "off"
    kernel = beside_device(compute(device.place).layout)
    return staging_buffers(settings) * each + (kernel.scratch_bytes(geometry) if computes else 0)


def staging_buffers(settings: RunSettings) -> int:
    """Experts on their way from disk to a device at a time: each reader fills one while its last is being copied."""
    return 2 * settings.readers
