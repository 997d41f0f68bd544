"""Describes a memory plan for people: one line when a model starts, and a table with every part of the limit."""

from __future__ import annotations

from edgemoe.console.sizes import format_size
from edgemoe.memory.plan import MemoryPlan
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.record.forms import P4

LABEL = 17
"""Width of the column of names."""

READ_LATER = "the others are read from the disk when they are needed"


def start_line(plan: MemoryPlan) -> str:
    """Says in one line how much of the model the limit holds.

    Returns:
        such as "memory limit 27 MB: room for 117 of 192 experts at 8 bits or 192 at 4 bits; ...".
    """
    gpu, dram = bool(plan.driver_bytes), plan.dram_limit_bytes
    second = f" and {format_size(dram)} of RAM" if dram else ""
    limit = f"{format_size(plan.vram_limit_bytes)}{' of GPU memory' if gpu else ''}{second}"
    return f"memory limit {limit}: {experts_held(plan)}"


def experts_held(plan: MemoryPlan) -> str:
    """Says how many experts fit into the fastest tier, and into the second one."""
    low, high, every = plan.levels[-1], plan.levels[0], plan.experts
    second = (
        f", {plan.dram_experts} {'' if plan.driver_bytes else 'more '}in RAM" if plan.dram_experts else ""
    )
    if plan.hot_experts is not None:
        held = f"all {every}" if plan.first_experts == every else f"{plan.first_experts} of {every}"
        rest = "" if plan.first_experts == every else f"; {READ_LATER}"
        most = f"the {plan.hot_experts} that are used most at {high}"
        return f"room for {held} experts at {low} bits, {most}{second}{rest}"
    fitting = plan.experts_resident[str(high)]
    if fitting == every:
        return f"all {every} experts fit at {high} bits{second}; each is read from the disk once"
    held = f"room for {fitting} of {every} experts at {high} bits"
    lower = next(
        (level for level in plan.levels[1:] if level and plan.experts_resident[str(level)] > fitting), None
    )
    if lower:
        more = plan.experts_resident[str(lower)]
        held += f" or {'all of them' if more == every else more} at {lower} bits"
    return f"{held}{second}; {READ_LATER}"


def plan_lines(plan: MemoryPlan, settings: RunSettings) -> list[str]:
    """Returns a line for each part of the limits, and one for the bits of experts, each with its name first."""
    return [f"{name:<{LABEL}}{text}" for name, text in plan_parts(plan, settings)]


def plan_parts(plan: MemoryPlan, settings: RunSettings) -> list[tuple[str, str]]:
    """Returns the name and the text of each part of the limits, and of the bits of experts."""
    size = format_size
    parts = [("limit", size(plan.vram_limit_bytes))]
    if plan.driver_bytes:
        parts.append(("  GPU driver", size(plan.driver_bytes)))
    parts += [
        ("  dense weights", f"{size(plan.dense_bytes)}, always in memory"),
    ]
    if plan.vision_bytes:
        parts.append(("  vision", f"{size(plan.vision_bytes)} for pictures; --no-vision leaves it out"))
    parts += [("  KV", _kv(plan)), ("  workspace", _workspace(plan))]
    if plan.compensators_bytes:
        parts.append(("  compensators", _compensators(plan)))
    parts.append(("  experts", _experts(plan)))
    if plan.dram_limit_bytes:
        parts.append(
            ("second tier", f"{size(plan.dram_limit_bytes)} of RAM: room for {plan.dram_experts} experts")
        )
    if plan.staging_bytes:
        parts.append(
            ("outside of it", f"{size(plan.staging_bytes)} of RAM, through which experts go to the GPU")
        )
    parts.append(("bits per weight", _bits(plan, settings)))
    return parts


def _kv(plan: MemoryPlan) -> str:
    """The memory of keys and values, in words."""
    sequences = f"{plan.parallel} conversations of {plan.context} tokens" if plan.parallel > 1 else ""
    whole = f"{format_size(plan.kv_bytes)} for {sequences or f'{plan.context} tokens'}"
    form = "" if plan.kv_cache == "bf16" else f", in {plan.kv_cache}"
    if plan.first_kv_bytes < plan.kv_bytes:
        return f"{format_size(plan.first_kv_bytes)} at first, up to {whole}{form}"
    return f"{whole}{form}"


def _workspace(plan: MemoryPlan) -> str:
    more = (
        f", and {format_size(plan.long_step_bytes)} while a long prompt is read"
        if plan.long_step_bytes
        else ""
    )
    return f"{format_size(plan.workspace_bytes)} for computing{more}"


def _compensators(plan: MemoryPlan) -> str:
    resident, total = plan.compensators_resident_bytes, plan.compensators_total_bytes
    part = (
        f": {format_size(resident)} of {format_size(total)}, the others are streamed"
        if resident < total
        else ""
    )
    return f"{format_size(plan.compensators_bytes)}{part}"


def _experts(plan: MemoryPlan) -> str:
    given = plan.plane_bytes + plan.long_step_bytes + plan.kv_bytes - plan.first_kv_bytes
    if plan.first_experts == plan.experts and plan.experts_bytes < given:
        unused = format_size(given - plan.experts_bytes)
        return f"{format_size(plan.experts_bytes)}: {experts_held(plan)}; {unused} of the limit stays unused"
    less = ""
    if plan.plane_bytes < given:
        less = f", {format_size(plan.plane_bytes)} once KV and a long prompt take all of theirs"
    return f"{format_size(given)}{less}: {experts_held(plan)}"


def _bits(plan: MemoryPlan, settings: RunSettings) -> str:
    """How many bits experts have, and what chooses them."""
    *higher, low = settings.levels
    levels = f"{', '.join(map(str, higher))} or {low}" if higher else str(low)
    if settings.hotness:
        text = f"{low}, and {higher[0]} for the experts that are used most"
    elif not higher:
        text = levels
    elif settings.tpot_target is not None:
        text = f"{levels}, as many as a token in {1000 * settings.tpot_target:g} ms allows"
    elif settings.priced:
        text = f"{levels}, {settings.mean_bits:.2g} on average for experts from the disk; more where memory has them"
    else:
        share = f"{100 * settings.retention:g} %"
        text = f"{higher[-1]} for the {share} of experts that matter most to a token, {low} for the others"
        for above, below in zip(higher[-2::-1], higher[:0:-1], strict=True):
            text += f"; {above} for about {share} of the experts that have {below} or more"
    if 0 in settings.levels:
        text += "; 0 leaves an expert out"
    merged = 2 in plan.levels and P4 in plan.vram_blocks
    return text + ("; with this kernel 2 bits save reads, not memory" if merged else "")
