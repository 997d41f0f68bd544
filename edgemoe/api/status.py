"""The state of a model: how far an answer is, and what is resident, waits, runs and has moved."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from edgemoe.engine.engine import Engine
from edgemoe.engine.request import Request
from edgemoe.engine.scheduler import Scheduler
from edgemoe.experts.use import ExpertUse
from edgemoe.kv.prefix_cache import PrefixCacheCounts
from edgemoe.prefetch.counts import TransferCounts

State = Literal["waiting", "prompt", "decoding", "ended"]
"""Waiting for its KV; its prompt runs; its tokens come; no step will run for it any more."""


@dataclass(frozen=True)
class Progress:
    """How far one answer is, in tokens. Field names are JSON names.

    Args:
        state: whether the answer waits, its prompt runs, its tokens come, or it has ended.
        prompt_tokens: number of tokens of the whole prompt.
        cached_tokens: number of these whose KV was there before.
        done_tokens: number of its tokens that have a KV, cached ones included; and of the step under way as many as
            its layers amount to.
        new_tokens: number of tokens of the answer, so far.
    """

    state: State
    prompt_tokens: int
    cached_tokens: int
    done_tokens: int
    new_tokens: int

    @classmethod
    def of(cls, request: Request) -> Progress:
        """Takes it from a request, which another thread may run."""
        new, done = len(request.trace.token_times), request.length + request.partly
        return cls(_state(request, new), request.prompt, request.cached, min(done, request.prompt), new)


def _state(request: Request, new: int) -> State:
    if request.ended:
        return "ended"
    if request.trace.admitted is None:
        return "waiting"
    return "decoding" if new else "prompt"


@dataclass(frozen=True)
class Status:
    """The state of a model, and its counts since it was loaded.

    Args:
        waiting, running: number of requests.
        memory: purpose -> bytes of the limit that are reserved: driver, dense, workspace, compensators, experts, kv,
            and kept, the KV of ended requests.
        limit_bytes, kv_limit_bytes: the limit of the memory that `peak_bytes` counts, of both tiers without a device;
            the bytes planned for KV.
        peak_bytes: the most memory that was taken (PeakMemory).
        resident: tier (vram, dram) -> level -> experts.
        experts: number of experts of the whole model.
        disk: the contents and counts of the prefix cache; None: there is none.
        moved, use: transfers, and experts by level, of all steps.
        drafts: guesses at further tokens that steps checked, as drafted; of these the right ones, as accepted.
    """

    waiting: int
    running: int
    memory: dict[str, int]
    limit_bytes: int
    kv_limit_bytes: int
    peak_bytes: int
    resident: dict[str, dict[int, int]]
    experts: int
    disk: PrefixCacheCounts | None
    moved: TransferCounts
    use: ExpertUse
    drafts: dict[str, int]

    @classmethod
    def of(cls, engine: Engine, scheduler: Scheduler) -> Status:
        """Takes it from an engine that other threads use."""
        plan, kept, (prefill, decode) = engine.plan, scheduler.kept_bytes, scheduler.totals
        total = prefill + decode
        kv = max(engine.memory.kv_bytes - kept, 0)
        fixed = {
            "driver": plan.driver_bytes,
            "dense": plan.dense_bytes,
            **({"vision": plan.vision_bytes} if plan.vision_bytes else {}),
            "workspace": plan.workspace_bytes + engine.memory.long_step_bytes,
        }
        tiers = {"vram": engine.vram, "dram": engine.dram}
        return cls(
            waiting=scheduler.waiting,
            running=scheduler.running,
            memory={
                **fixed,
                "compensators": plan.compensators_bytes,
                "experts": engine.memory.expert_bytes,
                "kv": kv,
                "kept": kept,
            },
            limit_bytes=plan.limit_bytes(engine.device),
            kv_limit_bytes=plan.kv_bytes,
            peak_bytes=engine.peak.bytes,
            resident={name: dict(Counter(tier.resident().values())) for name, tier in tiers.items() if tier},
            experts=engine.shape.experts,
            disk=scheduler.disk.counts() if scheduler.disk else None,
            moved=total.transfers,
            use=total.use,
            drafts=total.drafts,
        )
